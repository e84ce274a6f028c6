// Products of a few rows with a large weight matrix, which must be read from memory once:
// y[M, N] = x[M, K] W[N, K]^T for M up to a few dozen. T is float or bf16; sums are float.
//
//   PackedRows<T> x;                     keep one per thread: its memory is reused
//   x.pack(M, K, x, ldx)                 copies x in the order in which the product reads it
//   multiply_rows(x, W, ldw, N, write)   calls write(m, n, values, count) with the results
//                                        y[m, n .. n + count) as floats, each element once
//
// How: a dot product along K keeps W in the order in which memory delivers it. A tile takes ROWS
// rows of W and up to four rows of x, so that each vector of W is loaded once for four rows; more
// rows of x are further passes over the tile, which is then in L1. During the passes the next
// tile is prefetched, a part in each, so that memory stays busy while the products are formed:
// the hardware's own prefetchers stop at every 4 KB page, which is one row of W.
//
// An element of y depends on its row of x and its row of W alone, and is the same for every M.
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
    constexpr int STEP = Lanes<T>::STEP;
    M_ = M, K_ = K, steps_ = (K + STEP - 1) / STEP;
    reserve(M * steps_);
    for (int i = 0; i < M; ++i) {
      const int first = i / GROUP * GROUP, rows = std::min(GROUP, M - first);
      X* to = data_ + first * steps_ + (i - first);
      for (int64_t s = 0; s < steps_; ++s)
        to[s * rows] = Lanes<T>::pack(x + i * ldx + s * STEP, int(std::min<int64_t>(STEP, K - s * STEP)));
    }
  }

  int rows() const { return M_; }
  int64_t depth() const { return K_; }
  const X* group(int first) const { return data_ + first * steps_; }

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

// out[m][r] = sum_k x[m, k] W[r, k] for a group of G rows of x and R rows of W; meanwhile P rows
// of what is at `ahead` are prefetched.
template <typename T, int R, int G, int P>
TH_INLINE void product(const T* W, int64_t ldw, int64_t K, const typename Lanes<T>::X* x,
                       const T* ahead, float* out) {
  static_assert(R * G <= LANES, "one vector takes the sums");
  constexpr int STEP = Lanes<T>::STEP;
  f32x16 acc[LANES] = {};
  int64_t k = 0;
  for (; k + STEP <= K; k += STEP, x += G) {
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + p * ldw + k);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto w = Lanes<T>::weights(W + r * ldw + k);
#pragma GCC unroll 4
      for (int m = 0; m < G; ++m) acc[m * R + r] = Lanes<T>::multiply(w, x[m], acc[m * R + r]);
    }
  }
  if (k < K)
    for (int r = 0; r < R; ++r) {
      const auto w = Lanes<T>::weights(W + r * ldw + k, int(K - k));
      for (int m = 0; m < G; ++m) acc[m * R + r] = Lanes<T>::multiply(w, x[m], acc[m * R + r]);
    }
  store(out, sum16(acc));
}

// All rows of x times R rows of W at row n.
template <typename T, int R, int G, int P, typename Write>
TH_INLINE void group_product(const PackedRows<T>& x, int first, const T* W, int64_t ldw,
                             int64_t n, const T* ahead, const Write& write) {
  float out[LANES];
  product<T, R, G, P>(W + n * ldw, ldw, x.depth(), x.group(first), ahead, out);
  for (int m = 0; m < G; ++m) write(first + m, n, out + m * R, R);
}

template <typename T, int R, typename Write>
inline void tile_product(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t n,
                         const Write& write) {
  constexpr int GROUP = PackedRows<T>::GROUP;
  const T* next = W + (n + R) * ldw;
  const int M = x.rows();
  int i = 0;
  if (M < 2 * GROUP) {
    for (; i + GROUP <= M; i += GROUP) group_product<T, R, GROUP, R>(x, i, W, ldw, n, next, write);
  } else {
    constexpr int HALF = (R + 1) / 2;
    group_product<T, R, GROUP, HALF>(x, 0, W, ldw, n, next, write);
    group_product<T, R, GROUP, HALF>(x, GROUP, W, ldw, n, next + (R - HALF) * ldw, write);
    for (i = 2 * GROUP; i + GROUP <= M; i += GROUP)
      group_product<T, R, GROUP, 0>(x, i, W, ldw, n, next, write);
  }
  if (M - i == 3) group_product<T, R, 3, R>(x, i, W, ldw, n, next, write);
  if (M - i == 2) group_product<T, R, 2, R>(x, i, W, ldw, n, next, write);
  if (M - i == 1) group_product<T, R, 1, R>(x, i, W, ldw, n, next, write);
}

// One group only: more rows of W fit in the registers.
template <typename T, int R, int G, typename Write>
inline void single_group(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N,
                         const Write& write) {
  int64_t n = 0;
  for (; n + R <= N; n += R)
    group_product<T, R, G, R>(x, 0, W, ldw, n, W + (n + R) * ldw, write);
  for (; n < N; ++n) group_product<T, 1, G, 0>(x, 0, W, ldw, n, W, write);
}

}  // namespace detail

template <typename T, typename Write>
inline void multiply_rows(const PackedRows<T>& x, const T* W, int64_t ldw, int64_t N,
                          const Write& write) {
  using namespace detail;
  constexpr int R = 4;
  if (x.rows() == 1) return single_group<T, 4, 1>(x, W, ldw, N, write);
  if (x.rows() == 2) return single_group<T, 4, 2>(x, W, ldw, N, write);
  int64_t n = 0;
  for (; n + R <= N; n += R) tile_product<T, R>(x, W, ldw, n, write);
  for (; n < N; ++n) tile_product<T, 1>(x, W, ldw, n, write);
}

}  // namespace th
