// The recurrent form of a delta rule: one pass over the state of a head per token.
#pragma once

#include <algorithm>
#include <type_traits>

#include "delta_rule_call.h"

namespace th::delta {

// What a token does to the state of a head, by channel of K.
struct Token {
  const float *decay, *q, *k;
  const float* read;  // k . decay: what k reads from the state before it has decayed
  float beta;
};

// How far ahead of its use a state in one stream is fetched, to L2, in floats: the hardware's own
// prefetching stops at each page and while the thread computes.
constexpr int64_t AHEAD = 2048;

// One token on one row of a head's state: decay it, correct it towards v, read it with q.
template <typename T>
TH_INLINE void step_row(int64_t k_dim, const Token& token, const T* v, float* row, T* out) {
  f32x16 sum{};
  for_lanes(k_dim, [&](int64_t i, int n) TH_LAMBDA {
    sum = fma(load(row + i, n), load(token.read + i, n), sum);
  });
  const f32x16 u = splat(token.beta * (to_float(*v) - th::sum(sum)));
  sum = f32x16{};
  for_lanes(k_dim, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 s = fma(load(row + i, n), load(token.decay + i, n), u * load(token.k + i, n));
    __builtin_prefetch(row + i + AHEAD, 0, 2);
    store(row + i, s, n);
    sum = fma(s, load(token.q + i, n), sum);
  });
  *out = from_float<T>(th::sum(sum));
}

// The same on ROWS rows of VECTORS whole vectors, unrolled; they lie so many rows apart: one, or each
// in a stream of its own.
template <int ROWS, int VECTORS, bool IN_STREAMS, typename T>
TH_INLINE void step_rows(const Token& token, const T* v, float* state, T* out, int64_t apart) {
  f32x16 row[ROWS][VECTORS], sum[ROWS] = {}, u[ROWS];
  const int64_t stride = apart * VECTORS * LANES;
#pragma GCC unroll 16
  for (int i = 0; i < VECTORS; ++i) {
    const f32x16 read = load(token.read + i * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      row[r][i] = load(state + r * stride + i * LANES);
      sum[r] = fma(row[r][i], read, sum[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    u[r] = splat(token.beta * (to_float(v[r * apart]) - th::sum(sum[r])));
    sum[r] = f32x16{};
  }
#pragma GCC unroll 16
  for (int i = 0; i < VECTORS; ++i) {
    const f32x16 decay = load(token.decay + i * LANES);
    const f32x16 k = load(token.k + i * LANES), q = load(token.q + i * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const f32x16 s = fma(row[r][i], decay, u[r] * k);
      float* to = state + r * stride + i * LANES;
      if constexpr (!IN_STREAMS) __builtin_prefetch(to + AHEAD, 0, 2);
      store(to, s);
      sum[r] = fma(s, q, sum[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) out[r * apart] = from_float<T>(th::sum(sum[r]));
}

// The same of rows that registers do not hold: they are loaded again, from L1.
template <int ROWS, bool IN_STREAMS, typename T>
TH_INLINE void step_long_rows(int64_t k_dim, const Token& token, const T* v, float* state, T* out,
                              int64_t apart) {
  f32x16 sum[ROWS] = {};
  float u[ROWS];
  const int64_t stride = apart * k_dim;
  for (int64_t i = 0; i < k_dim; i += LANES) {
    const f32x16 read = load(token.read + i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) sum[r] = fma(load(state + r * stride + i), read, sum[r]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    u[r] = token.beta * (to_float(v[r * apart]) - th::sum(sum[r]));
    sum[r] = f32x16{};
  }
  for (int64_t i = 0; i < k_dim; i += LANES) {
    const f32x16 decay = load(token.decay + i), k = load(token.k + i), q = load(token.q + i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      float* to = state + r * stride + i;
      const f32x16 s = fma(load(to), decay, k * u[r]);
      if constexpr (!IN_STREAMS) __builtin_prefetch(to + AHEAD, 0, 2);
      store(to, s);
      sum[r] = fma(s, q, sum[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) out[r * apart] = from_float<T>(th::sum(sum[r]));
}

// One token on a whole head, in so many streams: 1, or a multiple of the rows at a time. VECTORS is
// k_dim / LANES where rows fit in registers, else 0.
template <int VECTORS, typename T>
void step_head(int64_t k_dim, int64_t v_dim, int64_t streams, const Token& token, const T* v,
               float* state, T* out) {
  int64_t i = 0;
  if constexpr (VECTORS > 0) {
    constexpr bool IS_HELD = SUMS >= LANES;
    constexpr int ROWS = IS_HELD ? SUMS / VECTORS : SUMS;
    const auto step = [&](auto in_streams, int64_t r, int64_t apart) TH_LAMBDA {
      float* rows = state + r * k_dim;
      if constexpr (IS_HELD)
        step_rows<ROWS, VECTORS, in_streams>(token, v + r, rows, out + r, apart);
      else
        step_long_rows<ROWS, in_streams>(k_dim, token, v + r, rows, out + r, apart);
    };
    const int64_t length = v_dim / streams;
    if (streams > 1)
      for (; i < length; ++i)
        for (int64_t stream = 0; stream < streams; stream += ROWS)
          step(std::true_type{}, stream * length + i, length);
    i *= streams;
    for (; i + ROWS <= v_dim; i += ROWS) step(std::false_type{}, i, 1);
  }
  for (; i < v_dim; ++i) step_row(k_dim, token, v + i, state + i * k_dim, out + i);
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

// Floats of scratch that run_recurrent needs.
inline int64_t token_floats(int64_t k_dim) { return 4 * k_dim; }

// All tokens of one sequence on value head j, whose state they advance.
template <typename Rule, typename T>
void run_recurrent(const Sequence<T>& seq, int64_t j, float* state, float* scratch) {
  const Call& call = seq.call;
  const int64_t k_dim = call.k_dim, v_dim = call.v_dim, h = seq.key_head(j);
  const auto step = choose_step<T>(k_dim);
  float *decay = scratch, *q = decay + k_dim, *k = q + k_dim, *read = k + k_dim;
  for (int64_t t = 0; t < seq.length; ++t) {
    load_key(seq.q(t, h), k_dim, call.qk_l2norm, call.scale, q);
    load_key(seq.k(t, h), k_dim, call.qk_l2norm, 1.0f, k);
    Rule::decay(seq, t, j, decay);
    for_lanes(k_dim, [&](int64_t i, int n) TH_LAMBDA {
      store(read + i, load(k + i, n) * load(decay + i, n), n);
    });
    step(k_dim, v_dim, 1, Token{decay, q, k, read, seq.beta(t, j)}, seq.v(t, j), state, seq.out(t, j));
  }
}

}  // namespace th::delta
