// Activations of experts to train with on a CPU: rows times the router's weights, and backward.
// A thread has whole rows, so that no result depends on how many there are.
#include "call.h"
#include "softmax.h"

namespace th::experts {

TH_CALL(Call,
  const void *projected, *expert_weights;  // [P, 2 I] in the order of experts, [P] in that of pairs
  const int64_t* order;                    // [P] pair of each row
  const void* dweighted;                   // [P, I], or null: of a forward
  void *weighted, *dprojected, *dweights;  // [P, I], like projected, like expert_weights
  int64_t num_rows, width, has_gate, is_bf16, weights_are_float, num_threads;
  double limit;                     // of gates, and of up to both sides; infinity for none
  double gate_softcap, up_softcap;  // 0 for none
);

// Activations, and their derivatives by gate and up.
struct Activated {
  f32x16 hidden, by_gate, by_up;

  static TH_INLINE Activated of(const Call& call, f32x16 gate, f32x16 up) {
    const f32x16 zero{}, one = splat(1.0f);
    if (!call.has_gate) {
      const f32x16 positive = select(up < zero, zero, up);  // a NaN stays one
      return {positive * positive, zero, 2.0f * positive};
    }
    if (call.gate_softcap != 0) {
      const f32x16 s = sigmoid(gate);
      const f32x16 a = tanh(gate * float(1.0 / call.gate_softcap));
      const f32x16 b = tanh(up * float(1.0 / call.up_softcap));
      const f32x16 factor = a * float(call.gate_softcap), bound = b * float(call.up_softcap);
      return {factor * s * bound, s * (one - a * a + factor * (one - s)) * bound,
              factor * s * (one - b * b)};
    }
    const f32x16 limit = splat(float(call.limit));
    const f32x16 g = select(gate > limit, limit, gate);
    const f32x16 u = select(up > limit, limit, select(up < -limit, -limit, up));
    const f32x16 s = sigmoid(g), act = g * s;
    const f32x16 by_gate = s * (one + g * (one - s)) * u;
    return {act * u, select(gate > limit, zero, by_gate),
            select(up > limit, zero, select(up < -limit, zero, act))};
  }
};

template <typename T, typename W>
void row(const Call& call, int64_t at) {
  const int64_t I = call.width, pair = call.order[at];
  const T* gates = (const T*)call.projected + at * (1 + call.has_gate) * I;
  const T* ups = gates + call.has_gate * I;
  const f32x16 weight = splat(to_float(((const W*)call.expert_weights)[pair]));
  T* weighted = (T*)call.weighted + at * I;
  if (!call.dweighted) {
    for_lanes(I, [&](int64_t i, int n) TH_LAMBDA {
      const Activated a = Activated::of(call, load(gates + i, n), load(ups + i, n));
      store(weighted + i, a.hidden * weight, n);
    });
    return;
  }
  const T* dweighted = (const T*)call.dweighted + at * I;
  T* dgates = (T*)call.dprojected + at * (1 + call.has_gate) * I;
  f32x16 dweight{};
  for_lanes(I, [&](int64_t i, int n) TH_LAMBDA {
    const Activated a = Activated::of(call, load(gates + i, n), load(ups + i, n));
    const f32x16 d = load(dweighted + i, n);
    dweight = fma(d, a.hidden, dweight);
    store(dgates + call.has_gate * I + i, d * weight * a.by_up, n);
    if (call.has_gate) store(dgates + i, d * weight * a.by_gate, n);
    store(weighted + i, a.hidden * weight, n);
  });
  store((W*)call.dweights + pair, splat(sum(dweight)), 1);
}

template <typename T, typename W>
void rows(const Call& call) {
#pragma omp parallel for num_threads(call.num_threads)
  for (int64_t at = 0; at < call.num_rows; ++at) row<T, W>(call, at);
}

}  // namespace th::experts

TH_EXPORT_CALL(experts_activation, th::experts::Call) {
  using namespace th::experts;
  if (!call->is_bf16)
    rows<float, float>(*call);
  else
    call->weights_are_float ? rows<th::bf16, float>(*call) : rows<th::bf16, th::bf16>(*call);
  return true;
}
