// The online softmax: what a row keeps of the logits that it has seen, block by block.
#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

namespace th {

constexpr float NO_KEY = -std::numeric_limits<float>::infinity();

// Maximum and sum of exponentials of the logits that a row has seen.
struct RowState {
  float max = NO_KEY, sum = 0;
  float lse() const { return max + std::log(sum); }
};

template <typename To, typename From>
TH_INLINE void scale_row(To* to, const From* from, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(to + i, load(from + i) * factor);
}

}  // namespace th
