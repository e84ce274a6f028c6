// The recurrent form: one token at a time, one pass over the state of a head per token.
#pragma once

#include <algorithm>

#include "call.h"

namespace gdr {

// One token on one row of a head's state: decay it, correct it towards v, read it with q.
template <typename T>
TH_INLINE void step_row(int64_t k_dim, const float* q, const float* k, const T* v, float decay,
                        float beta, float* row, T* out) {
  f32x16 sum{};
  th::for_lanes(k_dim, [&](int64_t i, int n) TH_LAMBDA {
    sum = th::fma(th::load(row + i, n), th::load(k + i, n), sum);
  });
  const f32x16 u = th::splat(beta * (th::to_float(*v) - decay * th::sum(sum)));
  sum = f32x16{};
  th::for_lanes(k_dim, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 s = th::fma(u, th::load(k + i, n), th::load(row + i, n) * decay);
    th::store(row + i, s, n);
    sum = th::fma(s, th::load(q + i, n), sum);
  });
  *out = th::from_float<T>(th::sum(sum));
}

// The same on ROWS rows of VECTORS whole vectors, unrolled. So few rows at a time, memory sees one
// stream in order and runs at nearly its full rate; with several rows side by side, or prefetched
// by hand, it was measured at half of that.
template <int ROWS, int VECTORS, typename T>
TH_INLINE void step_rows(const float* q, const float* k, const T* v, float decay, float beta,
                         float* state, T* out) {
  f32x16 row[ROWS][VECTORS], sum[ROWS] = {}, u[ROWS];
#pragma GCC unroll 16
  for (int i = 0; i < VECTORS; ++i) {
    const f32x16 k_i = th::load(k + i * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      row[r][i] = th::load(state + (r * VECTORS + i) * LANES);
      sum[r] = th::fma(row[r][i], k_i, sum[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    u[r] = th::splat(beta * (th::to_float(v[r]) - decay * th::sum(sum[r])));
    sum[r] = f32x16{};
  }
#pragma GCC unroll 16
  for (int i = 0; i < VECTORS; ++i) {
    const f32x16 k_i = th::load(k + i * LANES), q_i = th::load(q + i * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const f32x16 s = th::fma(u[r], k_i, row[r][i] * decay);
      th::store(state + (r * VECTORS + i) * LANES, s);
      sum[r] = th::fma(s, q_i, sum[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) out[r] = th::from_float<T>(th::sum(sum[r]));
}

// One token on a whole head. VECTORS is k_dim / LANES where rows fit in registers, else 0.
template <int VECTORS, typename T>
void step_head(int64_t k_dim, int64_t v_dim, const float* q, const float* k, const T* v,
               float decay, float beta, float* state, T* out) {
  int64_t i = 0;
  if constexpr (VECTORS > 0) {
    constexpr int ROWS = LANES / VECTORS;
    for (; i + ROWS <= v_dim; i += ROWS)
      step_rows<ROWS, VECTORS>(q, k, v + i, decay, beta, state + i * k_dim, out + i);
  }
  for (; i < v_dim; ++i) step_row(k_dim, q, k, v + i, decay, beta, state + i * k_dim, out + i);
}

template <typename T>
auto choose_step(int64_t k_dim) {
  switch (k_dim) {
    case 64: return step_head<4, T>;
    case 96: return step_head<6, T>;
    case 128: return step_head<8, T>;
    case 192: return step_head<12, T>;
    case 256: return step_head<16, T>;
    default: return step_head<0, T>;
  }
}

// All tokens of one sequence on value head j. `keys` holds 2 * k_dim floats.
template <typename T>
void run_recurrent(const Sequence<T>& seq, int64_t j, float* keys) {
  const Call& call = seq.call;
  const int64_t k_dim = call.k_dim, v_dim = call.v_dim;
  const int64_t h = j / (call.num_v_heads / call.num_k_heads);
  const auto step = choose_step<T>(k_dim);
  float *state = seq.state(j), *q = keys, *k = keys + k_dim;
  if (!seq.has_initial_state) std::fill(state, state + v_dim * k_dim, 0.0f);
  for (int64_t t = 0; t < seq.length; ++t) {
    load_key(seq.q(t, h), k_dim, call.qk_l2norm, call.scale, q);
    load_key(seq.k(t, h), k_dim, call.qk_l2norm, 1.0f, k);
    step(k_dim, v_dim, q, k, seq.v(t, j), std::exp(seq.g(t, j)), seq.beta(t, j), state,
         seq.out(t, j));
  }
}

}  // namespace gdr
