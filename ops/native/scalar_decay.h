// One token of the scalar-decay recurrence: one pass over some rows of a state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

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

// R rows, `apart` floats from one another, so that a vector of k and q is loaded once for them: where
// registers do not hold all of k and q.
template <int R>
TH_NOINLINE void advance_rows(const float* k, const float* q, int64_t k_dim, float* state,
                              int64_t apart, float decay, const float (&u)[R], f32x16 (&sums)[R]) {
  f32x16 acc[R] = {};
  for (int64_t i = 0; i < k_dim; i += LANES) {
    const f32x16 k_i = load(k + i), q_i = load(q + i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* s = state + r * apart + i;
      const f32x16 s_i = fma(load(s), splat(decay), k_i * u[r]);
      store(s, s_i);
      acc[r] = fma(s_i, q_i, acc[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = acc[r];
}

// The same of n rows, where registers do not hold all of k and q.
template <int VECTORS, typename T>
TH_INLINE void advance_long_rows(const Token<T>& token, int64_t n, int64_t streams, const float* u,
                                 float* state, f32x16* sums) {
  constexpr int64_t R = SUMS, K = VECTORS * LANES;
  float k[K], q[K];
  for (int64_t i = 0; i < K; i += LANES)
    store(k + i, load(token.k + i)), store(q + i, load(token.q + i) * token.scale);
  const auto advance = [&](auto rows, int64_t r, int64_t apart) {
    constexpr int COUNT = decltype(rows)::value;
    float added[COUNT];
    f32x16 read[COUNT];
    for (int i = 0; i < COUNT; ++i) added[i] = u[r + i * apart];
    advance_rows<COUNT>(k, q, K, state + r * K, apart * K, token.decay, added, read);
    for (int i = 0; i < COUNT; ++i) sums[r + i * apart] = read[i];
  };
  const auto several = std::integral_constant<int, R>{};
  const auto one = std::integral_constant<int, 1>{};
  const int64_t apart = streams >= R && n % streams == 0 ? n / streams : 1;
  const int64_t whole = n / (R * apart) * R * apart;
  for (int64_t first = 0; first < apart; ++first)
    for (int64_t r = first; r < whole; r += R * apart) advance(several, r, apart);
  for (int64_t r = whole; r < n; ++r) advance(one, r, 1);
}

// One token on n <= MAX_ROWS rows of a head's state, in so many streams. No result depends on them.
template <int VECTORS, typename T>
void step_rows(const Token<T>& token, int64_t k_dim, int64_t n, int64_t streams, float* state) {
  float u[MAX_ROWS];
  for_lanes(n, [&](int64_t i, int m) TH_LAMBDA {
    store(u + i, load(token.v + i, m) * token.dt, m);
  });
  f32x16 sums[MAX_ROWS / LANES][LANES];
  if constexpr (VECTORS > 0 && SUMS < LANES) {
    advance_long_rows<VECTORS>(token, n, streams, u, state, sums[0]);
  } else {
    const Row<VECTORS, T> row(token, k_dim);
    for_rows(n, streams, [&](int64_t r) TH_LAMBDA {
      sums[r / LANES][r % LANES] = row.advance(state + r * k_dim, token.decay, u[r]);
    });
  }
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
