// Sums that are kept divided by the exponential of the largest exponent in them.
#pragma once

#include "simd.h"

namespace th::wkv {

// The exponent of a state of nothing: sums have no part of it, whatever they decay by.
constexpr float NOTHING = -1e38f;

// Of some channels, divided by e^exponent.
struct Sums {
  f32x16 numerator, denominator, exponent;

  // With values of weight e^own, by the larger of both exponents: the other's factor is below 1.
  TH_INLINE Sums with(f32x16 own, f32x16 above, f32x16 below) const {
    const f32x16 lead = exponent - own;
    const f32x16 factor = exp(select(lead > 0.0f, -lead, lead));
    const f32x16 before = select(lead > 0.0f, splat(1.0f), factor);
    const f32x16 added = select(lead > 0.0f, factor, splat(1.0f));
    return {fma(added, above, before * numerator), fma(before, denominator, added * below),
            select(lead > 0.0f, exponent, own)};
  }
  // With a value of weight e^own.
  TH_INLINE Sums with(f32x16 own, f32x16 value) const { return with(own, value, splat(1.0f)); }
};

}  // namespace th::wkv
