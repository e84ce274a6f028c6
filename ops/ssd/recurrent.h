// The recurrent form: one pass, in address order, over a few rows of a state per token.
#pragma once

#include <algorithm>
#include <cmath>

#include "sequence.h"

namespace ssd {

// One token on one head, seen by LANES rows of its state.
template <typename T>
struct Token {
  const T *q, *k, *v;
  float decay, dt, D, scale;
  T* out;
};

// A row: s = decay s + u k, and its product with q, lane by lane. VECTORS is k_dim / LANES where it
// is known, so that k and q stay in registers; else 0.
template <int VECTORS, typename T>
struct Row {
  f32x16 k[VECTORS], q[VECTORS];

  Row(const Token<T>& token, int64_t) {
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i)
      k[i] = th::load(token.k + i * LANES), q[i] = th::load(token.q + i * LANES) * token.scale;
  }
  TH_INLINE f32x16 advance(float* s, float decay, float u) const {
    f32x16 sum{};
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) {
      const f32x16 s_i = th::fma(th::splat(u), k[i], th::load(s + i * LANES) * decay);
      th::store(s + i * LANES, s_i);
      sum = th::fma(s_i, q[i], sum);
    }
    return sum;
  }
};

template <typename T>
struct Row<0, T> {
  const Token<T>& token;
  int64_t k_dim;

  Row(const Token<T>& token, int64_t k_dim) : token(token), k_dim(k_dim) {}
  TH_INLINE f32x16 advance(float* s, float decay, float u) const {
    f32x16 sum{};
    for (int64_t i = 0; i < k_dim; i += LANES) {
      const int n = int(std::min<int64_t>(LANES, k_dim - i));
      const f32x16 k = th::load(token.k + i, n), q = th::load(token.q + i, n) * token.scale;
      const f32x16 s_i = th::fma(th::splat(u), k, th::load(s + i, n) * decay);
      th::store(s + i, s_i, n);
      sum = th::fma(s_i, q, sum);
    }
    return sum;
  }
};

// One token on `n` rows of a head's state, n <= LANES.
template <int VECTORS, typename T>
void step_rows(const Token<T>& token, int64_t k_dim, int n, float* state) {
  const f32x16 v = th::load(token.v, n);
  float u[LANES];
  th::store(u, v * token.dt);
  const Row<VECTORS, T> row(token, k_dim);
  f32x16 sums[LANES] = {};
  for (int r = 0; r < n; ++r) sums[r] = row.advance(state + r * k_dim, token.decay, u[r]);
  th::store(token.out, th::fma(v, th::splat(token.D), th::sum16(sums)), n);
}

template <typename T>
auto choose_step(int64_t k_dim) {
  switch (k_dim) {
    case 64: return step_rows<4, T>;
    case 96: return step_rows<6, T>;
    case 128: return step_rows<8, T>;
    case 256: return step_rows<16, T>;
    default: return step_rows<0, T>;
  }
}

// All tokens of one sequence on head h, for a few rows of its state, which they advance, after the
// other.
template <typename T>
void run_recurrent(const Sequence<T>& seq, int64_t h, float* state) {
  const Call& call = seq.call;
  const int64_t k_dim = call.k_dim, v_dim = call.v_dim, i = seq.key_head(h);
  const auto step = choose_step<T>(k_dim);
  for (int64_t r = 0; r < v_dim; r += LANES)
    for (int64_t t = 0; t < seq.length; ++t) {
      const Token<T> token{seq.q(t, i),  seq.k(t, i), seq.v(t, h) + r,   std::exp(seq.g(t, h)),
                           seq.dt(t, h), seq.D(h),    float(call.scale), seq.out(t, h) + r};
      step(token, k_dim, int(std::min<int64_t>(LANES, v_dim - r)), state + r * k_dim);
    }
}

}  // namespace ssd
