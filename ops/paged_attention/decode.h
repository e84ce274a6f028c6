// One new token: a single pass over the keys of a (sequence, key head) for its query heads.
//
// Keys are cut into splits of SPLIT_KEYS, so that one long sequence keeps every core busy. The cut
// depends on that sequence's length alone, and so do the bits of its result. A split leaves an
// unnormalised output and a RowState per query; merge_splits joins them.
//
// R queries share the lanes of a register: W = 16 / R lanes each (R rounded up to a power of two).
// For the products, lane r * W + w holds element d + w of query r, and W elements of a key are
// broadcast by one load: D / W multiply-adds a key, none of whose lanes is wasted. W keys then sum
// their lanes together, after which lane r * W + w holds the logit of query r and key w, so the
// softmax too uses every lane and reduces across lanes once a block.
#pragma once

#include "problem.h"

namespace th {

constexpr int SPLIT_KEYS = 256;
constexpr int BLOCK_KEYS = 32;  // the values of a block are fetched while its products are computed
constexpr int MAX_ROWS = 8;     // queries in one pass

struct Split {
  int n, head, begin, count;
};

constexpr int lanes_per_row(int rows) {
  return rows > 4 ? 2 : rows > 2 ? 4 : rows > 1 ? 8 : 16;
}

TH_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// W elements, repeated over the register.
template <int W>
TH_INLINE f32x16 broadcast(const float* p) {
  if constexpr (W == LANES) return load(p);
#ifdef __AVX512F__
  if constexpr (W == 8)
    return (f32x16)_mm512_broadcast_f64x4(_mm256_loadu_pd(reinterpret_cast<const double*>(p)));
  if constexpr (W == 4) return (f32x16)_mm512_broadcast_f32x4(_mm_loadu_ps(p));
  if constexpr (W == 2) {
    double both;
    std::memcpy(&both, p, sizeof(both));
    return (f32x16)_mm512_set1_pd(both);
  }
#endif
  f32x16 x;
  for (int i = 0; i < LANES; i += W)
    std::memcpy(reinterpret_cast<float*>(&x) + i, p, W * sizeof(float));
  return x;
}

// x[w] of W vectors holds parts of row r in lanes r * W + ...; returns their sums in lane r * W + w.
template <int W>
TH_INLINE f32x16 sum_lanes(f32x16* x) {
#pragma GCC unroll 4
  for (int block = W / 2; block; block /= 2) {
    i32x16 low, high;
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; ++lane) {
      low[lane] = lane & block ? LANES + lane - block : lane;
      high[lane] = lane & block ? LANES + lane : lane + block;
    }
#pragma GCC unroll 8
    for (int i = 0; i < block; ++i)
      x[i] = __builtin_shuffle(x[i], x[i + block], low) +
             __builtin_shuffle(x[i], x[i + block], high);
  }
  return x[0];
}

// Each lane becomes the largest, or the sum, of the W lanes of its row.
template <int W, typename Combine>
TH_INLINE f32x16 reduce_rows(f32x16 x, Combine combine) {
#pragma GCC unroll 4
  for (int block = 1; block < W; block *= 2) {
    i32x16 other;
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; ++lane) other[lane] = lane ^ block;
    x = combine(x, __builtin_shuffle(x, other));
  }
  return x;
}

// The state of one pass: R queries over the keys of one split.
template <int R>
struct Pass {
  static constexpr int W = lanes_per_row(R);
  static constexpr int KEYS = W > 8 ? W : 8;  // in one call of products
  static constexpr int VECTORS = R > 4 ? 2 : R > 2 ? 4 : 8;

  int64_t head_dim;
  const float* queries;  // [D / W][16]
  float* out;            // [R][D]
  f32x16 largest = splat(NO_KEY), total{};
  float weights[BLOCK_KEYS * LANES / W];  // [keys / W][16]
};

// to[i / W] = the products of the queries with KEYS keys, and fetches what is `ahead` of the keys.
template <int R>
TH_INLINE void products(const Pass<R>& pass, const float* const* keys, int64_t ahead, float* to) {
  constexpr int W = Pass<R>::W, KEYS = Pass<R>::KEYS;
  f32x16 acc[KEYS] = {};
  for (int64_t d = 0; d < pass.head_dim; d += LANES)
#pragma GCC unroll 8
    for (int part = 0; part < LANES; part += W) {
      const f32x16 q = load(pass.queries + (d + part) * (LANES / W));
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; ++i)
        acc[i] = fma(broadcast<W>(keys[i] + d + part), q, acc[i]);
      constexpr int FETCHED = KEYS * W / LANES;  // 1, or 2, 4, 16
#pragma GCC unroll 16
      for (int i = 0; i < FETCHED; ++i) prefetch(keys[part / W * FETCHED + i] + d + ahead);
    }
#pragma GCC unroll 8
  for (int i = 0; i < KEYS; i += W) store(to + i / W * LANES, sum_lanes<W>(acc + i));
}

// Turns the products of `count` keys into weights; returns the factor of what was summed before.
template <int R>
TH_INLINE f32x16 softmax_block(Pass<R>& pass, int count, float scale, float softcap) {
  constexpr int W = Pass<R>::W;
  i32x16 key;
  for (int lane = 0; lane < LANES; ++lane) key[lane] = lane % W;
  f32x16 largest = pass.largest;
  for (int i = 0; i < count; i += W) {
    f32x16 x = load(pass.weights + i / W * LANES) * scale;
    if (softcap != 0) x = softcap * tanh(x * (1.0f / softcap));
    x = select(key + i < count, x, splat(NO_KEY));
    store(pass.weights + i / W * LANES, x);
    largest = max(x, largest);
  }
  largest = reduce_rows<W>(largest, [](f32x16 a, f32x16 b) { return max(a, b); });
  const f32x16 factor = exp(pass.largest - largest);
  pass.largest = largest;
  pass.total *= factor;
  for (int i = 0; i < count; i += W) {
    const f32x16 weight = exp(load(pass.weights + i / W * LANES) - largest);
    store(pass.weights + i / W * LANES, weight);
    pass.total += weight;
  }
  return factor;
}

// Columns [column, column + 16 V) of out = factor * out + weights * values; fetches `next`.
template <int V, int R, typename T>
TH_INLINE void accumulate(const Pass<R>& pass, const T* const* values, int count, int64_t column,
                          f32x16 factor, const T* const* next) {
  constexpr int W = Pass<R>::W;
  f32x16 acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      acc[r][v] = load(pass.out + r * pass.head_dim + column + v * LANES) * factor[r * W];
  for (int j = 0; j < count; ++j) {
    const float* weight = pass.weights + j / W * LANES + j % W;
    f32x16 x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = load(values[j] + column + v * LANES);
#pragma GCC unroll 8
    for (int v = 0; v < V; v += sizeof(float) / sizeof(T))
      prefetch(next[j] + column + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const f32x16 p = splat(weight[r * W]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[r][v] = fma(p, x[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      store(pass.out + r * pass.head_dim + column + v * LANES, acc[r][v]);
}

// Products of one block, whose rows are used as they are or widened first.
template <int R>
TH_INLINE void block_products(Pass<R>& pass, const float* const* keys, int64_t plane, float*) {
  for (int i = 0; i < BLOCK_KEYS; i += Pass<R>::KEYS)
    products(pass, keys + i, plane, pass.weights + i / Pass<R>::W * LANES);
}

template <int R>
TH_INLINE void block_products(Pass<R>& pass, const bf16* const* keys, int64_t plane,
                              float* widened) {
  const float* rows[Pass<R>::KEYS];
  for (int i = 0; i < BLOCK_KEYS; i += Pass<R>::KEYS) {
    for (int j = 0; j < Pass<R>::KEYS; ++j) {
      float* row = widened + j * pass.head_dim;
      for (int64_t d = 0; d < pass.head_dim; d += LANES) {
        store(row + d, load(keys[i + j] + d));
        if (d % (2 * LANES) == 0) prefetch(keys[i + j] + d + plane);
      }
      rows[j] = row;
    }
    products(pass, rows, 0, pass.weights + i / Pass<R>::W * LANES);
  }
}

// Floats that attend_split needs as scratch.
inline int64_t decode_scratch(int64_t head_dim) { return (MAX_ROWS * 2 + LANES) * head_dim; }

// Queries [first, first + R) of the split's key head: out[r] and state[r] of the keys in the split.
template <int R, typename T>
void attend_split(const Problem<T>& p, const Split& split, int first, float* out, RowState* state,
                  float* scratch) {
  constexpr int W = Pass<R>::W;
  const int64_t D = p.head_dim, token = p.cu_seqlens[split.n];
  std::fill(scratch, scratch + LANES / W * D, 0.0f);
  for (int r = 0; r < R; ++r) {
    const T* q = p.query(token, split.head * p.group() + first + r);
    for (int64_t d = 0; d < D; ++d) scratch[d / W * LANES + r * W + d % W] = to_float(q[d]);
  }
  std::fill(out, out + R * D, 0.0f);
  Pass<R> pass{D, scratch, out};

  // The last key stands in for those past the end of the split, which get no weight.
  const T* keys[SPLIT_KEYS + 2 * BLOCK_KEYS];
  p.key_rows(split.n, split.head, split.begin, split.count, keys);
  std::fill(keys + split.count, keys + SPLIT_KEYS + 2 * BLOCK_KEYS, keys[split.count - 1]);
  for (int i = 0; i < split.count; i += BLOCK_KEYS) {
    const int count = std::min(BLOCK_KEYS, split.count - i);
    block_products(pass, keys + i, p.plane(), scratch + MAX_ROWS * 2 * D);
    const f32x16 factor = softmax_block(pass, count, float(p.scale), float(p.softcap));
    const T* values[BLOCK_KEYS];
    for (int j = 0; j < BLOCK_KEYS; ++j) values[j] = keys[i + j] + p.plane();
    const T* const* next = keys + i + BLOCK_KEYS;
    constexpr int V = Pass<R>::VECTORS;
    int64_t column = 0;
    for (; column + V * LANES <= D; column += V * LANES)
      accumulate<V>(pass, values, count, column, factor, next);
    for (; column < D; column += LANES)
      accumulate<1>(pass, values, count, column, factor, next);
  }
  const f32x16 total = reduce_rows<W>(pass.total, [](f32x16 a, f32x16 b) { return a + b; });
  for (int r = 0; r < R; ++r) state[r] = {pass.largest[r * W], total[r * W]};
}

// All query heads of the split's key head, MAX_ROWS at a time.
template <typename T>
void decode_split(const Problem<T>& p, const Split& split, float* out, RowState* state,
                  float* scratch) {
  using Attend = void (*)(const Problem<T>&, const Split&, int, float*, RowState*, float*);
  static constexpr Attend BY_ROWS[MAX_ROWS] = {
      attend_split<1, T>, attend_split<2, T>, attend_split<3, T>, attend_split<4, T>,
      attend_split<5, T>, attend_split<6, T>, attend_split<7, T>, attend_split<8, T>};
  for (int first = 0; first < p.group(); first += MAX_ROWS) {
    const int rows = std::min(MAX_ROWS, p.group() - first);
    BY_ROWS[rows - 1](p, split, first, out + first * p.head_dim, state + first, scratch);
  }
}

// Joins `count` consecutive splits of one (sequence, key head).
template <typename T>
void merge_splits(const Problem<T>& p, const Split& split, int count, float* out,
                  const RowState* state) {
  const int group = p.group();
  const int64_t D = p.head_dim, token = p.cu_seqlens[split.n];
  for (int r = 0; r < group; ++r) {
    RowState all;
    for (int s = 0; s < count; ++s) all.max = std::max(all.max, state[s * group + r].max);
    float* sum = out + r * D;
    for (int s = 0; s < count; ++s) {
      const RowState& part = state[s * group + r];
      const float factor = std::exp(part.max - all.max);
      const float* from = out + (s * group + r) * D;
      all.sum += part.sum * factor;
      for (int64_t d = 0; d < D; d += LANES)
        store(sum + d, (s ? load(sum + d) : f32x16{}) + load(from + d) * factor);
    }
    const int64_t head = split.head * group + r;
    scale_row(p.output(token, head), sum, 1.0f / all.sum, D);
    if (p.lse) p.lse[token * p.num_q_heads + head] = all.lse();
  }
}

}  // namespace th
