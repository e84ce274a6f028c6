// Products of a few rows with a large weight matrix, which must be read from memory once:
// y[M, N] = x[M, K] W[N, K]^T for M up to MAX_FEW_ROWS. T is float or bf16; sums are float.
//
//   PackedRows<T> x;                     keep one per thread: its memory is reused
//   x.pack(M, K, x, ldx)                 copies x in the order in which the product reads it;
//   x.pack(M, K, row)                    the same, row(i) being a pointer to row i
//   multiply_rows(x, W, ldw, N, y, ldy, reading)  y[m * ldy + n], in float
//
// How: a dot product along K keeps W in the order in which memory delivers it. A tile takes four
// rows of W and up to four rows of x, so that a vector of W is loaded once for four rows of x.
// - Up to four rows of x, memory is all that counts. The four rows of W are far apart, so that
//   each is a long stream of its own, which most CPUs prefetch best. For one or two rows of x,
//   reading.streams says how many rows of W that are: four; eight, which the hardware alone
//   prefetches; or one row after the other. CPUs differ in what they like; the result is the same.
// - More rows of x, with AVX-512: three streams of W meet eight rows of x at once, so that each step
//   has work enough to hide what it fetches; up to eight rows more meet them again in L1. Either
//   every line is fetched into L2, far ahead; or, since prefetchers stop at the end of a page, the
//   first lines of the next one alone, and the others into L1 when the hardware has them in L2.
// - Three or four rows of x, with fewer registers: they meet one row of W after the other.
//
// An element of y depends on its row of x and its row of W alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "packed_rows.h"
#include "reading.h"

namespace th {

// With fewer registers than those of AVX-512, lane_rows.h is the faster one from five rows on.
#ifdef __AVX512F__
constexpr int MAX_FEW_ROWS = 16;
#else
constexpr int MAX_FEW_ROWS = 4;
#endif

namespace detail {

constexpr int TILE = 4;  // rows of W
// Rows of W that meet so many rows of x at once: fewer where registers hold no more sums.
constexpr int streams_of(int rows) { return SUMS >= 16 ? TILE : std::max(1, SUMS / rows); }
constexpr int64_t NEAR_BYTES = 1024, FAR_BYTES = 4096;
constexpr int64_t PAGE_BYTES = 4096, PAGE_HEAD_BYTES = 512;

// R rows of W, `ldw` apart, times a group of x, over K elements.
template <typename T>
struct Product {
  const T* W;
  int64_t ldw, K;
  const typename Lanes<T>::X* x;
  float* y;
  int64_t ldy, column_step;  // between the results of two rows of x, and of two rows of W
};

// What a step prefetches: `line` p of step k is at first + p * line_step + k.
template <typename T>
struct Ahead {
  const T* first;
  int64_t line_step;
};

// y[m, r] = sum_k x[m, k] W[r, k] for G rows of x; each step prefetches LINES lines, or in turn
// the even and the odd ones of them. HELD keeps x in registers: without it, x is loaded again from
// L1 for each row of W, and this slower pace lets the prefetches keep their lead.
template <int R, int G, int LINES, bool IN_TURN, bool HELD, typename T>
TH_INLINE void multiply(Product<T> p, Ahead<T> ahead) {
  static_assert(R * G <= LANES, "one vector takes the sums");
  constexpr int STEP = Lanes<T>::STEP;
  f32x16 acc[R * G] = {};
  const typename Lanes<T>::X* x = p.x;
  int64_t k = 0;
  for (; k + STEP <= p.K; k += STEP, x += G) {
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
      if (!IN_TURN || line % 2 == k / STEP % 2)
        __builtin_prefetch(ahead.first + line * ahead.line_step + k, 0, 1);
    typename Lanes<T>::X xs[G];
    if constexpr (HELD)
#pragma GCC unroll 4
      for (int m = 0; m < G; ++m) xs[m] = Lanes<T>::hold(x[m]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto w = Lanes<T>::weights(p.W + r * p.ldw + k);
#pragma GCC unroll 4
      for (int m = 0; m < G; ++m)
        acc[m * R + r] = Lanes<T>::multiply(w, HELD ? xs[m] : x[m], acc[m * R + r]);
    }
  }
  if (k < p.K)
    for (int r = 0; r < R; ++r) {
      const auto w = Lanes<T>::weights(p.W + r * p.ldw + k, int(p.K - k));
      for (int m = 0; m < G; ++m) acc[m * R + r] = Lanes<T>::multiply(w, x[m], acc[m * R + r]);
    }
  float sums[LANES];
  sum_each(acc, sums);
#pragma GCC unroll 4
  for (int m = 0; m < G; ++m)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) p.y[m * p.ldy + r * p.column_step] = sums[m * R + r];
}

// Up to four rows of x: W as R streams, N / R rows apart.
template <int G, int R, typename T>
inline void multiply_streams(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N, float* y,
                             int64_t ldy) {
  constexpr bool NEAR = G <= 2 || sizeof(T) == 2, IS_HELD = NEAR && SUMS >= 16;
  constexpr int64_t lead = (NEAR ? NEAR_BYTES : FAR_BYTES) / int64_t(sizeof(T));
  constexpr int LINES = R <= TILE ? R : 0;
  const int64_t K = x.depth(), stream = N / R;
  for (int64_t n = 0; n < stream; ++n) {
    const T* w = W + n * ldw;
    multiply<R, G, LINES, NEAR, IS_HELD>(
        Product<T>{w, stream * ldw, K, x.group(0, G, 0), y + n, ldy, stream},
        Ahead<T>{w + lead, stream * ldw});
  }
  for (int64_t n = stream * R; n < N; ++n)
    multiply<1, G, 0, false, true>(
        Product<T>{W + n * ldw, ldw, K, x.group(0, G, 0), y + n, ldy, 1}, Ahead<T>{});
}

// One or two rows of x: one row of W after the other. Each sum is in the order of multiply_streams.
template <int G, typename T>
inline void multiply_in_turn(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N, float* y,
                             int64_t ldy) {
  constexpr int64_t STEP = Lanes<T>::STEP, lead = FAR_BYTES / int64_t(sizeof(T));
  const int64_t K = x.depth();
  const typename Lanes<T>::X* xs = x.group(0, G, 0);
  for (int64_t n = 0; n < N; n += TILE) {
    const int rows = int(std::min<int64_t>(TILE, N - n));
    f32x16 acc[LANES] = {};
    for (int r = 0; r < rows; ++r) {
      const T* w = W + (n + r) * ldw;
      f32x16 sums[G] = {};
      int64_t k = 0;
      for (; k + STEP <= K; k += STEP) {
        __builtin_prefetch(w + k + lead, 0, 1);
        const auto vector = Lanes<T>::weights(w + k);
#pragma GCC unroll 2
        for (int m = 0; m < G; ++m)
          sums[m] = Lanes<T>::multiply(vector, xs[k / STEP * G + m], sums[m]);
      }
      if (k < K) {
        const auto vector = Lanes<T>::weights(w + k, int(K - k));
        for (int m = 0; m < G; ++m)
          sums[m] = Lanes<T>::multiply(vector, xs[k / STEP * G + m], sums[m]);
      }
      for (int m = 0; m < G; ++m) acc[m * TILE + r] = sums[m];
    }
    float sums[LANES];
    store(sums, sum16(acc));
    for (int m = 0; m < G; ++m)
      for (int r = 0; r < rows; ++r) y[m * ldy + n + r] = sums[m * TILE + r];
  }
}

// One or two rows of x.
template <int G, typename T>
inline void multiply_fewest(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N, float* y,
                            int64_t ldy, Reading reading) {
  if (reading.streams == 1) return multiply_in_turn<G>(x, W, ldw, N, y, ldy);
  if constexpr (SUMS >= 16)
    if (reading.streams == 8) return multiply_streams<G, 8>(x, W, ldw, N, y, ldy);
  multiply_streams<G, streams_of(G)>(x, W, ldw, N, y, ldy);
}

#ifdef __AVX512F__
constexpr int WIDE_TILE = 3, WIDE_GROUP = 8;  // of W, and of x: 32 registers hold the sums

// One row of W times up to four rows of x.
template <typename T>
TH_INLINE void multiply_group(int rows, const Product<T>& product) {
  if (rows == 4) return multiply<1, 4, 0, false, true>(product, {});
  if (rows == 3) return multiply<1, 3, 0, false, true>(product, {});
  if (rows == 2) return multiply<1, 2, 0, false, true>(product, {});
  multiply<1, 1, 0, false, true>(product, {});
}

// G rows of x from row `first` on times WIDE_TILE rows of W, `stream` apart.
template <int G, bool BY_HARDWARE, typename T>
TH_NOINLINE void multiply_wide(const PackedRows<T>& x, int first, const T* W, int64_t stream,
                               float* y, int64_t ldy, int64_t column_step) {
  constexpr int STEP = Lanes<T>::STEP, GROUP = PackedRows<T>::GROUP;
  constexpr int64_t PAGE = PAGE_BYTES / int64_t(sizeof(T)), FAR = FAR_BYTES / int64_t(sizeof(T)),
                    HEAD_OF_PAGE = BY_HARDWARE ? PAGE_HEAD_BYTES / int64_t(sizeof(T)) : PAGE,
                    NEAR = 2 * NEAR_BYTES / int64_t(sizeof(T));
  constexpr int HEAD = std::min(G, GROUP), REST = G - HEAD;
  const int64_t K = x.depth();
  const typename Lanes<T>::X *head = x.group(first, HEAD, 0), *rest = head;
  if constexpr (REST > 0) rest = x.group(first + GROUP, REST, 0);
  f32x16 acc[WIDE_TILE][G] = {};
  const auto multiply = [&](const typename Lanes<T>::W(&w)[WIDE_TILE]) TH_LAMBDA {
#pragma GCC unroll 8
    for (int m = 0; m < G; ++m) {
      const auto element = Lanes<T>::hold(m < HEAD ? head[m] : rest[m - HEAD]);
#pragma GCC unroll 3
      for (int r = 0; r < WIDE_TILE; ++r) acc[r][m] = Lanes<T>::multiply(w[r], element, acc[r][m]);
    }
    head += HEAD, rest += REST;
  };
  typename Lanes<T>::W w[WIDE_TILE];
  const auto step = [&](int64_t k, bool fetches_far) TH_LAMBDA {
#pragma GCC unroll 3
    for (int r = 0; r < WIDE_TILE; ++r) {
      const T* row = W + r * stream + k;
      if (fetches_far) __builtin_prefetch(row + FAR, 0, 2);
      if (BY_HARDWARE) __builtin_prefetch(row + NEAR, 0, 3);
      w[r] = Lanes<T>::weights(row);
    }
    multiply(w);
  };
  const int64_t whole = K / STEP * STEP;
  int64_t page = -int64_t(reinterpret_cast<uintptr_t>(W) % PAGE_BYTES / sizeof(T));
  for (int64_t k = 0; page < whole; page += PAGE) {
    const int64_t head = std::min(whole, page + HEAD_OF_PAGE), end = std::min(whole, page + PAGE);
    for (; k < head; k += STEP) step(k, true);
    for (; k < end; k += STEP) step(k, false);
  }
  if (whole < K) {
#pragma GCC unroll 3
    for (int r = 0; r < WIDE_TILE; ++r)
      w[r] = Lanes<T>::weights(W + r * stream + whole, int(K - whole));
    multiply(w);
  }
#pragma GCC unroll 3
  for (int r = 0; r < WIDE_TILE; ++r) {
    float sums[LANES];
    sum_each(acc[r], sums);
    for (int m = 0; m < G; ++m) y[m * ldy + r * column_step] = sums[m];
  }
}

// Five to sixteen rows of x: eight meet each vector of W at once, the others while it is in L1.
// Sums are in the order of multiply_streams.
template <bool BY_HARDWARE, typename T>
inline void multiply_wide_streams(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N,
                                  float* y, int64_t ldy) {
  constexpr int GROUP = PackedRows<T>::GROUP;
  constexpr bool B = BY_HARDWARE;
  using Wide = decltype(&multiply_wide<1, B, T>);
  static constexpr Wide wide[WIDE_GROUP] = {
      multiply_wide<1, B, T>, multiply_wide<2, B, T>, multiply_wide<3, B, T>,
      multiply_wide<4, B, T>, multiply_wide<5, B, T>, multiply_wide<6, B, T>,
      multiply_wide<7, B, T>, multiply_wide<8, B, T>};
  const int64_t stream = N / WIDE_TILE;
  for (int64_t n = 0; n < stream; ++n)
    for (int first = 0; first < x.rows(); first += WIDE_GROUP)
      wide[std::min(WIDE_GROUP, x.rows() - first) - 1](x, first, W + n * ldw, stream * ldw,
                                                        y + first * ldy + n, ldy, stream);
  for (int64_t n = stream * WIDE_TILE; n < N; ++n)
    for (int first = 0; first < x.rows(); first += GROUP) {
      const int rows = std::min(GROUP, x.rows() - first);
      multiply_group(rows, Product<T>{W + n * ldw, ldw, x.depth(), x.group(first, rows, 0),
                                      y + first * ldy + n, ldy, 1});
    }
}
#else
constexpr int64_t BLOCK = 32;  // rows of W, of which the next ones are fetched

// Three or four rows of x.
template <int G, typename T>
inline void multiply_by_rows(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N, float* y,
                             int64_t ldy) {
  for (int64_t n = 0; n < N; ++n, W += ldw)
    multiply<1, G, 1, false, false>(
        Product<T>{W, ldw, x.depth(), x.group(0, G, 0), y + n, ldy, 1}, Ahead<T>{W + BLOCK * ldw, ldw});
}
#endif

}  // namespace detail

template <typename T>
inline void multiply_rows(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N, float* y,
                          int64_t ldy, Reading reading) {
  using namespace detail;
  switch (x.rows()) {
    case 0: return;
    case 1: return multiply_fewest<1>(x, W, ldw, N, y, ldy, reading);
    case 2: return multiply_fewest<2>(x, W, ldw, N, y, ldy, reading);
  }
#ifdef __AVX512F__
  if (x.rows() == 3) return multiply_streams<3, TILE>(x, W, ldw, N, y, ldy);
  if (x.rows() == 4) return multiply_streams<4, TILE>(x, W, ldw, N, y, ldy);
  if (reading.by_hardware) return multiply_wide_streams<true>(x, W, ldw, N, y, ldy);
  multiply_wide_streams<false>(x, W, ldw, N, y, ldy);
#else
  if (x.rows() == 3) return multiply_by_rows<3>(x, W, ldw, N, y, ldy);
  multiply_by_rows<4>(x, W, ldw, N, y, ldy);
#endif
}

}  // namespace th
