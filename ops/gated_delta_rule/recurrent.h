// The recurrent form: one token at a time, one pass over the state of a head per token.
#pragma once

#include <algorithm>

#include "call.h"

namespace gdr {

// Rows of the state taken together: they share the loads of k and q, and their sums overlap.
constexpr int STATE_ROWS = 4;

// One token on R rows of a head's state: decay them, correct them towards v, read them with q.
// The rows are read once from memory; what follows finds them in L1.
template <int R, typename T>
TH_INLINE void step_rows(int64_t k_dim, const float* q, const float* k, const T* v, float decay,
                         float beta, float* state, T* out) {
  f32x16 sums[R] = {};
  for (int64_t i = 0; i < k_dim; i += LANES) {
    const int n = int(k_dim - i);
    const f32x16 k_i = th::load(k + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      sums[r] = th::fma(th::load(state + r * k_dim + i, n), k_i, sums[r]);
  }
  f32x16 u[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    u[r] = th::splat(beta * (th::to_float(v[r]) - decay * th::sum(sums[r])));
    sums[r] = f32x16{};
  }
  for (int64_t i = 0; i < k_dim; i += LANES) {
    const int n = int(k_dim - i);
    const f32x16 k_i = th::load(k + i, n), q_i = th::load(q + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* row = state + r * k_dim + i;
      const f32x16 s = th::fma(u[r], k_i, th::load(row, n) * decay);
      th::store(row, s, n);
      sums[r] = th::fma(s, q_i, sums[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) out[r] = th::from_float<T>(th::sum(sums[r]));
}

// All tokens of one sequence on value head j. `keys` holds 2 * k_dim floats.
template <typename T>
void run_recurrent(const Sequence<T>& seq, int64_t j, float* keys) {
  const Call& call = seq.call;
  const int64_t k_dim = call.k_dim, v_dim = call.v_dim;
  const int64_t h = j / (call.num_v_heads / call.num_k_heads);
  float *state = seq.state(j), *q = keys, *k = keys + k_dim;
  if (!seq.has_initial_state) std::fill(state, state + v_dim * k_dim, 0.0f);
  for (int64_t t = 0; t < seq.length; ++t) {
    load_key(seq.q(t, h), k_dim, call.qk_l2norm, call.scale, q);
    load_key(seq.k(t, h), k_dim, call.qk_l2norm, 1.0f, k);
    const T* v = seq.v(t, j);
    T* out = seq.out(t, j);
    const float decay = std::exp(seq.g(t, j)), beta = seq.beta(t, j);
    int64_t i = 0;
    for (; i + STATE_ROWS <= v_dim; i += STATE_ROWS)
      step_rows<STATE_ROWS>(k_dim, q, k, v + i, decay, beta, state + i * k_dim, out + i);
    for (; i < v_dim; ++i)
      step_rows<1>(k_dim, q, k, v + i, decay, beta, state + i * k_dim, out + i);
  }
}

}  // namespace gdr
