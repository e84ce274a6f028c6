// Softmax attention of a tile of rows (queries) to blocks of keys: one thread, float sums.
//
//   AttentionTile<T, V, ROWS> tile(D, Dv) keys of T, values of V, up to ROWS rows; one per thread
//   tile.begin(rows, range)               row r will see the keys of the KeyRange range(r)
//   tile.pack(rows, at, n)                elements [at, at + n) of the queries, row r at rows[r]
//   tile.fold(block, scale, softcap)      takes in a block of keys; any number of times. With biases
//                                         [key][ROWS], logits of its keys are added those
//   tile.row(r), tile.state(r)            unnormalised output [Dv], maximum and sum
//
// Sixteen rows share a register, a row to a lane. Queries are transposed once a tile; then an
// element of a key is broadcast to meet sixteen queries, so keys are used where they lie, as rows
// anywhere in memory, and never transposed. Logits are [key][row]: the softmax runs along keys
// without reducing across lanes, and leaves its weights in the order in which the product with the
// values broadcasts them. A row's result depends on its number in the tile and on its keys alone.
//
// D and Dv are multiples of 16. Where the CPU can multiply pairs of bf16, keys are taken in pairs:
// exact products, summed in float.
#pragma once

#include <algorithm>

#include "aligned_floats.h"
#include "fp8_rows.h"
#include "simd.h"
#include "softmax.h"

namespace th {

constexpr int KEYS_PER_BLOCK = 64;

// Rows of a tile of a sequence with so many rows: wide tiles copy fewer keys, narrow ones of a
// short sequence compute less above the diagonal.
constexpr int MAX_ROWS_PER_TILE = 128;
constexpr int rows_per_tile(int num_rows) { return num_rows < 512 ? 64 : MAX_ROWS_PER_TILE; }

// Keys [begin, end) of a sequence.
struct KeyRange {
  int begin, end;
};

// Consecutive keys of a sequence, from number `begin` on. While it is worked on, the rows `ahead`,
// as many as keys, are fetched, if there are some.
template <typename T, typename V>
struct KeyBlock {
  int begin, count;
  const T* keys[KEYS_PER_BLOCK];
  const V* values[KEYS_PER_BLOCK];
  const T* ahead[KEYS_PER_BLOCK] = {};
};

template <typename T, typename V, int ROWS>
class AttentionTile {
 public:
  AttentionTile(int64_t D, int64_t Dv)
      : D_(D),
        Dv_(Dv),
        units_(PAIRS ? D / 2 : D),
        queries_(ROWS * units_),
        out_(ROWS * Dv),
        weights_(KEYS_PER_BLOCK * ROWS),
        widened_(WIDEN ? KEY_STEP * D : 0) {}

  template <typename Range>
  void begin(int num_rows, const Range& range) {
    rows_ = num_rows, vectors_ = (num_rows + LANES - 1) / LANES;
    std::fill_n(out_.data(), rows_ * Dv_, 0.0f);
    seen_by_all_ = range(0);
    for (int v = 0; v < vectors_; ++v) {
      max_[v] = splat(NO_KEY), sum_[v] = f32x16{};
      int32_t begins[LANES], ends[LANES];
      for (int lane = 0; lane < LANES; ++lane) {
        const int row = std::min(v * LANES + lane, rows_ - 1);  // lanes past the end: any row
        const KeyRange keys = range(row);
        begins[lane] = keys.begin, ends[lane] = keys.end;
        seen_by_all_ = {std::max(seen_by_all_.begin, keys.begin),
                        std::min(seen_by_all_.end, keys.end)};
      }
      begin_[v] = load_lanes<i32x16>(begins), end_[v] = load_lanes<i32x16>(ends);
    }
  }

  void pack(const T* const* rows, int64_t at, int64_t n) {
    constexpr int64_t PER_UNIT = PAIRS ? 2 : 1;
    for (int v = 0; v < vectors_; ++v)
      for (int64_t k = 0; k < n / PER_UNIT; k += LANES) {
        const int left = int(std::min<int64_t>(LANES, n / PER_UNIT - k));
        f32x16 x[LANES];
        for (int i = 0; i < LANES; ++i)
          x[i] = v * LANES + i < rows_ ? units(rows[v * LANES + i], k, left) : f32x16{};
        transpose16(x);
        float* to = queries_.data() + (v * units_ + at / PER_UNIT + k) * LANES;
        for (int i = 0; i < left; ++i) store(to + i * LANES, x[i]);
      }
  }

  void fold(const KeyBlock<T, V>& block, float scale, float softcap = 0,
            const float* biases = nullptr) {
    for (int j = 0; j < block.count; j += KEY_STEP) multiply_keys(block, j);
    for (int v = 0; v < vectors_; ++v) weigh(block, v, scale, softcap, biases);
    int64_t column = 0;
    for (; column + WIDTH * LANES <= Dv_; column += WIDTH * LANES) add_values<WIDTH>(block, column);
    if (column < Dv_) add_values<1>(block, column);
  }

  int rows() const { return rows_; }
  const float* row(int r) const { return out_.data() + r * Dv_; }
  RowState state(int r) const { return {max_[r / LANES][r % LANES], sum_[r / LANES][r % LANES]}; }

 private:
#ifdef __AVX512BF16__
  static constexpr bool PAIRS = sizeof(T) == sizeof(bf16);
#else
  static constexpr bool PAIRS = false;
#endif
  static constexpr bool WIDEN = sizeof(T) == sizeof(bf16) && !PAIRS;
  // What a product has in registers: sums of keys by vectors of rows, or of rows by those of columns.
  static constexpr int WIDTH = SUMS >= 16 ? 2 : 1, KEY_STEP = SUMS / WIDTH;
  static constexpr int64_t DEPTH = 128;

  // Units [k, k + n) of a row: pairs, or elements as floats.
  static TH_INLINE f32x16 units(const T* row, int64_t k, int n) {
    if constexpr (PAIRS)
      return load(reinterpret_cast<const float*>(row) + k, n);
    else
      return load(row + k, n);
  }

  const float* unit_row(const T* key, int i) {
    if constexpr (!WIDEN) return reinterpret_cast<const float*>(key);
    float* to = widened_.data() + i * D_;
    scale_row(to, key, 1.0f, D_);
    return to;
  }

  // Products of all rows with up to KEY_STEP keys from number j of the block on.
  void multiply_keys(const KeyBlock<T, V>& block, int j) {
    const float* keys[KEY_STEP];
    const T* ahead[KEY_STEP];
    for (int i = 0; i < KEY_STEP; ++i) {
      const int key = std::min(j + i, block.count - 1);
      keys[i] = unit_row(block.keys[key], i), ahead[i] = block.ahead[key];
    }
    float* to = weights_.data() + j * ROWS;
    const T* const* once = ahead[0] ? ahead : nullptr;
    int v = 0;
    for (; v + WIDTH <= vectors_; v += WIDTH)
      products<WIDTH>(v, keys, v ? nullptr : once, to + v * LANES);
    if (v < vectors_) products<1>(v, keys, v ? nullptr : once, to + v * LANES);
  }

  // to[key][row] for R registers of rows; fetches the rows `ahead` if they are given. Sums of
  // DEPTH products are added to one another: one long chain of additions would round more.
  template <int R>
  void products(int vector, const float* const* keys, const T* const* ahead, float* to) {
    const float* queries = queries_.data() + vector * units_ * LANES;
    for (int64_t k = 0; k < units_; k += DEPTH) {
      const int64_t end = std::min(units_, k + DEPTH);
      if (ahead) fetch(ahead, k, end);
      multiply_units<R>(queries, units_ * LANES, keys, k, end, k > 0, to);
    }
  }

  static TH_INLINE void fetch(const T* const* rows, int64_t k, int64_t end) {
    for (; k < end; k += LANES)
      for (int i = 0; i < KEY_STEP; ++i)
        __builtin_prefetch(reinterpret_cast<const float*>(rows[i]) + k, 0, 2);
  }

  // A function of its own, as its loop needs every register for addresses.
  template <int R>
  static TH_NOINLINE void multiply_units(const float* queries, int64_t stride,
                                         const float* const* keys, int64_t begin, int64_t end,
                                         bool add, float* to) {
    f32x16 acc[KEY_STEP][R] = {};
    const float* key[KEY_STEP];
#pragma GCC unroll 8
    for (int i = 0; i < KEY_STEP; ++i) key[i] = keys[i];
    for (int64_t k = begin; k < end; ++k) {
      f32x16 q[R];
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) q[r] = load(queries + r * stride + k * LANES);
#pragma GCC unroll 8
      for (int i = 0; i < KEY_STEP; ++i) {
        const f32x16 element = splat(key[i][k]);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) acc[i][r] = multiply_add<PAIRS>(q[r], element, acc[i][r]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < KEY_STEP; ++i)
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        float* sum = to + i * ROWS + r * LANES;
        store(sum, add ? load(sum) + acc[i][r] : acc[i][r]);
      }
  }

  // Products of a block turned into weights e^(logit - max), for one register of rows.
  void weigh(const KeyBlock<T, V>& block, int v, float scale, float softcap, const float* biases) {
    float* s = weights_.data() + v * LANES;
    const bool masked = block.begin < seen_by_all_.begin ||
                        block.begin + block.count > seen_by_all_.end;
    f32x16 largest = max_[v];
    for (int j = 0; j < block.count; ++j) {
      f32x16 x = load(s + j * ROWS) * scale;
      if (softcap != 0) x = softcap * tanh(x * (1.0f / softcap));
      if (biases) x += load(biases + j * ROWS + v * LANES);
      if (masked) {
        const i32x16 key = i32x16{} + (block.begin + j);
        x = select((key >= begin_[v]) & (key < end_[v]), x, splat(NO_KEY));
      }
      store(s + j * ROWS, x);
      largest = max(x, largest);
    }
    // A row that has seen no key yet keeps weights of 0, where -inf - -inf would be NaN.
    const f32x16 shift = select(largest == splat(NO_KEY), f32x16{}, largest);
    const f32x16 factor = exp(max_[v] - shift);
    f32x16 total{};
    for (int j = 0; j < block.count; ++j) {
      const f32x16 weight = exp(load(s + j * ROWS) - shift);
      store(s + j * ROWS, weight);
      total += weight;
    }
    max_[v] = largest, sum_[v] = fma(sum_[v], factor, total);
    store(factors_ + v * LANES, factor);
  }

  // Columns [column, column + 16 C) of out = factor * out + weights * values.
  template <int C>
  void add_values(const KeyBlock<T, V>& block, int64_t column) {
    int row = 0;
    for (; row + KEY_STEP <= rows_; row += KEY_STEP) add_values<KEY_STEP, C>(block, row, column);
    for (; row + 4 <= rows_; row += 4) add_values<4, C>(block, row, column);
    for (; row < rows_; ++row) add_values<1, C>(block, row, column);
  }

  template <int R, int C>
  TH_NOINLINE void add_values(const KeyBlock<T, V>& block, int row, int64_t column) {
    f32x16 acc[R][C] = {};
    const float* weights = weights_.data() + row;
    for (int j = 0; j < block.count; ++j, weights += ROWS) {
      f32x16 x[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) x[c] = load(block.values[j] + column + c * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const f32x16 weight = splat(weights[r]);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, x[c], acc[r][c]);
      }
    }
    float* out = out_.data() + row * Dv_ + column;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        float* sum = out + r * Dv_ + c * LANES;
        store(sum, fma(load(sum), splat(factors_[row + r]), acc[r][c]));
      }
  }

  int64_t D_, Dv_, units_;
  int rows_ = 0, vectors_ = 0;
  KeyRange seen_by_all_{};
  i32x16 begin_[ROWS / LANES], end_[ROWS / LANES];  // of the keys of a row
  f32x16 max_[ROWS / LANES], sum_[ROWS / LANES];
  float factors_[ROWS];
  AlignedFloats queries_;  // [vectors][units][16]
  AlignedFloats out_;      // [rows][Dv], unnormalised
  AlignedFloats weights_;  // [keys][ROWS], products at first
  AlignedFloats widened_;  // [KEY_STEP][D]
};

// A block of keys and values copied to where they are dense, values in float: rows of one head may
// lie many kilobytes apart, at a power of two, and would evict one another from the caches. Rows of
// fp8 are widened, without their scales.
template <typename T>
class DenseBlock {
 public:
  DenseBlock(int64_t D, int64_t Dv)
      : D_(D), Dv_(Dv), keys_(KEYS_PER_BLOCK * D), values_(KEYS_PER_BLOCK * Dv) {}

  // key(i) and value(i) are the rows of key number i; keys [begin, end) are still to come.
  template <typename Row, typename ValueRow>
  const KeyBlock<T, float>& load(int begin, int end, const Row& key, const ValueRow& value) {
    block_.begin = begin, block_.count = std::min(KEYS_PER_BLOCK, end - begin);
    for (int j = 0; j < block_.count; ++j) {
      T* dense = reinterpret_cast<T*>(keys_.data()) + j * D_;
      widen_row(dense, key(begin + j), D_);
      scale_row(values_.data() + j * Dv_, value(begin + j), 1.0f, Dv_);
      block_.keys[j] = dense, block_.values[j] = values_.data() + j * Dv_;
      fetch_next(block_.ahead[j], key(std::min(begin + j + KEYS_PER_BLOCK, end - 1)));
    }
    return block_;
  }

 private:
  static void fetch_next(const T*& ahead, const T* row) { ahead = row; }
  void fetch_next(const T*&, const fp8* row) const { fetch_row(row, D_); }

  int64_t D_, Dv_;
  AlignedFloats keys_, values_;  // keys as T
  KeyBlock<T, float> block_;
};

}  // namespace th
