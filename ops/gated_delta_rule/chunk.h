// The chunk form: products of small matrices that stay in L1 and L2; see README.md.
//
// A thread takes one sequence and the value heads of (a part of) one key head, and walks over the
// chunks. The state of a head is kept in scratch as panels (state_panels.h); columns of V are
// independent of each other, so a panel goes through a whole chunk while it is in L1.
#pragma once

#include <algorithm>
#include <cmath>

#include "call.h"
#include "gemm.h"
#include "recurrent.h"
#include "state_panels.h"

namespace gdr {

using th::PANEL;
using th::round_up;

constexpr int BLOCK = 8;  // rows solved in registers; a chunk is padded to a multiple of it
// Up to this length, walking token by token costs less than bringing a state to scratch and back.
constexpr int64_t RECURRENT_LENGTH = 16;
// exp of it is 0 in float32; a finite stand-in for a decay of -inf, whose differences are NaN.
constexpr double FULL_DECAY = -1e4;

// The buffers of one thread. A row of a [C, C] matrix is C long whatever the chunk's own size.
struct Scratch {
  float* keys;             // [2 C, K]: rows of k, then rows of q
  float* products;         // [2 C, C]: their products with k
  float *system, *attend;  // [C, C]: -tril(beta k k^T . D, -1) and tril(q k^T . D)
  float *decay, *left;     // [C]: e^G, and e^(G_C - G)
  float* beta;             // [C]
  double* G;               // [C]: cumulated g
  float* reads;            // [2 C, PANEL]: what k and q read from the state, then v' and o
  float* states;           // [heads, V / PANEL, K, PANEL]

  static int64_t num_floats(int64_t C, int64_t K, int64_t V, int64_t heads) {
    return 2 * C * K + 4 * C * C + 5 * C + 2 * C * PANEL + heads * K * round_up(V, PANEL);
  }

  Scratch(float* p, int64_t C, int64_t K) {
    const auto take = [&p](int64_t n) { return (p += n) - n; };
    keys = take(2 * C * K);
    products = take(2 * C * C), system = take(C * C), attend = take(C * C);
    decay = take(C), left = take(C), beta = take(C), G = (double*)take(2 * C);
    reads = take(2 * C * PANEL);
    states = p;
  }
};

// A chunk: its first token, its tokens, and its rows (tokens padded with zeros to full blocks).
struct Chunk {
  int64_t first, size, rows;
};

// The keys and queries of a chunk in float32, normalised and scaled, and their products with k.
template <typename T>
void prepare_keys(const Sequence<T>& seq, int64_t h, const Chunk& chunk, const Scratch& s) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, C = call.chunk_size, rows = chunk.rows;
  float *k = s.keys, *q = s.keys + rows * K;
  for (int64_t i = 0; i < chunk.size; ++i) {
    load_key(seq.k(chunk.first + i, h), K, call.qk_l2norm, 1.0f, k + i * K);
    load_key(seq.q(chunk.first + i, h), K, call.qk_l2norm, call.scale, q + i * K);
    if (const int64_t next = chunk.first + i + C; next < seq.length) {
      th::prefetch(seq.k(next, h), K);
      th::prefetch(seq.q(next, h), K);
    }
  }
  std::fill(k + chunk.size * K, q, 0.0f);
  std::fill(q + chunk.size * K, q + rows * K, 0.0f);
  for (int64_t j = 0; j < rows; j += PANEL) {  // only what is on or below the diagonal
    const int n = int(std::min<int64_t>(PANEL, rows - j));
    const float* k_j = k + j * K;
    th::gemm_nt(int(2 * rows - j), n, int(K), k_j, K, k_j, K, s.products + j * C + j, C);
  }
}

// The decays of value head j over a chunk, applied to the products of its keys.
template <typename T>
void prepare_decays(const Sequence<T>& seq, int64_t j, const Chunk& chunk, const Scratch& s) {
  const int64_t C = seq.call.chunk_size;
  const float *kk = s.products, *qk = s.products + chunk.rows * C;
  double G = 0.0;  // in double: a difference of large sums must not lose a small decay
  for (int64_t i = 0; i < chunk.rows; ++i) {
    if (i < chunk.size) G += std::max<double>(seq.g(chunk.first + i, j), FULL_DECAY);
    s.G[i] = G;
    s.beta[i] = i < chunk.size ? seq.beta(chunk.first + i, j) : 0.0f;
  }
  for (int64_t i = 0; i < chunk.rows; i += LANES) {
    alignas(64) float since_start[LANES] = {}, to_end[LANES] = {};
    const int n = int(std::min<int64_t>(LANES, chunk.rows - i));
    for (int c = 0; c < n; ++c) {
      since_start[c] = float(s.G[i + c]);
      to_end[c] = float(G - s.G[i + c]);
    }
    th::store(s.decay + i, th::exp(th::load(since_start)), n);
    th::store(s.left + i, th::exp(th::load(to_end)), n);
  }
  for (int64_t i = 0; i < chunk.rows; ++i)
    for (int64_t c = 0; c < chunk.rows; c += LANES) {
      const int n = int(std::min<int64_t>(LANES, chunk.rows - c)), at = int(i * C + c);
      alignas(64) float log_decay[LANES];
      for (int l = 0; l < LANES; ++l)
        log_decay[l] = c + l <= i ? float(s.G[i] - s.G[c + l]) : float(FULL_DECAY);
      const f32x16 D = th::exp(th::load(log_decay));
      th::store(s.attend + at, D * th::load(qk + at, n), n);
      th::store(s.system + at, D * th::load(kk + at, n) * -s.beta[i], n);
    }
}

// Solves (I - A) x = x in place for BLOCK rows of x, A strictly lower triangular.
TH_INLINE void solve_block(const float* A, int64_t lda, float* x) {
  f32x16 left[BLOCK], right[BLOCK];
#pragma GCC unroll 8
  for (int i = 0; i < BLOCK; ++i) {
    left[i] = th::load(x + i * PANEL), right[i] = th::load(x + i * PANEL + LANES);
#pragma GCC unroll 8
    for (int j = 0; j < i; ++j) {
      const f32x16 a = th::splat(A[i * lda + j]);
      left[i] = th::fma(a, left[j], left[i]), right[i] = th::fma(a, right[j], right[i]);
    }
    th::store(x + i * PANEL, left[i]), th::store(x + i * PANEL + LANES, right[i]);
  }
}

// Takes PANEL columns of one head through a chunk: outputs, and the state at its end.
template <typename T>
void advance_panel(const Sequence<T>& seq, int64_t j, int64_t column, const Chunk& chunk,
                   const Scratch& s, float* state) {
  const int64_t K = seq.call.k_dim, C = seq.call.chunk_size, rows = chunk.rows;
  const int64_t width = std::min<int64_t>(PANEL, seq.call.v_dim - column);
  float *x = s.reads, *o = s.reads + rows * PANEL;
  th::gemm_nn(int(2 * rows), PANEL, int(K), s.keys, K, state, PANEL, x, PANEL);
  for (int64_t i = 0; i < chunk.size; ++i) {
    const int64_t next = chunk.first + i + C;
    if (next < seq.length) th::prefetch(seq.v(next, j) + column, width);
    for (int64_t c = 0; c < PANEL; c += LANES) {
      f32x16 v{};
      if (c < width) v = th::load(seq.v(chunk.first + i, j) + column + c, int(width - c));
      float *x_i = x + i * PANEL + c, *o_i = o + i * PANEL + c;
      th::store(x_i, (v - th::load(x_i) * s.decay[i]) * s.beta[i]);
      th::store(o_i, th::load(o_i) * s.decay[i]);
    }
  }
  for (int64_t i = 0; i < rows; i += BLOCK) {
    float* x_i = x + i * PANEL;
    th::gemm_nn(BLOCK, PANEL, int(i), s.system + i * C, C, x, PANEL, x_i, PANEL, true);
    solve_block(s.system + i * C + i, C, x_i);
    th::gemm_nn(BLOCK, PANEL, int(i + BLOCK), s.attend + i * C, C, x, PANEL, o + i * PANEL, PANEL,
                true);
  }
  for (int64_t i = 0; i < chunk.size; ++i)
    for (int64_t c = 0; c < PANEL; c += LANES) {
      float *x_i = x + i * PANEL + c, *o_i = o + i * PANEL + c;
      if (c < width)
        th::store(seq.out(chunk.first + i, j) + column + c, th::load(o_i), int(width - c));
      th::store(x_i, th::load(x_i) * s.left[i]);
    }
  const float decay = s.decay[rows - 1];
  for (int64_t i = 0; i < K * PANEL; i += LANES) th::store(state + i, th::load(state + i) * decay);
  th::gemm_tn(int(K), PANEL, int(rows), s.keys, K, x, PANEL, state, PANEL, true);
}

// One sequence on the value heads [begin, end), which read the same key head.
template <typename T>
void run_chunks(const Sequence<T>& seq, int64_t begin, int64_t end, const Scratch& s) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim, C = call.chunk_size;
  const int64_t h = begin / (call.num_v_heads / call.num_k_heads);
  const auto panel = [&](int64_t j, int64_t c) {
    return s.states + ((j - begin) * round_up(V, PANEL) + c) * K;
  };
  for (int64_t j = begin; j < end; ++j)
    for (int64_t c = 0; c < V; c += PANEL) {
      if (seq.has_initial_state)
        th::load_panel(seq.state(j) + c * K, V - c, K, panel(j, c));
      else
        std::fill(panel(j, c), panel(j, c) + K * PANEL, 0.0f);
    }
  for (int64_t first = 0; first < seq.length; first += C) {
    const int64_t size = std::min(C, seq.length - first);
    const Chunk chunk{first, size, round_up(size, BLOCK)};
    prepare_keys(seq, h, chunk, s);
    for (int64_t j = begin; j < end; ++j) {
      prepare_decays(seq, j, chunk, s);
      for (int64_t c = 0; c < V; c += PANEL)
        advance_panel(seq, j, c, chunk, s, panel(j, c));
    }
  }
  for (int64_t j = begin; j < end; ++j)
    for (int64_t c = 0; c < V; c += PANEL)
      th::store_panel(panel(j, c), std::min<int64_t>(PANEL, V - c), K, seq.state(j) + c * K);
}

}  // namespace gdr
