// The chunk form: products of small matrices that stay in L1 and L2; see README.md.
//
// A thread takes one sequence and some heads of one group, which share q k^T, and walks over the
// chunks. The states of the heads are kept in scratch as panels (state_panels.h).
#pragma once

#include <algorithm>
#include <cmath>

#include "denormals.h"
#include "gemm.h"
#include "ssd_call.h"
#include "state_panels.h"

namespace th::ssd {

using th::PANEL;
using th::i32x16;
using th::round_up;
using th::detail::TILE_COLS;
using th::detail::TILE_ROWS;
using th::detail::add_products;

constexpr int BLOCK = 8;  // a chunk is padded to a multiple of it, whole tiles of gemm.h
// Up to this length, walking token by token costs less than bringing a state to scratch and back.
constexpr int64_t RECURRENT_LENGTH = 16;

// The buffers of one thread. A row of a [C, C] matrix is C long whatever the chunk's own size.
struct Scratch {
  float *q, *k;         // [C, K]
  float* products;      // [C, C]: q k^T
  float* attend;        // [C, C]: tril(q k^T . decays) dt + D
  float* decay;         // [C]: from the start of the chunk to each token
  float *left, *dt;     // [C]: from each token to the last one, and its weight
  float *v, *kept;      // [C, PANEL]: values, and what is left of them at the end of the chunk
  float* states;        // [heads, V / PANEL, K, PANEL]

  static int64_t num_floats(int64_t C, int64_t K, int64_t V, int64_t heads) {
    return 2 * C * K + 2 * C * C + 3 * C + 2 * C * PANEL + heads * th::panels_size(V, K);
  }

  Scratch(float* p, int64_t C, int64_t K) {
    const auto take = [&p](int64_t n) { return (p += n) - n; };
    q = take(C * K), k = take(C * K);
    products = take(C * C), attend = take(C * C);
    decay = take(C), left = take(C), dt = take(C);
    v = take(C * PANEL), kept = take(C * PANEL);
    states = p;
  }
};

// A chunk: its first token, its tokens, and its rows (tokens padded with zeros to full blocks).
struct Chunk {
  int64_t first, size, rows;
};

template <typename T>
TH_INLINE void load_row(const T* from, int64_t size, float scale, float* to) {
  th::for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    th::store(to + i, th::load(from + i, n) * scale, n);
  });
}

// q and k of a chunk in float32, and their products on and below the diagonal.
template <typename T>
void prepare_keys(const Sequence<T>& seq, int64_t group, const Chunk& chunk, const Scratch& s) {
  const int64_t K = seq.call.k_dim, C = seq.call.chunk_size, rows = chunk.rows;
  for (int64_t i = 0; i < chunk.size; ++i) {
    const int64_t t = chunk.first + i;
    load_row(seq.q(t, group), K, float(seq.call.scale), s.q + i * K);
    load_row(seq.k(t, group), K, 1.0f, s.k + i * K);
    if (t + C < seq.length) {
      th::prefetch(seq.q(t + C, group), K);
      th::prefetch(seq.k(t + C, group), K);
    }
  }
  std::fill(s.q + chunk.size * K, s.q + rows * K, 0.0f);
  std::fill(s.k + chunk.size * K, s.k + rows * K, 0.0f);
  for (int64_t j = 0; j < rows; j += PANEL)
    th::gemm_nt(int(rows - j), int(std::min<int64_t>(PANEL, rows - j)), int(K), s.q + j * K, K,
                s.k + j * K, K, s.products + j * C + j, C);
}

// One row of decays to the next: each by this token's, and the token itself has none yet.
TH_INLINE void advance_decays(int64_t i, float decay, float* row) {
  for (int64_t c = 0; c <= i; c += LANES) {
    const i32x16 token = th::lane_numbers() + int(c);
    th::store(row + c, th::select(token == int(i), th::splat(1.0f), th::load(row + c) * decay));
  }
}

// The decays from the start of a chunk to each token, and from there to the last one, by sums of
// their logarithms. A decay near 1 is rounded as one of many otherwise, which a gradient shows.
template <typename T>
void sum_decays(const Sequence<T>& seq, int64_t h, const Chunk& chunk, float* since_start,
                float* to_end) {
  double sum = 0.0, left = 0.0;
  const auto g = [&](int64_t i) { return std::max(double(seq.g(chunk.first + i, h)), -1e4); };
  for (int64_t i = 0; i < chunk.rows; ++i) {
    if (i < chunk.size) sum += g(i);
    since_start[i] = std::exp(float(sum));
  }
  for (int64_t i = chunk.rows - 1; i >= 0; --i) {
    to_end[i] = std::exp(float(left));
    if (i < chunk.size) left += g(i);
  }
}

// The decays of head h over a chunk, applied to the products. They are made as in the recurrence,
// by multiplying, which costs one exponential per token and is right for a decay of -inf too.
template <typename T>
void prepare_decays(const Sequence<T>& seq, int64_t h, const Chunk& chunk, const Scratch& s) {
  const int64_t C = seq.call.chunk_size;
  float since_start = 1.0f;
  std::fill(s.left, s.left + C, 0.0f);
  for (int64_t i = 0; i < C; ++i)
    s.dt[i] = i < chunk.size ? seq.dt(chunk.first + i, h) : 0.0f;
  for (int64_t i = 0; i < chunk.rows; ++i) {
    const float decay = i < chunk.size ? std::exp(seq.g(chunk.first + i, h)) : 1.0f;
    s.decay[i] = since_start *= decay;
    advance_decays(i, decay, s.left);
    for (int64_t c = 0; c <= i; c += LANES) {
      const int64_t at = i * C + c;
      th::store(s.attend + at,
                th::load(s.products + at) * (th::load(s.left + c) * th::load(s.dt + c)));
    }
    s.attend[i * C + i] += seq.D(h);
  }
  if (seq.call.sums_decays) sum_decays(seq, h, chunk, s.decay, s.left);
  for (int64_t i = 0; i < chunk.rows; i += LANES)
    th::store(s.left + i, th::load(s.left + i) * th::load(s.dt + i));
}

// PANEL columns of head h from `first` on.
struct Columns {
  int64_t h, first, width;
};

// The values of a chunk in float32, and what is left of them at its end.
template <typename T>
void load_values(const Sequence<T>& seq, const Columns& columns, const Chunk& chunk,
                 const Scratch& s) {
  const auto v_at = [&](int64_t t) { return seq.v(t, columns.h) + columns.first; };
  for (int64_t i = 0; i < chunk.size; ++i) {
    const int64_t t = chunk.first + i, next = t + seq.call.chunk_size;
    if (next < seq.length) th::prefetch(v_at(next), columns.width);
    for (int64_t c = 0; c < PANEL; c += LANES) {
      f32x16 v{};
      if (c < columns.width) v = th::load(v_at(t) + c, int(columns.width - c));
      th::store(s.v + i * PANEL + c, v);
      th::store(s.kept + i * PANEL + c, v * s.left[i]);
    }
  }
  std::fill(s.v + chunk.size * PANEL, s.v + chunk.rows * PANEL, 0.0f);
  std::fill(s.kept + chunk.size * PANEL, s.kept + chunk.rows * PANEL, 0.0f);
}

// Outputs of TILE_ROWS tokens from `row` of the chunk on: what they read of the state at its start,
// and of the values up to themselves.
template <typename T>
TH_NOINLINE void store_outputs(const Sequence<T>& seq, const Columns& columns, const Chunk& chunk,
                               int64_t row, const Scratch& s, const float* state) {
  const int64_t K = seq.call.k_dim, C = seq.call.chunk_size;
  for (int64_t c = 0; c < columns.width; c += TILE_COLS) {
    th::detail::Tile<TILE_ROWS> sums = {};
    add_products<TILE_ROWS>(int(K), {s.q + row * K, K, 1}, state + c, PANEL, sums);
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; ++r)
#pragma GCC unroll 8
      for (f32x16& sum : sums[r]) sum *= s.decay[row + r];
    add_products<TILE_ROWS>(int(row + TILE_ROWS), {s.attend + row * C, C, 1}, s.v + c, PANEL, sums);
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; ++r) {
      if (row + r >= chunk.size) break;
      T* out = seq.out(chunk.first + row + r, columns.h) + columns.first + c;
      for (int v = 0; v * LANES < std::min<int64_t>(TILE_COLS, columns.width - c); ++v)
        th::store(out + v * LANES, sums[r][v], int(columns.width - c - v * LANES));
    }
  }
}

// Takes PANEL columns of one head through a chunk: outputs, and the state at its end.
template <typename T>
void advance_panel(const Sequence<T>& seq, const Columns& columns, const Chunk& chunk,
                   const Scratch& s, float* state) {
  const int64_t K = seq.call.k_dim, rows = chunk.rows;
  load_values(seq, columns, chunk, s);
  for (int64_t i = 0; i < rows; i += TILE_ROWS) store_outputs(seq, columns, chunk, i, s, state);
  th::gemm_tn(int(K), PANEL, int(rows), s.k, K, s.kept, PANEL, state, PANEL, s.decay[rows - 1]);
}

// One sequence on the heads [begin, end) of one group.
template <typename T>
void run_chunks(const Sequence<T>& seq, int64_t begin, int64_t end, const Scratch& s) {
  const th::DenormalsAreZero guard;
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim, C = call.chunk_size;
  const auto panels = [&](int64_t h) { return s.states + (h - begin) * th::panels_size(V, K); };
  for (int64_t h = begin; h < end; ++h) th::load_panels(seq.initial_state(h), V, K, panels(h));
  for (int64_t first = 0; first < seq.length; first += C) {
    const int64_t size = std::min(C, seq.length - first);
    const Chunk chunk{first, size, round_up(size, BLOCK)};
    prepare_keys(seq, seq.key_head(begin), chunk, s);
    for (int64_t h = begin; h < end; ++h) {
      prepare_decays(seq, h, chunk, s);
      for (int64_t c = 0; c < V; c += PANEL) {
        const Columns columns{h, c, std::min<int64_t>(PANEL, V - c)};
        advance_panel(seq, columns, chunk, s, panels(h) + c * K);
      }
    }
  }
  for (int64_t h = begin; h < end; ++h) th::store_panels(panels(h), V, K, seq.final_state(h));
}

}  // namespace th::ssd
