// Products of a few rows with a large weight matrix, which must be read from memory once:
// y[M, N] = x[M, K] W[N, K]^T for M up to a few dozen. T is float or bf16; sums are float.
//
//   PackedRows<T> x;                     keep one per thread: its memory is reused
//   x.pack(M, K, x, ldx)                 copies x in the order in which the product reads it;
//   x.pack(M, K, row)                    the same, row(i) being a pointer to row i
//   multiply_rows(x, W, ldw, N, y, ldy, in_turn)  y[m * ldy + n], in float
//
// How: a dot product along K keeps W in the order in which memory delivers it. A tile takes four
// rows of W and up to four rows of x, so that a vector of W is loaded once for four rows of x.
// - Up to four rows of x, memory is all that counts. The four rows of W are far apart, so that
//   each is a long stream of its own, which most CPUs prefetch best. For one or two rows of x,
//   `in_turn` takes one row of W after the other, as other CPUs like it; the result is the same.
// - More rows of x are further passes over a tile of adjacent rows, in stretches of K that stay in
//   L1, while the tile after the next is prefetched, a part in each step. Otherwise memory would
//   idle in the passes: the hardware prefetches only what misses, and never past a 4 KB page.
//
// An element of y depends on its row of x and its row of W, and on whether x has over four rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "simd.h"

namespace th {

// How T is multiplied: STEP elements of K at a time, with x in the form X and W in the form W.
template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int STEP = LANES;
  using X = f32x16;
  using W = f32x16;
  static TH_INLINE X pack(const float* x, int n) { return load(x, n); }
  static TH_INLINE W weights(const float* w) { return held(load(w)); }
  static TH_INLINE W weights(const float* w, int n) { return load(w, n); }
  static TH_INLINE X hold(X x) { return held(x); }
  static TH_INLINE f32x16 multiply(W w, const X& x, f32x16 sum) { return fma(w, x, sum); }
};

#ifdef __AVX512BF16__
template <>
struct Lanes<bf16> {
  static constexpr int STEP = 2 * LANES;
  using X = __m512bh;
  using W = __m512bh;
  static TH_INLINE W weights(const bf16* w) { return held((W)_mm512_loadu_si512(w)); }
  static TH_INLINE W weights(const bf16* w, int n) {
    return n >= STEP ? weights(w) : (W)_mm512_maskz_loadu_epi16((1u << n) - 1, w);
  }
  static TH_INLINE X pack(const bf16* x, int n) { return weights(x, n); }
  static TH_INLINE X hold(X x) { return held(x); }
  static TH_INLINE f32x16 multiply(W w, const X& x, f32x16 sum) {
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, w, x);
  }
};
#else
// Thirty-two elements as sixteen pairs: widening the even and the odd ones is a shift and a mask.
struct FloatPair {
  f32x16 even, odd;
};
template <>
struct Lanes<bf16> {
  static constexpr int STEP = 2 * LANES;
  using X = FloatPair;
  using W = FloatPair;
  static TH_INLINE W weights(const bf16* w) {
    u32x16 pairs;
    std::memcpy(&pairs, w, sizeof(pairs));
    return {held(bit_cast<f32x16>(pairs << 16)), held(bit_cast<f32x16>(pairs & 0xffff0000u))};
  }
  static TH_INLINE W weights(const bf16* w, int n) {
    if (n >= STEP) return weights(w);
    bf16 padded[STEP] = {};
    std::memcpy(padded, w, sizeof(bf16) * n);
    return weights(padded);
  }
  static TH_INLINE X pack(const bf16* x, int n) { return weights(x, n); }
  static TH_INLINE X hold(X x) { return {held(x.even), held(x.odd)}; }
  static TH_INLINE f32x16 multiply(W w, const X& x, f32x16 sum) {
    return fma(w.odd, x.odd, fma(w.even, x.even, sum));
  }
};
#endif

// Rows of x in groups of four (the last may be shorter); a group is [K / STEP][rows] vectors.
template <typename T>
class PackedRows {
 public:
  using X = typename Lanes<T>::X;
  static constexpr int GROUP = 4;

  void pack(int M, int64_t K, const T* x, int64_t ldx) {
    pack(M, K, [&](int i) { return x + i * ldx; });
  }

  template <typename Row>
  void pack(int M, int64_t K, const Row& row) {
    constexpr int64_t STEP = Lanes<T>::STEP;
    M_ = M, K_ = K, steps_ = (K + STEP - 1) / STEP;
    reserve(M * steps_);
    for (int i = 0; i < M; ++i) {
      const int first = i / GROUP * GROUP, rows = std::min(GROUP, M - first);
      const T* x = row(i);
      X* to = data_ + first * steps_ + (i - first);
      for (int64_t s = 0; s < steps_; ++s)
        to[s * rows] = Lanes<T>::pack(x + s * STEP, int(std::min(K - s * STEP, STEP)));
    }
  }

  int rows() const { return M_; }
  int64_t depth() const { return K_; }
  // The group that starts at row `first` and has `rows` rows, from depth k on.
  const X* group(int first, int rows, int64_t k) const {
    return data_ + first * steps_ + k / Lanes<T>::STEP * rows;
  }

 private:
  void reserve(int64_t count) {
    if (count <= capacity_) return;
    memory_.reset(new char[(count + 1) * sizeof(X)]);
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = reinterpret_cast<X*>((address + 63) / 64 * 64);
    capacity_ = count;
  }

  int M_ = 0;
  int64_t K_ = 0, steps_ = 0, capacity_ = 0;
  std::unique_ptr<char[]> memory_;
  X* data_ = nullptr;
};

namespace detail {

constexpr int TILE = 4;                    // rows of W
constexpr int64_t LINE_BYTES = 64;
constexpr int64_t STRETCH_BYTES = 2048;    // of K in a pass: tile and group together fit L1
constexpr int64_t NEAR_BYTES = 1024, FAR_BYTES = 4096;

// R rows of W, `ldw` apart, times a group of x, over K elements.
template <typename T>
struct Product {
  const T* W;
  int64_t ldw, K;
  const typename Lanes<T>::X* x;
  float* y;
  int64_t ldy, column_step;  // between the results of two rows of x, and of two rows of W
  bool accumulate;
};

// What a step prefetches: `line` p of step k is at first + p * line_step + k * k_step.
template <typename T>
struct Ahead {
  const T* first;
  int64_t line_step, k_step;
};

// y[m, r] (+)= sum_k x[m, k] W[r, k] for G rows of x; each step prefetches LINES lines, or in turn
// the even and the odd ones of them. HELD keeps x in registers: without it, x is loaded again from
// L1 for each row of W, and this slower pace lets the prefetches keep their lead.
template <int R, int G, int LINES, bool IN_TURN, bool HELD, typename T>
TH_INLINE void multiply(Product<T> p, Ahead<T> ahead) {
  static_assert(R * G <= LANES, "one vector takes the sums");
  constexpr int STEP = Lanes<T>::STEP;
  f32x16 acc[LANES] = {};
  const typename Lanes<T>::X* x = p.x;
  int64_t k = 0;
  for (; k + STEP <= p.K; k += STEP, x += G) {
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
      if (!IN_TURN || line % 2 == k / STEP % 2)
        __builtin_prefetch(ahead.first + line * ahead.line_step + k * ahead.k_step, 0, 1);
    typename Lanes<T>::X xs[G];
#pragma GCC unroll 4
    for (int m = 0; m < G; ++m) xs[m] = HELD ? Lanes<T>::hold(x[m]) : x[m];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const auto w = Lanes<T>::weights(p.W + r * p.ldw + k);
#pragma GCC unroll 4
      for (int m = 0; m < G; ++m) acc[m * R + r] = Lanes<T>::multiply(w, xs[m], acc[m * R + r]);
    }
  }
  if (k < p.K)
    for (int r = 0; r < R; ++r) {
      const auto w = Lanes<T>::weights(p.W + r * p.ldw + k, int(p.K - k));
      for (int m = 0; m < G; ++m) acc[m * R + r] = Lanes<T>::multiply(w, x[m], acc[m * R + r]);
    }
  float sums[LANES];
  store(sums, sum16(acc));
#pragma GCC unroll 4
  for (int m = 0; m < G; ++m)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float& y = p.y[m * p.ldy + r * p.column_step];
      y = sums[m * R + r] + (p.accumulate ? y : 0.0f);
    }
}

// Up to four rows of x: W as four streams, N / 4 rows apart.
template <int G, typename T>
inline void multiply_streams(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N, float* y,
                             int64_t ldy) {
  constexpr bool NEAR = G <= 2 || sizeof(T) == 2;
  constexpr int64_t lead = (NEAR ? NEAR_BYTES : FAR_BYTES) / int64_t(sizeof(T));
  const int64_t K = x.depth(), stream = N / TILE;
  for (int64_t n = 0; n < stream; ++n) {
    const T* w = W + n * ldw;
    multiply<TILE, G, TILE, NEAR, NEAR>(
        Product<T>{w, stream * ldw, K, x.group(0, G, 0), y + n, ldy, stream, false},
        Ahead<T>{w + lead, stream * ldw, 1});
  }
  for (int64_t n = stream * TILE; n < N; ++n)
    multiply<1, G, 0, false, true>(
        Product<T>{W + n * ldw, ldw, K, x.group(0, G, 0), y + n, ldy, 1, false}, Ahead<T>{});
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

template <int R, int LINES, typename T>
TH_INLINE void multiply_group(int rows, const Product<T>& product, const Ahead<T>& ahead) {
  if (rows == 4) return multiply<R, 4, LINES, false, true>(product, ahead);
  if (rows == 3) return multiply<R, 3, LINES, false, true>(product, ahead);
  if (rows == 2) return multiply<R, 2, LINES, false, true>(product, ahead);
  multiply<R, 1, LINES, false, true>(product, ahead);
}

// R adjacent rows of W for any number of rows of x: as many passes over each stretch of K as x has
// groups. `LINES` lines per step, in as many passes as it takes, prefetch a whole tile.
template <int R, int LINES, typename T>
inline void multiply_tile(const PackedRows<T>& x, const T* W, int64_t ldw, float* y, int64_t ldy) {
  constexpr int GROUP = PackedRows<T>::GROUP;
  constexpr int64_t STRETCH = STRETCH_BYTES / int64_t(sizeof(T));
  constexpr int64_t LINE = LINE_BYTES / int64_t(sizeof(T));
  Ahead<T> ahead{W + 2 * R * ldw, LINE, LINES};
  for (int64_t k = 0; k == 0 || k < x.depth(); k += STRETCH) {
    const int64_t depth = std::min(STRETCH, x.depth() - k);
    for (int first = 0, lines = 0; first < x.rows(); first += GROUP, lines += LINES) {
      const int rows = std::min(GROUP, x.rows() - first);
      const Product<T> product{W + k, ldw, depth, x.group(first, rows, k), y + first * ldy,
                               ldy,   1,   k > 0};
      if (lines < R) {
        multiply_group<R, LINES>(rows, product, ahead);
        ahead.first += LINES * depth;
      } else {
        multiply_group<R, 0>(rows, product, ahead);
      }
    }
  }
}

template <int LINES, typename T>
inline void multiply_tiles(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N, float* y,
                           int64_t ldy) {
  int64_t n = 0;
  for (; n + TILE <= N; n += TILE) multiply_tile<TILE, LINES>(x, W + n * ldw, ldw, y + n, ldy);
  for (; n < N; ++n) multiply_tile<1, 1>(x, W + n * ldw, ldw, y + n, ldy);
}

}  // namespace detail

template <typename T>
inline void multiply_rows(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N, float* y,
                          int64_t ldy, bool in_turn) {
  using namespace detail;
  switch (x.rows()) {
    case 0: return;
    case 1:
      return in_turn ? multiply_in_turn<1>(x, W, ldw, N, y, ldy)
                     : multiply_streams<1>(x, W, ldw, N, y, ldy);
    case 2:
      return in_turn ? multiply_in_turn<2>(x, W, ldw, N, y, ldy)
                     : multiply_streams<2>(x, W, ldw, N, y, ldy);
    case 3: return multiply_streams<3>(x, W, ldw, N, y, ldy);
    case 4: return multiply_streams<4>(x, W, ldw, N, y, ldy);
  }
  if (x.rows() <= 3 * PackedRows<T>::GROUP) return multiply_tiles<2>(x, W, ldw, N, y, ldy);
  multiply_tiles<1>(x, W, ldw, N, y, ldy);
}

}  // namespace th
