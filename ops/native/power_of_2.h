// 2^x of numbers that are at most 0, in fewer instructions than exp: decays of every channel and state.
#pragma once

#include "simd.h"

namespace th {

// Within 1e-7 relative for x <= 0, not below 2^-126. NaN stays. V: f32x16 or Register.
template <typename V>
TH_INLINE V power_of_2(V x) {
  typedef Vector<int32_t, LANES_OF<V>> Integers;
  const auto all = [](float number) TH_LAMBDA { return number - V{}; };
  x = select(x < -126.0f, all(-126.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const V shift = all(12582912.0f);
  const V shifted = x + shift;
  const V f = x - (shifted - shift);
  V p = all(1.535336145e-4f);
  p = fma(p, f, all(1.339887457e-3f));
  p = fma(p, f, all(9.618437361e-3f));
  p = fma(p, f, all(5.550332471e-2f));
  p = fma(p, f, all(2.402264791e-1f));
  p = fma(p, f, all(6.931472029e-1f));
  p = fma(p, f, all(1.0f));
  return bit_cast<V>(bit_cast<Integers>(p) + (bit_cast<Integers>(shifted) << 23));
}

}  // namespace th
