// Losses of rows of logits on a CPU, whose gradients take their place. A thread has whole rows: one
// pass finds the maximum, one the exponentials, one writes, when the row is still in the cache.
#include "aligned_floats.h"
#include "call.h"
#include "softmax.h"

namespace th::cross_entropy {

constexpr int64_t IGNORED = -100;

TH_CALL(Call,
  void* logits;            // [R, V]
  const int64_t* targets;  // [R]
  float* losses;           // [R], 0 of rows without one
  int64_t num_rows, width, differentiates, is_bf16, num_threads;
  double softcap;          // 0 for none
);

// `scratch` [V] is for exponentials.
template <typename T>
void row(const Call& call, int64_t at, float* scratch) {
  const int64_t V = call.width, target = call.targets[at];
  const float cap = float(call.softcap), inverse_cap = cap != 0 ? 1.0f / cap : 0.0f;
  T* z = (T*)call.logits + at * V;
  if (target == IGNORED) {
    call.losses[at] = 0;
    if (call.differentiates) for_lanes(V, [&](int64_t i, int n) { store(z + i, f32x16{}, n); });
    return;
  }
  f32x16 largest = splat(NO_KEY);
  for_lanes(V, [&](int64_t i, int n) TH_LAMBDA {
    f32x16 x = load(z + i, n);
    if (cap != 0) {
      x = cap * tanh(x * inverse_cap);
      store(scratch + i, x, n);
    }
    if (n < LANES) x = select(lane_numbers() < n, x, splat(NO_KEY));
    largest = max(x, largest);
  });
  const float shift = max(largest);
  const float of_target = cap != 0 ? scratch[target] : to_float(z[target]);
  f32x16 sums{};
  for_lanes(V, [&](int64_t i, int n) TH_LAMBDA {
    f32x16 e = exp((cap != 0 ? load(scratch + i, n) : load(z + i, n)) - shift);
    if (n < LANES) e = select(lane_numbers() < n, e, f32x16{});
    store(scratch + i, e, n);
    sums += e;
  });
  const float total = sum(sums), inverse = 1.0f / total;
  call.losses[at] = std::log(total) + shift - of_target;
  if (!call.differentiates) return;
  const T logit = z[target];
  for_lanes(V, [&](int64_t i, int n) TH_LAMBDA {
    f32x16 p = load(scratch + i, n) * inverse;
    if (cap != 0) {
      const f32x16 bound = tanh(load(z + i, n) * inverse_cap);
      p *= 1.0f - bound * bound;
    }
    store(z + i, p, n);
  });
  float p = scratch[target] * inverse - 1.0f;
  if (cap != 0) {
    const float bound = std::tanh(to_float(logit) * inverse_cap);
    p *= 1.0f - bound * bound;
  }
  z[target] = from_float<T>(p);
}

template <typename T>
void rows(const Call& call) {
#pragma omp parallel num_threads(int(call.num_threads))
  {
    AlignedFloats scratch(call.width);
#pragma omp for schedule(static)
    for (int64_t at = 0; at < call.num_rows; ++at) row<T>(call, at, scratch.data());
  }
}

}  // namespace th::cross_entropy

TH_EXPORT_CALL(cross_entropy, th::cross_entropy::Call) {
  using namespace th::cross_entropy;
  call->is_bf16 ? rows<th::bf16>(*call) : rows<float>(*call);
  return true;
}
