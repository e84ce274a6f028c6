// Products of many rows with a weight matrix: y[M, N] = x[M, K] W[N, K]^T. T is float or bf16; sums
// are float.
//
//   LaneRows<T> x;                       keeps its memory for the next product
//   x.resize(M, K)                       then x.pack(v, row) for each v < x.vectors(), by any
//                                        thread; row(i) is a pointer to row i of x
//   LaneProduct<T> product;              keep one per thread: its memory is reused
//   product.run(x, first, last, W, ldw, N, y, ldy)
//                                        y[m * ldy + n] in float, for the rows of x in vectors
//                                        [first, last); row 0 of y is the first of these; W is of
//                                        T, or of floats where Units<T> are floats
//   LaneProduct<bf16, true>              the same by AMX: where HAS_AMX and amx_allowed()
//
// How: sixteen rows of x share a register, a row to a lane, and an element of W is broadcast to meet
// them. So it is x that is transposed, which the many rows of W share, and W is used as it lies: it
// needs no second copy. A tile of W stays in L1 while it meets all vectors of x, which come from L2,
// and fetches what comes after it. Where the CPU multiplies pairs of bf16, a unit is a pair.
//
// An element of y is a sum in the order of k, in stretches of DEPTH units which are then added: it
// depends on its row of x and its row of W, never on M, N, the vectors asked for or the tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "aligned_floats.h"
#include "amx.h"
#include "reading.h"
#include "simd.h"

namespace th {

// What a register holds sixteen of, in four bytes: floats, or pairs of bf16.
template <typename T>
struct Units {
#ifdef __AVX512BF16__
  static constexpr int SIZE = sizeof(float) / sizeof(T);
#else
  static constexpr int SIZE = 1;
#endif
  static constexpr bool PAIRS = SIZE == 2;
  static constexpr int STEP = LANES * SIZE;  // elements of a register

  // Sixteen units from p on, those past `left` elements 0.
  static TH_INLINE f32x16 load(const T* p, int64_t left) {
    if constexpr (!PAIRS) return th::load(p, int(std::min<int64_t>(left, LANES)));
    f32x16 units{};
    if (left >= STEP)
      std::memcpy(&units, p, sizeof(units));
    else
      std::memcpy(&units, p, sizeof(T) * left);
    return units;
  }
  static int64_t count(int64_t K) { return (K + STEP - 1) / STEP * LANES; }  // whole registers
};

template <typename T>
class LaneRows {
 public:
  void resize(int64_t M, int64_t K) {
    rows_ = M, depth_ = K, units_ = Units<T>::count(K);
    const int64_t floats = vectors() * units_ * LANES;
    if (floats <= capacity_) return;
    memory_.reset(), memory_.reset(new AlignedFloats(floats)), capacity_ = floats;
  }

  // Transposes rows [16 v, 16 v + 16); lanes past the last row become 0.
  template <typename Row>
  void pack(int v, const Row& row) {
    constexpr int STEP = Units<T>::STEP;
    const T* rows[LANES];
    const int count = int(std::min<int64_t>(LANES, rows_ - v * LANES));
    for (int i = 0; i < count; ++i) rows[i] = row(v * LANES + i);
    float* to = memory_->data() + v * units_ * LANES;
    for (int64_t k = 0; k < depth_; k += STEP, to += LANES * LANES) {
      f32x16 x[LANES];
      for (int i = 0; i < LANES; ++i)
        x[i] = i < count ? Units<T>::load(rows[i] + k, depth_ - k) : f32x16{};
      transpose16(x);
      for (int i = 0; i < LANES; ++i) store(to + i * LANES, x[i]);
    }
  }

  int64_t rows() const { return rows_; }
  int64_t depth() const { return depth_; }
  int64_t units() const { return units_; }
  int vectors() const { return int((rows_ + LANES - 1) / LANES); }
  // Of vector v, from a unit on; the vectors are units() * LANES floats apart.
  const float* at(int v, int64_t unit) const {
    return memory_->data() + (v * units_ + unit) * LANES;
  }

 private:
  int64_t rows_ = 0, depth_ = 0, units_ = 0, capacity_ = 0;
  std::unique_ptr<AlignedFloats> memory_;  // [vectors][units][16]
};

namespace detail {

#ifdef __AVX512F__
constexpr int LANE_TILE_ROWS = 8, LANE_TILE_VECTORS = 3;  // of W, and of x
constexpr int64_t LANE_BLOCK = 384;  // rows of W that meet vectors of x while these are in L2
#else
constexpr int LANE_TILE_ROWS = 6, LANE_TILE_VECTORS = 1;
constexpr int64_t LANE_BLOCK = 96;
#endif

// C[r][v] (+)= the products of rows of W, in units, with V vectors of x. Rows that are used next are
// of U.
template <typename T, typename U, int V>
TH_NOINLINE void multiply_lanes(const float* W, int64_t ldw, const float* x, int64_t vector_stride,
                                int64_t units, float* C, int64_t ldc, bool add, NextRows ahead) {
  constexpr int R = LANE_TILE_ROWS, PARTS = LANES / REGISTER_LANES;  // of a vector
  Register acc[R][V * PARTS] = {};
  for (int64_t k = 0; k < units;) {  // a multiple of LANES
    constexpr int64_t UNIT_BYTES = Units<U>::SIZE * sizeof(U);
    if (k * UNIT_BYTES % LINE_BYTES == 0) ahead.fetch(k * UNIT_BYTES);
    for (const int64_t end = k + LANES; k < end; ++k) {
      Register xs[V * PARTS];
#pragma GCC unroll 16
      for (int i = 0; i < V * PARTS; ++i)
        xs[i] = held(load_register(x + i / PARTS * vector_stride + k * LANES +
                                   i % PARTS * REGISTER_LANES));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Register w = held(splat_register(W[r * ldw + k]));
#pragma GCC unroll 16
        for (int i = 0; i < V * PARTS; ++i)
          acc[r][i] = multiply_add<Units<T>::PAIRS>(w, xs[i], acc[r][i]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < V * PARTS; ++i) {
      float* c = C + r * ldc + i * REGISTER_LANES;
      store_register(c, add ? load_register(c) + acc[r][i] : acc[r][i]);
    }
}

}  // namespace detail

template <typename T, bool AMX = false>
class LaneProduct {
 public:
  static constexpr int VECTORS = AMX ? 16 : 9;  // of x: DEPTH units of so many stay in L2

  template <typename U>
  void run(const LaneRows<T>& x, int first, int last, const U* W, int64_t ldw, int64_t N, float* y,
           int64_t ldy) {
    const AmxTiles configured(AMX);
    for (int v = first; v < last; v += VECTORS)
      for (int64_t n = 0; n < N; n += BLOCK) {
        const int count = std::min(VECTORS, last - v), rows = int(std::min(BLOCK, N - n));
        sum(x, v, count, W + n * ldw, ldw, rows);
        transpose(x, v, count, rows, y + (v - first) * LANES * ldy + n, ldy);
      }
  }

 private:
  static_assert(!AMX || Units<T>::PAIRS, "AMX multiplies pairs of bf16");
  static constexpr int ROWS = AMX ? AMX_TILE_ROWS : detail::LANE_TILE_ROWS;  // of a tile
  static constexpr int TILE_VECTORS = AMX ? 2 : detail::LANE_TILE_VECTORS;
  static constexpr int64_t DEPTH = AMX ? 256 : 512, PANEL_STRIDE = DEPTH + LANES;
  static constexpr int64_t BLOCK = AMX ? 96 : detail::LANE_BLOCK;  // rows of W whose sums are kept
  static constexpr int64_t LDC = VECTORS * LANES;
  static_assert(BLOCK % ROWS == 0 && BLOCK % LANES == 0);

  // sums_[n][lane] for `rows` rows of W and `count` vectors of x.
  template <typename U>
  void sum(const LaneRows<T>& x, int v, int count, const U* W, int64_t ldw, int rows) {
    static_assert(Units<U>::SIZE == Units<T>::SIZE, "W is in the units of x");
    if (x.units() == 0) std::fill_n(sums_.data(), rows * LDC, 0.0f);
    // A tile goes through as much of K as leaves its vectors of x in L2: rows of W are long then.
    const int64_t span = AMX ? DEPTH : VECTORS / count * DEPTH;
    for (int64_t k = 0; k < x.units(); k += span)
      for (int n = 0; n < rows; n += ROWS)
        sum_tile(x, v, count, k, std::min(k + span, x.units()), W + n * ldw, ldw,
                 std::min(ROWS, rows - n), sums_.data() + n * LDC);
  }

  // Units [first, last) of a tile.
  template <typename U>
  void sum_tile(const LaneRows<T>& x, int v, int count, int64_t first, int64_t last, const U* W,
                int64_t ldw, int rows, float* C) {
    constexpr int SIZE = Units<T>::SIZE;
    // Rows of W are read as they lie where they are rows of units.
    const bool in_units = SIZE * sizeof(U) == sizeof(float) && ldw % SIZE == 0;
    for (int64_t k = first; k < last; k += DEPTH) {
      const int64_t units = std::min(DEPTH, last - k), next = k + DEPTH;
      const U* from = W + k * SIZE;
      const U* ahead = next < last ? W + next * SIZE : W + ROWS * ldw + first * SIZE;
      if (in_units && (k + units) * SIZE <= x.depth() && rows == ROWS) {
        tiles(x, v, count, k, units, reinterpret_cast<const float*>(from), ldw / SIZE, ahead, ldw,
              C);
      } else {
        copy(from, ldw, rows, x.depth() - k * SIZE, units);
        tiles(x, v, count, k, units, panel_.data(), PANEL_STRIDE, ahead, ldw, C);
      }
    }
  }

  // The panel: `count` units of `rows` rows of W, of which each has `left` elements; the rest is 0.
  template <typename U>
  void copy(const U* W, int64_t ldw, int rows, int64_t left, int64_t count) {
    for (int r = 0; r < ROWS; ++r)
      for (int64_t i = 0; i < count; i += LANES) {
        const int64_t k = i * Units<T>::SIZE;
        store(panel_.data() + r * PANEL_STRIDE + i,
              r < rows ? Units<U>::load(W + r * ldw + k, left - k) : f32x16{});
      }
  }

  // C (+)= ROWS rows of W, `stride` apart in units, times vectors [v, v + count) of x; rows from
  // `next` on are used after them.
  template <typename U>
  void tiles(const LaneRows<T>& x, int v, int count, int64_t k, int64_t units, const float* rows,
             int64_t stride, const U* next, int64_t ldw, float* C) {
    const int num_tiles = (count + TILE_VECTORS - 1) / TILE_VECTORS;
    for (int tile = 0, i = 0; tile < num_tiles; ++tile) {
      // As even as can be: four vectors are two and two, rather than three and one.
      const int vectors = (count - i + num_tiles - tile - 1) / (num_tiles - tile);
      const int begin = ROWS * tile / num_tiles, end = ROWS * (tile + 1) / num_tiles;
      const NextRows ahead{reinterpret_cast<const char*>(next + begin * ldw),
                           ldw * int64_t(sizeof(U)), end - begin};
      multiply<U>(vectors, rows, stride, x.at(v + i, k), x.units() * LANES, units, C + i * LANES,
               k > 0, ahead);
      i += vectors;
    }
  }

  template <typename U>
  static void multiply(int vectors, const float* rows, int64_t stride, const float* x,
                       int64_t vector_stride, int64_t units, float* C, bool add,
                       NextRows ahead) {
    using namespace detail;
    if constexpr (AMX)
      return multiply_amx(rows, stride, x, vector_stride, vectors, units, C, LDC, add, ahead);
    if constexpr (LANE_TILE_VECTORS == 3) {
      if (vectors == 3)
        return multiply_lanes<T, U, 3>(rows, stride, x, vector_stride, units, C, LDC, add, ahead);
      if (vectors == 2)
        return multiply_lanes<T, U, 2>(rows, stride, x, vector_stride, units, C, LDC, add, ahead);
    }
    multiply_lanes<T, U, 1>(rows, stride, x, vector_stride, units, C, LDC, add, ahead);
  }

  // y[m][n] of the sums.
  void transpose(const LaneRows<T>& x, int v, int count, int rows, float* y, int64_t ldy) {
    for (int i = 0; i < count; ++i) {
      const int lanes = int(std::min<int64_t>(LANES, x.rows() - (v + i) * LANES));
      for (int n = 0; n < rows; n += LANES) {
        f32x16 c[LANES];
        for (int j = 0; j < LANES; ++j) c[j] = load(sums_.data() + (n + j) * LDC + i * LANES);
        transpose16(c);
        for (int m = 0; m < lanes; ++m)
          store(y + (i * LANES + m) * ldy + n, c[m], std::min(LANES, rows - n));
      }
    }
  }

  AlignedFloats panel_{ROWS * PANEL_STRIDE};
  AlignedFloats sums_{BLOCK * LDC};  // [rows of W][lanes]
};

}  // namespace th
