// One token of the scalar-decay recurrence: one pass over some rows of a state.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace th::scalar_decay {

// One token on one head, from some row of its state on.
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
      k[i] = load(token.k + i * LANES), q[i] = load(token.q + i * LANES) * token.scale;
  }
  TH_INLINE f32x16 advance(float* s, float decay, float u) const {
    f32x16 sum{};
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) {
      const f32x16 s_i = fma(load(s + i * LANES), splat(decay), k[i] * u);
      store(s + i * LANES, s_i);
      sum = fma(s_i, q[i], sum);
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
      const f32x16 k = load(token.k + i, n), q = load(token.q + i, n) * token.scale;
      const f32x16 s_i = fma(load(s + i, n), splat(decay), k * u);
      store(s + i, s_i, n);
      sum = fma(s_i, q, sum);
    }
    return sum;
  }
};

// Calls body(r) for each row r < n: all in turn, or a row of each of `streams` in turn.
template <typename Body>
TH_INLINE void for_rows(int64_t n, int64_t streams, Body body) {
  const int64_t length = (n + streams - 1) / streams;
  for (int64_t first = 0; first < length; ++first)
    for (int64_t r = first; r < n; r += length) body(r);
}

constexpr int64_t MAX_ROWS = 64;

// One token on n <= MAX_ROWS rows of a head's state, in so many streams. No result depends on them.
template <int VECTORS, typename T>
void step_rows(const Token<T>& token, int64_t k_dim, int64_t n, int64_t streams, float* state) {
  float u[MAX_ROWS];
  for_lanes(n, [&](int64_t i, int m) TH_LAMBDA {
    store(u + i, load(token.v + i, m) * token.dt, m);
  });
  const Row<VECTORS, T> row(token, k_dim);
  f32x16 sums[MAX_ROWS / LANES][LANES];
  for_rows(n, streams, [&](int64_t r) TH_LAMBDA {
    sums[r / LANES][r % LANES] = row.advance(state + r * k_dim, token.decay, u[r]);
  });
  for_lanes(n, [&](int64_t i, int m) TH_LAMBDA {
    f32x16(&products)[LANES] = sums[i / LANES];
    for (int lane = m; lane < LANES; ++lane) products[lane] = f32x16{};
    const f32x16 v = load(token.v + i, m);
    store(token.out + i, fma(v, splat(token.D), sum16(products)), m);
  });
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

}  // namespace th::scalar_decay
