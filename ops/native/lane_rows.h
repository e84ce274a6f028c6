// Products of many rows with a weight matrix: y[M, N] = x[M, K] W[N, K]^T. T is float or bf16; sums
// are float.
//
//   LaneRows<T> x;                       keeps its memory for the next product
//   x.resize(M, K, few)                  then x.pack(v, row) for each v < x.vectors(), by any
//                                        thread; row(i) is a pointer to row i of x; few: whether
//                                        rows may be so few that errors are to be small
//   x.pack_columns(first, last, at, ld)  the same of vectors [first, last) of floats, where element
//                                        k of row i lies at at[k * ld + i]
//   LaneProduct<T> product;              keep one per thread: its memory is reused
//   product.run(x, first, last, W, ldw, N, y, ldy, add)
//                                        y[m * ldy + n] in float, for the rows of x in vectors
//                                        [first, last); row 0 of y is the first of these; W is of
//                                        T, or of floats where bf16 are widened; add: to y
//   LaneProduct<bf16, true>              the same by AMX: where HAS_AMX and amx_allowed()
//
// How: rows of x share a register, and an element of W is broadcast to meet them. So it is x that is
// transposed, which the many rows of W share, and W is used as it lies: it needs no second copy. A
// tile of W meets all vectors of x, which come from L2, and fetches what comes after it. Rows of bf16
// that have to be floats are widened in a panel; the tile before them does so, between its
// multiply-adds, which leave room for it.
//
// What is broadcast is a unit: two elements that follow one another. So a register has two lanes of
// each of eight rows of x, or one of each of sixteen where the CPU multiplies pairs of bf16. Of single
// floats, sixteen rows would share a register too, and a product of few rows take more loads for its
// multiply-adds: of 32 rows ten for sixteen (8 of W by 2 vectors), where units take ten for 24 (6 by
// 4), and a CPU has hardly more than one load of 64 bytes for two multiply-adds.
//
// An element of y is two sums in the order of k, of even and of odd elements (one of pairs of bf16),
// in pieces of PIECE units (FEW_PIECE of rows that may be few), which are then added: it depends
// on its row of x and its row of W, never on M, N, the vectors asked for or the tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "aligned_floats.h"
#include "amx.h"
#include "reading.h"
#include "simd.h"

namespace th {

// Two elements of T: as floats, or as the bf16 that they are where the CPU multiplies pairs of these.
template <typename T>
struct Units {
#ifdef __AVX512BF16__
  static constexpr bool PAIRS = sizeof(T) == sizeof(bf16);
#else
  static constexpr bool PAIRS = false;
#endif
  static constexpr int SIZE = 2;                // elements
  static constexpr int FLOATS = PAIRS ? 1 : 2;  // in whose place it is
  static constexpr int COUNT = LANES / FLOATS;  // in a register
  static constexpr int STEP = COUNT * SIZE;     // elements of a register

  // A register of units from p on, those past `left` elements 0.
  static TH_INLINE f32x16 load(const T* p, int64_t left) {
    if constexpr (!PAIRS) return left >= LANES ? th::load(p) : th::load(p, int(left));
    f32x16 units{};
    if (left >= STEP)
      std::memcpy(&units, p, sizeof(units));
    else
      std::memcpy(&units, p, sizeof(T) * left);
    return units;
  }
  static int64_t count(int64_t K) { return (K + STEP - 1) / STEP * COUNT; }  // whole registers
};

template <typename T>
class LaneRows {
 public:
  static constexpr int ROWS = Units<T>::COUNT;  // of a vector

  void resize(int64_t M, int64_t K, bool few = false) {
    rows_ = M, depth_ = K, units_ = Units<T>::count(K), may_be_few_ = few;
    const int64_t floats = vectors() * units_ * LANES;
    if (memory_ && floats <= capacity_) return;
    memory_.reset(), memory_.reset(new AlignedFloats(floats)), capacity_ = floats;
  }

  // Transposes rows [ROWS v, ROWS v + ROWS); lanes past the last row become 0.
  template <typename Row>
  void pack(int v, const Row& row) {
    const T* rows[ROWS];
    const int count = int(std::min<int64_t>(ROWS, rows_ - v * ROWS));
    for (int i = 0; i < count; ++i) rows[i] = row(v * ROWS + i);
    pack_rows(v, rows, count);
  }
  TH_NOINLINE void pack_rows(int v, const T* const* rows, int count) {
    constexpr int STEP = Units<T>::STEP;
    float* to = memory_->data() + v * units_ * LANES;
    for (int64_t k = 0; k < depth_; k += STEP, to += ROWS * LANES) {
      f32x16 x[ROWS];
      for (int i = 0; i < ROWS; ++i)
        x[i] = i < count ? Units<T>::load(rows[i] + k, depth_ - k) : f32x16{};
      transpose(x);
      for (int i = 0; i < ROWS; ++i) store(to + i * LANES, x[i]);
    }
  }

  void pack_columns(int first, int last, const T* at, int64_t ld) {
    static_assert(Units<T>::FLOATS == 2 && sizeof(T) == sizeof(float), "a unit has two floats");
    float* to = memory_->data() + first * units_ * LANES;
    for (int64_t unit = 0; unit < units_; ++unit, to += LANES)
      for (int v = first; v < last; ++v) {
        const int count = int(std::min<int64_t>(ROWS, rows_ - v * ROWS));
        const int64_t left = depth_ - 2 * unit;
        const float* from = at + 2 * unit * ld + v * ROWS;
        f32x16 x[2];
        for (int i = 0; i < 2; ++i) x[i] = i < left ? th::load(from + i * ld, count) : f32x16{};
        store(to + (v - first) * units_ * LANES, in_turn<false>(x[0], x[1]));
      }
  }

  int64_t rows() const { return rows_; }
  int64_t depth() const { return depth_; }
  int64_t units() const { return units_; }
  bool may_be_few() const { return may_be_few_; }
  int vectors() const { return int((rows_ + ROWS - 1) / ROWS); }
  // Of vector v, from a unit on; the vectors are units() * LANES floats apart.
  const float* at(int v, int64_t unit) const {
    return memory_->data() + (v * units_ + unit) * LANES;
  }

 private:
  int64_t rows_ = 0, depth_ = 0, units_ = 0, capacity_ = 0;
  bool may_be_few_ = false;
  std::unique_ptr<AlignedFloats> memory_;  // [vectors][units][ROWS] units
};

namespace detail {

// Rows of W that meet vectors of x while these are in L2.
#ifdef __AVX512F__
constexpr int64_t LANE_BLOCK = 384;
#else
constexpr int64_t LANE_BLOCK = 96;
#endif

// Rows of which a line each is fetched, one at a time, while a line is multiplied. They are as many
// whatever a tile has, so that no step looks where they end.
constexpr int FETCHED_ROWS = 8;

// Units of U in a line, and whether rows of it are widened to meet x of T.
template <typename U>
constexpr int64_t LINE_OF = LINE_BYTES / (Units<U>::SIZE * sizeof(U));
template <typename T, typename U>
constexpr bool IS_WIDENED = !Units<T>::PAIRS && sizeof(U) == sizeof(bf16);

// What a tile does for rows of W that come later: it fetches some, and widens the first units, whole
// lines of them, of others.
struct Later {
  NextRows fetched;
  const bf16* narrow = nullptr;
  float* wide = nullptr;
  int64_t narrow_stride = 0, wide_stride = 0, units = 0;

  TH_INLINE void widen_line(int row, int64_t unit) const {
    const bf16* from = narrow + row * narrow_stride + 2 * unit;
    float* to = wide + row * wide_stride + 2 * unit;
#pragma GCC unroll 2
    for (int i = 0; i < LINE_BYTES / int(sizeof(bf16)); i += LANES) store(to + i, load(from + i));
  }
  TH_INLINE void advance(int64_t by, int64_t unit_bytes) {
    fetched.first += by * unit_bytes, narrow += 2 * by, wide += 2 * by, units -= by;
  }
};

// C[r][v] (+)= the products of R rows of W, in units, with V vectors of x. Rows of W are `ldw` floats
// apart; those that come later are of U.
template <typename T, typename U, int R, int V>
TH_NOINLINE void multiply_lanes(const float* W, int64_t ldw, const float* x, int64_t vector_stride,
                                int64_t units, float* C, int64_t ldc, bool add, Later later) {
  constexpr int PARTS = LANES / REGISTER_LANES;  // of a vector
  constexpr int FLOATS = Units<T>::FLOATS;
  Register acc[R][V * PARTS] = {};
  const auto multiply = [&](int64_t k) TH_LAMBDA {
    Register xs[V * PARTS];
#pragma GCC unroll 16
    for (int i = 0; i < V * PARTS; ++i)
      xs[i] = held(load_register(x + i / PARTS * vector_stride + k * LANES +
                                 i % PARTS * REGISTER_LANES));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Register w = held(repeated<Register, FLOATS>(W + r * ldw + k * FLOATS));
#pragma GCC unroll 16
      for (int i = 0; i < V * PARTS; ++i)
        acc[r][i] = multiply_add<Units<T>::PAIRS>(w, xs[i], acc[r][i]);
    }
  };
  constexpr int64_t LINE = LINE_OF<U>, AT_ONCE = LINE / FETCHED_ROWS;
  int64_t k = 0;
  const auto multiply_line = [&](bool widens) TH_LAMBDA {
    const char* line = later.fetched.first + k / LINE * LINE_BYTES;
#pragma GCC unroll 8
    for (int row = 0; row < FETCHED_ROWS; ++row) {
      __builtin_prefetch(line, 0, 2);
      line += later.fetched.row_bytes;
      if (widens && row < R) later.widen_line(row, k);
#pragma GCC unroll 4
      for (int i = 0; i < AT_ONCE; ++i) multiply(k + row * AT_ONCE + i);
    }
    k += LINE;
  };
  if constexpr (IS_WIDENED<T, U>)
    while (k + LINE <= std::min(units, later.units)) multiply_line(true);
  if (later.fetched.rows)
    while (k + LINE <= units) multiply_line(false);
  for (; k < units; ++k) multiply(k);
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
  // Of x: DEPTH units of so many stay in L2.
  static constexpr int VECTORS = AMX ? 16 : REGISTER_LANES < LANES || Units<T>::PAIRS ? 9 : 12;

  template <typename U>
  void run(const LaneRows<T>& x, int first, int last, const U* W, int64_t ldw, int64_t N, float* y,
           int64_t ldy, bool add = false) {
    const AmxTiles configured(AMX);
    for (int v = first; v < last; v += VECTORS) {
      const int count = std::min(VECTORS, last - v);
      // A tile that goes through all of K is done with: few sums are kept then, and stay in L1.
      const int64_t block = x.units() <= span(count) ? SMALL_BLOCK : BLOCK;
      for (int64_t n = 0; n < N; n += block) {
        const int rows = int(std::min(block, N - n));
        float* to = y + (v - first) * LaneRows<T>::ROWS * ldy + n;
        sum_in_tiles(x, v, count, W + n * ldw, ldw, rows, {to, ldy});
        transpose(x, v, count, rows, to, ldy, add);
      }
    }
  }

 private:
  // Where results go, if this stretch is their last one: their lines are asked for while they are
  // computed, a few at a time.
  struct Place {
    float* first;
    int64_t row;  // floats

    TH_INLINE void fetch(int64_t begin, int64_t count) const {
      if (!first) return;
      for (int64_t m = begin; m < begin + count; ++m) __builtin_prefetch(first + m * row, 1, 3);
    }
  };
  static_assert(!AMX || Units<T>::PAIRS, "AMX multiplies pairs of bf16");
  static constexpr int SIZE = Units<T>::SIZE, FLOATS = Units<T>::FLOATS;
  static constexpr int64_t DEPTH = AMX ? 256 : 512;  // units
  // Short pieces where five rows come here too (skinny.h): their errors are to be small.
  static constexpr bool SHORT = REGISTER_LANES < LANES;
  static constexpr int64_t PIECE = SHORT ? 512 / sizeof(T) : DEPTH, FEW_PIECE = 64;
  // Of a tile, at a time: where rows are widened, two panels stay in L1 beside x.
  template <typename U>
  static constexpr int64_t STRETCH = detail::IS_WIDENED<T, U> ? PIECE : DEPTH;
  template <typename U>
  static constexpr int64_t PANEL_STRIDE = STRETCH<U> * FLOATS + LANES;
  static constexpr int64_t BLOCK = AMX ? 96 : detail::LANE_BLOCK;  // rows of W whose sums are kept
  static constexpr int64_t SMALL_BLOCK = AMX ? BLOCK : 48;  // whole tiles of any number of rows
  static constexpr int64_t LDC = VECTORS * LANES;
  static constexpr int MAX_TILE_ROWS = AMX ? AMX_TILE_ROWS : 8;

  // A tile goes through as many units as leave its vectors of x in L2: rows of W are long then.
  static constexpr int64_t span(int count) { return AMX ? DEPTH : VECTORS / count * DEPTH; }

  // In tiles of so many rows of W and up to so many vectors of x: those with the fewest loads for
  // their multiply-adds.
  template <typename U>
  void sum_in_tiles(const LaneRows<T>& x, int v, int count, const U* W, int64_t ldw, int rows,
                    Place y) {
    if constexpr (AMX)
      sum<AMX_TILE_ROWS, 2>(x, v, count, W, ldw, rows, y);
    else if constexpr (REGISTER_LANES < LANES)
      sum<6, 1>(x, v, count, W, ldw, rows, y);
    else if (count == 4 || count == 8)
      sum<6, 4>(x, v, count, W, ldw, rows, y);
    else
      sum<8, 3>(x, v, count, W, ldw, rows, y);
  }

  // sums_[n][lane] for `rows` rows of W and `count` vectors of x.
  template <int ROWS, int TILE_VECTORS, typename U>
  void sum(const LaneRows<T>& x, int v, int count, const U* W, int64_t ldw, int rows, Place y) {
    static_assert(Units<U>::PAIRS == Units<T>::PAIRS, "W is in the units of x");
    static_assert(ROWS <= MAX_TILE_ROWS && BLOCK % ROWS == 0 && BLOCK % LANES == 0);
    if (x.units() == 0) std::fill_n(sums_.data(), rows * LDC, 0.0f);
    for (int64_t k = 0; k < x.units(); k += span(count)) {
      const int64_t end = std::min(k + span(count), x.units());
      widened_ = 0;
      for (int n = 0; n < rows; n += ROWS)
        sum_tile<ROWS, TILE_VECTORS>(x, v, count, k, end, W + n * ldw, ldw, rows - n,
                                     sums_.data() + n * LDC,
                                     {end == x.units() ? y.first + n : nullptr, y.row});
    }
  }

  // Units [first, last) of a tile, in stretches; of W, `rows` are left.
  template <int ROWS, int TILE_VECTORS, typename U>
  void sum_tile(const LaneRows<T>& x, int v, int count, int64_t first, int64_t last, const U* W,
                int64_t ldw, int rows, float* C, Place y) {
    constexpr bool WIDENS = detail::IS_WIDENED<T, U>;
    // Rows of W are read as they lie where they are rows of units, which begin at floats.
    const bool in_units = SIZE * sizeof(U) == FLOATS * sizeof(float) && ldw * FLOATS % SIZE == 0;
    // After the last stretch of this tile comes the first one of the next.
    const int64_t stretches = (last - first + STRETCH<U> - 1) / STRETCH<U>;
    const auto begin = [&](int64_t i) { return first + i % stretches * STRETCH<U>; };
    const auto rows_of = [&](int64_t i) { return W + i / stretches * ROWS * ldw + begin(i) * SIZE; };
    for (int64_t i = 0; i < stretches; ++i) {
      const int64_t k = begin(i), units = std::min(STRETCH<U>, last - k);
      const U *from = rows_of(i), *fetched = rows_of(WIDENS ? i + 2 : i + 1);
      if (in_units && (k + units) * SIZE <= x.depth() && rows >= ROWS) {
        tiles<ROWS, TILE_VECTORS>(x, v, count, k, units, reinterpret_cast<const float*>(from),
                                  ldw * FLOATS / SIZE, fetched, ldw, C, y, {});
        continue;
      }
      if (widened_) std::swap(panel_, next_panel_);
      copy<ROWS>(from, ldw, std::min(ROWS, rows), x.depth() - k * SIZE, widened_, units);
      detail::Later later;
      if constexpr (WIDENS)
        if (rows >= (i + 1 < stretches ? ROWS : 2 * ROWS)) {
          const int64_t whole = std::min(last, x.depth() / SIZE) - begin(i + 1);
          later.units = std::min(units, whole) / detail::LINE_OF<U> * detail::LINE_OF<U>;
          later.narrow = rows_of(i + 1), later.narrow_stride = ldw;
          later.wide = next_panel_.data(), later.wide_stride = PANEL_STRIDE<U>;
        }
      widened_ = later.units;
      tiles<ROWS, TILE_VECTORS>(x, v, count, k, units, panel_.data(), PANEL_STRIDE<U>, fetched, ldw, C,
                                y, later);
    }
  }

  // The panel: units [first, last) of `rows` rows of W, of which each has `left` elements; the rest
  // is 0.
  template <int ROWS, typename U>
  void copy(const U* W, int64_t ldw, int rows, int64_t left, int64_t first, int64_t last) {
    for (int r = 0; r < ROWS; ++r)
      for (int64_t i = first; i < last; i += Units<T>::COUNT) {
        const int64_t k = i * SIZE;
        store(panel_.data() + r * PANEL_STRIDE<U> + i * FLOATS,
              r < rows ? Units<U>::load(W + r * ldw + k, left - k) : f32x16{});
      }
  }

  // C (+)= ROWS rows of W, `stride` floats apart, times vectors [v, v + count) of x; the first vectors
  // fetch rows from `next` on, and widen others.
  template <int ROWS, int TILE_VECTORS, typename U>
  void tiles(const LaneRows<T>& x, int v, int count, int64_t k, int64_t units, const float* rows,
             int64_t stride, const U* next, int64_t ldw, float* C, Place y, detail::Later later) {
    const int num_tiles = (count + TILE_VECTORS - 1) / TILE_VECTORS;
    for (int tile = 0, i = 0; tile < num_tiles; ++tile) {
      // As even as can be: four vectors are two and two, rather than three and one.
      const int vectors = (count - i + num_tiles - tile - 1) / (num_tiles - tile);
      later.fetched = share_of_next(next, ldw, ROWS, tile, num_tiles);
      y.fetch(i * LaneRows<T>::ROWS, vectors * LaneRows<T>::ROWS);
      multiply<U, ROWS, TILE_VECTORS>(vectors, rows, stride, x.at(v + i, k), x.units() * LANES, units,
                                      x.may_be_few() ? FEW_PIECE : PIECE, C + i * LANES, k > 0, later);
      later.units = 0;
      i += vectors;
    }
  }

  // Which of the `rows` rows from `next` on a tile fetches: each AMX tile some, else the first all.
  template <typename U>
  static NextRows share_of_next(const U* next, int64_t ldw, int rows, int tile, int num_tiles) {
    const int begin = AMX ? rows * tile / num_tiles : 0;
    const int end = AMX ? rows * (tile + 1) / num_tiles : tile == 0 ? rows : 0;
    return {reinterpret_cast<const char*>(next + begin * ldw), ldw * int64_t(sizeof(U)), end - begin};
  }

  template <typename U, int R, int V>
  static void multiply(int vectors, const float* rows, int64_t stride, const float* x,
                       int64_t vector_stride, int64_t units, int64_t piece, float* C, bool add,
                       detail::Later later) {
    if constexpr (AMX)
      return multiply_amx(rows, stride, x, vector_stride, vectors, units, C, LDC, add, later.fetched);
    if constexpr (V > 1)
      if (vectors < V)
        return multiply<U, R, V - 1>(vectors, rows, stride, x, vector_stride, units, piece, C, add,
                                     later);
    for (int64_t k = 0; k < units; k += piece, later.advance(piece, SIZE * sizeof(U)))
      detail::multiply_lanes<T, U, R, V>(rows + k * FLOATS, stride, x + k * LANES, vector_stride,
                                         std::min(piece, units - k), C, LDC, add || k > 0, later);
  }

  // y[m][n] of the sums.
  void transpose(const LaneRows<T>& x, int v, int count, int rows, float* y, int64_t ldy,
                 bool add) {
    for (int i = 0; i < count; ++i) {
      constexpr int ROWS_OF_X = LaneRows<T>::ROWS;
      const int left = int(std::min<int64_t>(ROWS_OF_X, x.rows() - (v + i) * ROWS_OF_X));
      for (int n = 0; n < rows; n += LANES) {
        f32x16 c[LANES];
        for (int j = 0; j < LANES; ++j) c[j] = load(sums_.data() + (n + j) * LDC + i * LANES);
        transpose16(c);
        for (int m = 0; m < left; ++m) {
          float* to = y + (i * ROWS_OF_X + m) * ldy + n;
          const int width = std::min(LANES, rows - n);
          const f32x16 sum = FLOATS == 1 ? c[m] : c[FLOATS * m] + c[FLOATS * m + 1];
          store(to, add ? load(to, width) + sum : sum, width);
        }
      }
    }
  }

  static constexpr int64_t PANEL = MAX_TILE_ROWS * PANEL_STRIDE<float>;  // the longest one
  AlignedFloats panel_{PANEL}, next_panel_{PANEL};
  int64_t widened_ = 0;  // units of the next panel
  AlignedFloats sums_{BLOCK * LDC};  // [rows of W][lanes]
};

}  // namespace th
