// The gated delta rule's decode step: one decay for a head, and a norm gated by silu or a sigmoid.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "delta_step.h"
#include "delta_verify.h"

namespace {

using namespace th;
using step::Call;

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
TH_INLINE f32x16 rounded(f32x16 x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  else return widen(narrow(x));
}

// out = weight * (o / rms(o)) * gate(z): the weight is applied to what is rounded, and the product
// rounded where both are in the op's dtype.
template <bool WIDE, typename T>
void norm_and_gate(const Call& call, const T* o, const T* z, T* out) {
  const f32x16 factor = step::norm_factor(call, o);
  const auto weight = (const std::conditional_t<WIDE, float, T>*)call.norm_weight;
  for_lanes(call.v_dim, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 normed = rounded<T>(load(o + i, n) * factor);
    const f32x16 product = load(weight + i, n) * normed;
    const f32x16 weighted = WIDE ? product : rounded<T>(product);
    const f32x16 gate = load(z + i, n);
    store(out + i, weighted * (call.sigmoid_gate ? sigmoid(gate) : silu(gate)), n);
  });
}

struct GatedDelta {
  template <typename T>
  static void decay(const Call& call, const T* a, int64_t j, float* decay) {
    const float rate = std::exp(step::parameter<T>(call.A_log, call.wide_A_log, j));
    const float bias = step::parameter<T>(call.dt_bias, call.wide_dt_bias, j);
    std::fill(decay, decay + call.k_dim, std::exp(-rate * softplus(to_float(a[j]) + bias)));
  }

  template <typename T>
  static void gated_norm(const Call& call, const T* o, const T* z, T* out) {
    call.wide_norm ? norm_and_gate<true>(call, o, z, out) : norm_and_gate<false>(call, o, z, out);
  }
};

}  // namespace

TH_EXPORT_DELTA_STEP(GatedDelta, gated_delta_step)
