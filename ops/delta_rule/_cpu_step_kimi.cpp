// Kimi delta attention's decode step: a decay for each channel of K, bounded or not, and a norm
// gated by a sigmoid.
#include <cmath>

#include "delta_step.h"
#include "delta_verify.h"

namespace {

using namespace th;
using step::Call;

struct KimiDelta {
  template <typename T>
  static void decay(const Call& call, const T* a, int64_t j, float* decay) {
    const int64_t first = j * call.k_dim;
    const f32x16 rate = splat(std::exp(step::parameter<T>(call.A_log, call.wide_A_log, j)));
    const f32x16 bound = splat(float(call.gate_lower_bound));
    for_lanes(call.k_dim, [&](int64_t i, int n) TH_LAMBDA {
      const f32x16 bias = step::parameter<T>(call.dt_bias, call.wide_dt_bias, first + i, n);
      const f32x16 x = load(a + first + i, n) + bias;
      const f32x16 g = call.is_bounded ? bound * sigmoid(rate * x) : -rate * softplus(x);
      store(decay + i, exp(g), n);
    });
  }

  // out = weight * (o / rms(o)) * sigmoid(z), rounded once.
  template <typename T>
  static void gated_norm(const Call& call, const T* o, const T* z, T* out) {
    const f32x16 factor = step::norm_factor(call, o);
    for_lanes(call.v_dim, [&](int64_t i, int n) TH_LAMBDA {
      const f32x16 weight = step::parameter<T>(call.norm_weight, call.wide_norm, i, n);
      store(out + i, weight * (load(o + i, n) * factor) * sigmoid(load(z + i, n)), n);
    });
  }
};

}  // namespace

TH_EXPORT_DELTA_STEP(KimiDelta, kimi_delta_step)
