// What a thread works in.
#pragma once

#include <cstdint>
#include <memory>

#include "simd.h"

namespace th {

// Uninitialised floats that start on a cache line, so that no register is loaded from two lines.
class AlignedFloats {
 public:
  explicit AlignedFloats(int64_t n) : lines_(new Line[(n + LANES - 1) / LANES]) {}
  float* data() { return reinterpret_cast<float*>(lines_.get()); }
  const float* data() const { return reinterpret_cast<const float*>(lines_.get()); }

 private:
  struct alignas(64) Line {
    float lanes[LANES];
  };
  std::unique_ptr<Line[]> lines_;
};

}  // namespace th
