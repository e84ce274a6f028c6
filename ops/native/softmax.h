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

// tanh within 2e-7: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
TH_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 magnitude = max(x, -x), z = x * x;
  f32x16 p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  p = fma(p * z, x, x);
  const f32x16 far = 1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f);
  return select(magnitude < splat(0.625f), p, select(x < splat(0.0f), -far, far));
}

template <typename To, typename From>
TH_INLINE void scale_row(To* to, const From* from, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(to + i, load(from + i) * factor);
}

}  // namespace th
