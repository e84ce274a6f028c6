// What the forward and the backward of real-gated linear recurrent units make of a token's gates.
#pragma once

#include "simd.h"

namespace th::lru {

struct Decay {
  f32x16 kept, lost;  // e^x and 1 - e^x

  // For x <= 0. Near 0 by the series of 1 - e^x, where the difference has no digits left: a decay is
  // within half a rounding there, as over many tokens it must be.
  static TH_INLINE Decay of(f32x16 x) {
    f32x16 series = splat(1.0f / 5040);
    float factorial = 5040;
#pragma GCC unroll 6
    for (int n = 7; n > 1; --n) {
      factorial /= float(n);
      series = fma(series, x, splat(1.0f / factorial));
    }
    const f32x16 lost = -x * series, kept = exp(x);
    const auto is_near = x > -0.25f;
    return {select(is_near, 1.0f - lost, kept), select(is_near, lost, 1.0f - kept)};
  }
};

// Gates of some channels, and what follows from them.
struct Gated {
  f32x16 input, recurrent, decay, scale;

  // Both gates of a channel lie head_dim apart.
  template <typename T>
  static TH_INLINE Gated of(const T* gates, int64_t head_dim, f32x16 log_a, int n) {
    const f32x16 input = sigmoid(load(gates, n)), recurrent = sigmoid(load(gates + head_dim, n));
    const Decay decay = Decay::of(recurrent * log_a);
    return {input, recurrent, decay.kept, sqrt(decay.lost * (1.0f + decay.kept))};
  }
};

}  // namespace th::lru
