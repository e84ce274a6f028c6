// One new token: a single pass over the keys of a sequence for all query heads.
//
// Keys are cut into splits of at most SPLIT_KEYS, so that one long sequence keeps every core busy.
// The cut depends on that sequence's length alone, and so do the bits of its result. A split leaves
// an unnormalised output and a RowState per query head; merge_splits joins them.
//
// A split covers adjacent key heads of SPLIT_BYTES a row: memory is read in the order in which it
// lies, and a block is fetched while the one before is computed.
//
// R queries of a key head share the lanes of a register: W = 16 / R lanes each (R rounded up to a
// power of two). For the products, lane r * W + w holds element d + w of query r, and W elements of
// a key are broadcast by one load: D / W multiply-adds a key, none of whose lanes is wasted. W keys
// then sum their lanes together, after which lane r * W + w holds the product of query r and key w,
// so the softmax too uses every lane and reduces across lanes once a block. Where the CPU can
// multiply pairs of bf16, a lane holds a pair.
//
// Keys and values of fp8 are widened a block at a time, to where they stay in L2.
#pragma once

#include <type_traits>
#include <vector>

#include "aligned_floats.h"
#include "problem.h"

namespace th {

constexpr int SPLIT_KEYS = 512;
constexpr int SPLIT_BYTES = 2048;
constexpr int BLOCK_KEYS = 32;
constexpr int MAX_ROWS = SUMS >= 16 ? 8 : 4;  // queries in one pass

constexpr int lanes_per_row(int rows) { return rows > 4 ? 2 : rows > 2 ? 4 : rows > 1 ? 8 : 16; }
constexpr int keys_at_once(int rows) { return rows > 1 ? 8 : 16; }
constexpr int vectors_at_once(int rows) {
  return SUMS >= 16 ? (rows > 4 ? 2 : rows > 2 ? 4 : 8) : std::max(1, SUMS / rows);
}

struct Split {
  int n, head, num_heads, begin, count;  // key heads [head, head + num_heads), keys [begin, ...)
};

// Walks the keys and values that come next, line by line, into L2: L1 has no room for them.
template <typename T>
struct Fetch {
  static constexpr int LINE = 64 / sizeof(T);
  const T* const* row;
  const T* const* end;
  int64_t plane, length;  // from a key to its value, and how much of a row is needed
  int64_t at = 0;

  template <int N>
  TH_INLINE void lines() {
    if (row == end) return;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      __builtin_prefetch(*row + at + i * LINE, 0, 2);
      __builtin_prefetch(*row + plane + at + i * LINE, 0, 2);
    }
    at += N * LINE;
    if (at >= length) at = 0, ++row;
  }
};

// Up to MAX_ROWS queries of one key head.
struct Pass {
  int64_t offset;         // of the key head in a row
  float scale;            // of the products with its keys
  float* queries;         // [D / W][16]
  float* out;             // [R][D]
  f32x16 largest, total;  // of the row's logits and weights, in each of its lanes
  f32x16 factor;          // what the last block multiplies older sums by
  const void* biases;     // of the first query by distance, others after it, if there are some
  float weights[BLOCK_KEYS * LANES];  // [keys / W][16]
};

// Consecutive keys; the pointers of a short block go on, to keys that get no weight.
template <typename T>
struct Block {
  const Call& call;
  const T* const* keys;
  int64_t plane;  // from a key to its value
  int count;
  int distance;  // of the first key from the query
  Fetch<T>& ahead;
  float* widened;  // [16][D]
};

// x[w] of 2 B vectors holds parts of row r in lanes r * 2 B + ...: their sums, in lane r * 2 B + w.
template <int B>
TH_INLINE f32x16 sum_lanes(f32x16* x) {
#pragma GCC unroll 8
  for (int i = 0; i < B; ++i)
    x[i] = first_blocks<B>(x[i], x[i + B]) + second_blocks<B>(x[i], x[i + B]);
  if constexpr (B > 1) return sum_lanes<B / 2>(x);
  return x[0];
}

// Combines the 2 B lanes of each row, into all of them.
template <int B, typename Combine>
TH_INLINE f32x16 combine_lanes(f32x16 x, Combine combine) {
  x = combine(first_blocks<B>(x, x), second_blocks<B>(x, x));
  if constexpr (B > 1) return combine_lanes<B / 2>(x, combine);
  return x;
}

// Whether a lane takes a pair of bf16 elements instead of one float.
template <int R, typename T>
constexpr bool in_pairs() {
#ifdef __AVX512BF16__
  return R > 1 && sizeof(T) == sizeof(bf16);
#else
  return false;
#endif
}

// The products of the queries with the next keys, which are T, or floats if widened.
template <int R, typename T, typename Key>
TH_INLINE void products(const float* queries, const Key* const* keys, int64_t D, Fetch<T>& ahead,
                        float* to) {
  constexpr int W = lanes_per_row(R), KEYS = keys_at_once(R);
  constexpr int PER_LANE = in_pairs<R, T>() ? 2 : 1;
  constexpr int AT_ONCE = std::min(KEYS, SUMS);
  f32x16 all[KEYS];
#pragma GCC unroll 16
  for (int first = 0; first < KEYS; first += AT_ONCE) {
    f32x16 acc[AT_ONCE] = {};
    for (int64_t d = 0; d < D; d += LANES) {
      ahead.template lines<AT_ONCE * sizeof(T) / sizeof(float) / 2>();
#pragma GCC unroll 8
      for (int part = 0; part < LANES; part += W * PER_LANE) {
        const f32x16 q = load(queries + (d + part) / PER_LANE * (LANES / W));
#pragma GCC unroll 16
        for (int i = 0; i < AT_ONCE; ++i) {
          const f32x16 key =
              repeated<f32x16, W>(reinterpret_cast<const float*>(keys[first + i] + d + part));
          acc[i] = multiply_add<PER_LANE == 2>(q, key, acc[i]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < AT_ONCE; ++i) all[first + i] = acc[i];
  }
#pragma GCC unroll 8
  for (int i = 0; i < KEYS; i += W) store(to + i / W * LANES, sum_lanes<W / 2>(all + i));
}

TH_INLINE const float* as_floats(const float* row, int64_t, float*) { return row; }
TH_INLINE const float* as_floats(const bf16* row, int64_t n, float* widened) {
  for (int64_t d = 0; d < n; d += LANES) store(widened + d, load(row + d));
  return widened;
}

// to[lane of a row and a key], as weights are: the biases of a block, 0 of keys out of reach. False
// where all of them are.
template <int R, typename T>
bool biases_of(const Pass& pass, const Block<T>& block, float* to) {
  constexpr int W = lanes_per_row(R);
  const int reach = int(block.call.reach), first = std::max(0, block.distance + 1 - reach);
  if (!pass.biases || first >= block.count) return false;
  std::fill_n(to, BLOCK_KEYS * LANES / W, 0.0f);
  const T* biases = static_cast<const T*>(pass.biases);
  for (int r = 0; r < R; ++r, biases += reach)
    for (int j = first; j < block.count; ++j)
      to[j / W * LANES + r * W + j % W] = to_float(biases[block.distance - j]);
  return true;
}

// Products of a block turned into weights e^(logit - largest).
template <int R, typename T>
void weigh(Pass& pass, const Block<T>& block) {
  constexpr int W = lanes_per_row(R), KEYS = keys_at_once(R);
  const int64_t D = block.call.head_dim;
  for (int i = 0; i < block.count; i += KEYS) {
    const std::conditional_t<in_pairs<R, T>(), bf16, float>* keys[KEYS];
    for (int j = 0; j < KEYS; ++j) {
      const T* key = block.keys[i + j] + pass.offset;
      if constexpr (in_pairs<R, T>())
        keys[j] = key;
      else
        keys[j] = as_floats(key, D, block.widened + j * D);
    }
    products<R>(pass.queries, keys, D, block.ahead, pass.weights + i / W * LANES);
  }
  const float softcap = float(block.call.softcap);
  float biases[BLOCK_KEYS * LANES / W];
  const bool is_biased = biases_of<R>(pass, block, biases);
  const i32x16 key = lane_numbers() & (W - 1);
  f32x16 largest = pass.largest;
  for (int i = 0; i < block.count; i += W) {
    f32x16 x = load(pass.weights + i / W * LANES) * pass.scale;
    if (softcap != 0) x = softcap * tanh(x * (1.0f / softcap));
    if (is_biased) x += load(biases + i / W * LANES);
    x = select(key + i < block.count, x, splat(NO_KEY));
    store(pass.weights + i / W * LANES, x);
    largest = max(x, largest);
  }
  largest = combine_lanes<W / 2>(largest, [](f32x16 a, f32x16 b) { return max(a, b); });
  pass.factor = exp(pass.largest - largest);
  pass.largest = largest;
  pass.total *= pass.factor;
  for (int i = 0; i < block.count; i += W) {
    const f32x16 weight = exp(load(pass.weights + i / W * LANES) - largest);
    store(pass.weights + i / W * LANES, weight);
    pass.total += weight;
  }
}

// Columns [column, column + 16 V) of out = factor * out + weights * values.
template <int R, int V, typename T>
TH_INLINE void accumulate(const Pass& pass, const T* const* values, int count, int64_t D,
                          int64_t column, Fetch<T>& ahead) {
  constexpr int W = lanes_per_row(R);
  f32x16 acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      acc[r][v] = load(pass.out + r * D + column + v * LANES) * pass.factor[r * W];
  for (int j = 0; j < count; ++j) {
    const float* weights = pass.weights + j / W * LANES + j % W;
    if (j % 2 == 0) ahead.template lines<V * sizeof(T) / sizeof(float)>();
    f32x16 x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = load(values[j] + column + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const f32x16 weight = splat(weights[r * W]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[r][v] = fma(weight, x[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(pass.out + r * D + column + v * LANES, acc[r][v]);
}

// Folds the values of a block, weighted, into the output.
template <int R, typename T>
void fold(Pass& pass, const Block<T>& block) {
  constexpr int V = vectors_at_once(R);
  const int64_t D = block.call.head_dim;
  const T* values[BLOCK_KEYS];
  for (int j = 0; j < block.count; ++j) values[j] = block.keys[j] + block.plane + pass.offset;
  int64_t column = 0;
  for (; column + V * LANES <= D; column += V * LANES)
    accumulate<R, V>(pass, values, block.count, D, column, block.ahead);
  for (; column < D; column += LANES)
    accumulate<R, 1>(pass, values, block.count, D, column, block.ahead);
}

// The queries of R heads, `stride` apart.
template <int R, typename T>
void begin(Pass& pass, const T* first_query, int64_t stride, int64_t D) {
  constexpr int W = lanes_per_row(R);
  std::fill_n(pass.queries, LANES / W * D, 0.0f);
  std::fill_n(pass.out, R * D, 0.0f);
  for (int r = 0; r < R; ++r) {
    const T* q = first_query + r * stride;
    constexpr int PER_LANE = in_pairs<R, T>() ? 2 : 1;
    for (int64_t i = 0; i < D / PER_LANE; ++i) {
      float lane;
      if constexpr (PER_LANE == 2)
        std::memcpy(&lane, q + 2 * i, sizeof(lane));
      else
        lane = to_float(q[i]);
      pass.queries[i / W * LANES + r * W + i % W] = lane;
    }
  }
  pass.largest = splat(NO_KEY);
  pass.total = f32x16{};
}

template <int R>
void end(const Pass& pass, RowState* state) {
  constexpr int W = lanes_per_row(R);
  const f32x16 total = combine_lanes<W / 2>(pass.total, [](f32x16 a, f32x16 b) { return a + b; });
  for (int r = 0; r < R; ++r) state[r] = {pass.largest[r * W], total[r * W]};
}

// What a pass does, for its number of rows.
template <typename T>
struct Stages {
  void (*begin)(Pass&, const T*, int64_t, int64_t);
  void (*weigh)(Pass&, const Block<T>&);
  void (*fold)(Pass&, const Block<T>&);
  void (*end)(const Pass&, RowState*);
};
template <int R, typename T>
constexpr Stages<T> STAGES = {begin<R, T>, weigh<R, T>, fold<R, T>, end<R>};
template <typename T>
struct StagesByRows {
  Stages<T> stages[MAX_ROWS + 1];

  template <int... I>
  constexpr explicit StagesByRows(std::integer_sequence<int, I...>)
      : stages{{}, STAGES<I + 1, T>...} {}
};
template <typename T>
constexpr StagesByRows<T> STAGES_BY_ROWS(std::make_integer_sequence<int, MAX_ROWS>{});

// Splits of one sequence are about equal.
inline int keys_per_split(int num_keys) {
  const int num_splits = (num_keys + SPLIT_KEYS - 1) / SPLIT_KEYS;
  const int keys = (num_keys + num_splits - 1) / num_splits;
  return (keys + BLOCK_KEYS - 1) / BLOCK_KEYS * BLOCK_KEYS;
}

template <typename T, typename Kept>
int heads_per_split(const Problem<T, Kept>& p) {
  const int64_t heads = SPLIT_BYTES / (p.head_dim * int64_t(sizeof(T)));
  return int(std::clamp<int64_t>(heads, 1, p.num_kv_heads));
}

// Blocks of keys and values as they lie in their pages, fetched while the one before is worked on.
template <typename T, typename Kept>
struct Blocks {
  Blocks(const Problem<T, Kept>& p, int num_heads)
      : plane_(p.plane()), width_(num_heads * p.head_dim) {}

  // Of these keys, after which there are LANES more, whatever they are.
  void begin(const T* const* keys, int count) {
    ahead_ = {keys, keys + count, plane_, width_};
    while (ahead_.row < keys + std::min(BLOCK_KEYS, count)) ahead_.template lines<1>();
  }
  Block<T> block(const Call& call, const T* const* keys, int count, int distance, float* widened) {
    return {call, keys, plane_, count, distance, ahead_, widened};
  }

 private:
  int64_t plane_, width_;
  Fetch<T> ahead_{};
};

// The same of fp8: widened, and the next block fetched meanwhile.
template <typename T>
struct Blocks<T, fp8> {
  Blocks(const Problem<T, fp8>& p, int num_heads)
      : plane_(p.plane()), width_(num_heads * p.head_dim), memory_(2 * BLOCK_KEYS * width_) {}

  void begin(const fp8* const* keys, int count) { end_ = keys + count; }
  Block<T> block(const Call& call, const fp8* const* keys, int count, int distance,
                 float* widened) {
    T* const dense = reinterpret_cast<T*>(memory_.data());
    for (int j = 0; j < BLOCK_KEYS + LANES; ++j) rows_[j] = dense + (j < count ? j : 0) * width_;
    for (int plane = 0; plane < 2; ++plane)
      for (int j = 0; j < count; ++j) {
        if (keys + j + BLOCK_KEYS < end_) fetch_row(keys[j + BLOCK_KEYS] + plane * plane_, width_);
        widen_row(dense + (plane * BLOCK_KEYS + j) * width_, keys[j] + plane * plane_, width_);
      }
    return {call, rows_, BLOCK_KEYS * width_, count, distance, nothing_ahead_, widened};
  }

 private:
  int64_t plane_, width_;
  AlignedFloats memory_;  // [2][BLOCK_KEYS][width] of T
  const T* rows_[BLOCK_KEYS + LANES];
  const fp8* const* end_ = nullptr;
  Fetch<T> nothing_ahead_{};
};

// What one thread works in.
template <typename T, typename Kept>
struct SplitScratch {
  explicit SplitScratch(const Problem<T, Kept>& p)
      : blocks(p, heads_per_split(p)),
        passes(heads_per_split(p) * ((p.group() + MAX_ROWS - 1) / MAX_ROWS)),
        queries(passes.size() * MAX_ROWS * 2 * p.head_dim),
        widened(LANES * p.head_dim) {}

  Blocks<T, Kept> blocks;
  std::vector<Pass> passes;
  std::vector<float> queries;
  std::vector<float> widened;
};

// out[heads of the split * group][D] and state[...] of the keys in the split.
template <typename T, typename Kept>
void attend_split(const Problem<T, Kept>& p, const Split& split, float* out, RowState* state,
                  SplitScratch<T, Kept>& scratch) {
  const int group = p.group();
  const int64_t D = p.head_dim, token = p.cu_seqlens[split.n];
  const Kept* keys[SPLIT_KEYS + LANES];
  p.key_rows(split.n, split.head, split.begin, split.count, keys);
  std::fill_n(keys + split.count, LANES, keys[0]);

  const auto each_pass = [&](auto&& action) {
    int i = 0;
    for (int head = 0; head < split.num_heads; ++head)
      for (int first = 0; first < group; first += MAX_ROWS, ++i)
        action(scratch.passes[i], STAGES_BY_ROWS<T>.stages[std::min(MAX_ROWS, group - first)], i, head,
               head * group + first);
  };
  each_pass([&](Pass& pass, const Stages<T>& stages, int i, int head, int row) {
    pass.offset = head * D;
    pass.scale = p.logit_scale(split.head + head);
    pass.queries = scratch.queries.data() + i * MAX_ROWS * 2 * D;
    pass.biases = p.reach ? p.biases(token, split.head * group + row) : nullptr;
    pass.out = out + row * D;
    stages.begin(pass, p.query(token, split.head * group + row), p.q_head, D);
  });
  scratch.blocks.begin(keys, split.count);
  for (int i = 0; i < split.count; i += BLOCK_KEYS) {
    const int count = std::min(BLOCK_KEYS, split.count - i);
    const int distance = p.seq_lens[split.n] - 1 - split.begin - i;
    const Block<T> block =
        scratch.blocks.block(p, keys + i, count, distance, scratch.widened.data());
    each_pass([&](Pass& pass, const Stages<T>& stages, int, int, int) {
      stages.weigh(pass, block);
    });
    each_pass([&](Pass& pass, const Stages<T>& stages, int, int, int) {
      stages.fold(pass, block);
    });
  }
  each_pass([&](Pass& pass, const Stages<T>& stages, int, int, int row) {
    stages.end(pass, state + row);
  });
}

// Joins `count` consecutive splits of the same sequence and heads.
template <typename T, typename Kept>
void merge_splits(const Problem<T, Kept>& p, const Split& split, int count, int stride, float* out,
                  const RowState* state) {
  const int group = p.group();
  const int64_t D = p.head_dim, token = p.cu_seqlens[split.n];
  for (int r = 0; r < split.num_heads * group; ++r) {
    RowState all;
    for (int s = 0; s < count; ++s) all.max = std::max(all.max, state[s * stride + r].max);
    float* sum = out + r * D;
    for (int s = 0; s < count; ++s) {
      const RowState& part = state[s * stride + r];
      const float factor = std::exp(part.max - all.max);
      const float* from = out + (s * stride + r) * D;
      all.sum = th::fma(part.sum, factor, all.sum);
      for (int64_t d = 0; d < D; d += LANES)
        store(sum + d, fma(load(from + d), splat(factor), s ? load(sum + d) : f32x16{}));
    }
    const int64_t head = split.head * group + r;
    scale_row(p.output(token, head), sum, p.value_scale(head / group) / all.sum, D);
    p.lse[token * p.num_q_heads + head] = all.lse();
  }
}

}  // namespace th
