// The chunk form of a delta rule: products of small matrices that stay in L1 and L2.
//
// A thread takes one sequence and the value heads of (a part of) one key head, and walks over the
// chunks. In a chunk the rule prepares, by head, what its decays make of the keys and of their
// products (Scratch); then the state, kept as panels (state_panels.h), goes through the chunk.
// Columns of V are independent of each other, so a panel does so while it is in L1.
#pragma once

#include <algorithm>

#include "delta_rule_call.h"
#include "gemm.h"
#include "state_panels.h"

namespace th::delta {

constexpr int BLOCK = 8;  // rows solved in registers; a chunk is padded to a multiple of it

// A chunk: its first token, its tokens, and its rows (tokens padded with zeros to full blocks).
struct Chunk {
  int64_t first, size, rows;
};

// The buffers of one thread. A row of a [C, C] matrix is C long whatever the chunk's own size.
struct Scratch {
  float* keys;             // [2 C, K]: rows of k, then rows of q
  float* reads;            // [2 C, K]: the same, decayed since the start of the chunk
  float* writes;           // [C, K]: k, decayed to the end of the chunk
  float* carry;            // [K]: the decay of the whole chunk
  float* beta;             // [C]
  float *system, *attend;  // [C, C]: -beta k k^T below the diagonal, and q k^T up to it, decayed
  float* x;                // [2 C, PANEL]: what k and q read from the state, then v' and o
  float* work;             // the rule's own
  float* states;           // [heads, V / PANEL, K, PANEL]

  static int64_t num_floats(int64_t C, int64_t K, int64_t V, int64_t heads, int64_t work) {
    return 5 * C * K + round_up(K, LANES) + C + 2 * C * C + 2 * C * PANEL + work +
           heads * K * round_up(V, PANEL);
  }

  Scratch(float* p, int64_t C, int64_t K, int64_t num_work) {
    const auto take = [&p](int64_t n) { return (p += n) - n; };
    keys = take(2 * C * K), reads = take(2 * C * K), writes = take(C * K);
    carry = take(round_up(K, LANES)), beta = take(C);
    system = take(C * C), attend = take(C * C);
    x = take(2 * C * PANEL);
    work = take(num_work);
    states = p;
  }
};

// The keys and queries of a chunk in float32, normalised and scaled.
template <typename T>
void load_keys(const Sequence<T>& seq, int64_t h, const Chunk& chunk, const Scratch& s) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, rows = chunk.rows;
  float *k = s.keys, *q = s.keys + rows * K;
  for (int64_t i = 0; i < chunk.size; ++i) {
    load_key(seq.k(chunk.first + i, h), K, call.qk_l2norm, 1.0f, k + i * K);
    load_key(seq.q(chunk.first + i, h), K, call.qk_l2norm, call.scale, q + i * K);
    if (const int64_t next = chunk.first + i + call.chunk_size; next < seq.length) {
      prefetch(seq.k(next, h), K);
      prefetch(seq.q(next, h), K);
    }
  }
  std::fill(k + chunk.size * K, q, 0.0f);
  std::fill(q + chunk.size * K, q + rows * K, 0.0f);
}

// Solves (I - A) x = x in place for BLOCK rows of x, A strictly lower triangular.
TH_INLINE void solve_block(const float* A, int64_t lda, float* x) {
  constexpr int V = SUMS >= 2 * BLOCK ? 2 : 1;  // registers of a row at once
  for (int c = 0; c < PANEL; c += V * REGISTER_LANES) {
    Register rows[BLOCK][V];
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; ++i) {
      float* x_i = x + i * PANEL + c;
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) rows[i][v] = load_register(x_i + v * REGISTER_LANES);
#pragma GCC unroll 8
      for (int j = 0; j < i; ++j) {
        const Register a = A[i * lda + j] - Register{};
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) rows[i][v] = fma(a, rows[j][v], rows[i][v]);
      }
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) store_register(x_i + v * REGISTER_LANES, rows[i][v]);
    }
  }
}

// Takes PANEL columns of one head through a chunk: outputs, and the state at its end.
template <typename T>
void advance_panel(const Sequence<T>& seq, int64_t j, int64_t column, const Chunk& chunk,
                   const Scratch& s, float* state) {
  const int64_t K = seq.call.k_dim, C = seq.call.chunk_size, rows = chunk.rows;
  const int64_t width = std::min<int64_t>(PANEL, seq.call.v_dim - column);
  float *x = s.x, *o = s.x + rows * PANEL;
  gemm_nn(int(2 * rows), PANEL, int(K), s.reads, K, state, PANEL, x, PANEL);
  for (int64_t i = 0; i < chunk.size; ++i) {
    if (const int64_t next = chunk.first + i + C; next < seq.length)
      prefetch(seq.v(next, j) + column, width);
    for (int64_t c = 0; c < PANEL; c += LANES) {
      f32x16 v{};
      if (c < width) v = load(seq.v(chunk.first + i, j) + column + c, int(width - c));
      float* x_i = x + i * PANEL + c;
      store(x_i, (v - load(x_i)) * s.beta[i]);
    }
  }
  for (int64_t i = 0; i < rows; i += BLOCK) {
    float* x_i = x + i * PANEL;
    gemm_nn(BLOCK, PANEL, int(i), s.system + i * C, C, x, PANEL, x_i, PANEL, 1.0f);
    solve_block(s.system + i * C + i, C, x_i);
    gemm_nn(BLOCK, PANEL, int(i + BLOCK), s.attend + i * C, C, x, PANEL, o + i * PANEL, PANEL,
            1.0f);
  }
  for (int64_t i = 0; i < chunk.size; ++i)
    for (int64_t c = 0; c < width; c += LANES)
      store(seq.out(chunk.first + i, j) + column + c, load(o + i * PANEL + c), int(width - c));
  for (int64_t k = 0; k < K; ++k)
    for (int64_t c = 0; c < PANEL; c += LANES) {
      float* state_k = state + k * PANEL + c;
      store(state_k, load(state_k) * s.carry[k]);
    }
  gemm_tn(int(K), PANEL, int(rows), s.writes, K, x, PANEL, state, PANEL, 1.0f);
}

// One sequence on the value heads [begin, end), which read the same key head.
template <typename Rule, typename T>
void run_chunks(const Sequence<T>& seq, int64_t begin, int64_t end, const Scratch& s) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim, C = call.chunk_size;
  const auto panels = [&](int64_t j) { return s.states + (j - begin) * panels_size(V, K); };
  for (int64_t j = begin; j < end; ++j) load_panels(seq.initial_state(j), V, K, panels(j));
  for (int64_t first = 0; first < seq.length; first += C) {
    const int64_t size = std::min(C, seq.length - first);
    const Chunk chunk{first, size, round_up(size, BLOCK)};
    load_keys(seq, seq.key_head(begin), chunk, s);
    Rule::prepare_keys(seq, chunk, s);
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t i = 0; i < chunk.rows; ++i) s.beta[i] = i < size ? seq.beta(first + i, j) : 0.0f;
      Rule::prepare_head(seq, j, chunk, s);
      for (int64_t c = 0; c < V; c += PANEL) advance_panel(seq, j, c, chunk, s, panels(j) + c * K);
    }
  }
  for (int64_t j = begin; j < end; ++j) store_panels(panels(j), V, K, seq.final_state(j));
}

}  // namespace th::delta
