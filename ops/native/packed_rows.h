// Rows of x in the order in which skinny.h reads them, and how their elements are multiplied.
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
    const auto pairs = load_lanes<u32x16>(reinterpret_cast<const uint32_t*>(w));
    return {held(bit_cast<f32x16>(pairs << 16)), held(bit_cast<f32x16>(pairs & 0xffff0000u))};
  }
  static TH_INLINE W weights(const bf16* w, int n) {
    if (n >= STEP) return weights(w);
    bf16 padded[STEP] = {};
    detail::copy_lanes<STEP>(padded, w, n);
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

}  // namespace th
