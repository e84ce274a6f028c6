// Weights of 8 bits (e4m3), each worth its number times the scale of its block of 128 x 128: widened
// to T, a few rows at a time, into memory that stays in a cache while the rows are multiplied.
//
//   Weights<T> W{data, scales, K};            of T as they lie where scales is null
//   Pieces<T> pieces;                         keep one per thread: its memory is reused
//   pieces.each(W, first, count, M, body)     body(rows, at, n): rows [first + at, first + at + n) of
//                                             W in T, K apart, as many as suit M rows of x
//
// What an element is widened to depends on itself and its scale alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace th {

constexpr int64_t FP8_BLOCK = 128;

TH_INLINE u32x16 as_integers(u8x16 numbers) {
#ifdef __AVX512F__
  return (u32x16)_mm512_cvtepu8_epi32((__m128i)numbers);
#else
  return convert<u32x16>(numbers);
#endif
}

TH_INLINE f32x16 widen(u8x16 numbers) {
  const u32x16 bits = as_integers(numbers), size = bits & 0x7fu;
  // The exponent of a float is biased by 120 more.
  const f32x16 x = bit_cast<f32x16>((size << 20) | ((bits & 0x80u) << 24)) * 0x1p120f;
  return select(size == 0x7fu, splat(__builtin_nanf("")), x);
}

// Numbers of a block, STEP at a time, to what they are worth.
template <typename T>
struct Fp8Block {
  static constexpr int STEP = LANES;
  float scale;

  TH_INLINE void widen(const uint8_t* from, T* to) const {
    u8x16 numbers;
    std::memcpy(&numbers, from, sizeof(numbers));
    store(to, th::widen(numbers) * scale);
  }
};

#ifdef __AVX512BW__
// Bfloat16 is looked up: 128 sizes, to which the sign is added.
template <>
struct Fp8Block<bf16> {
  static constexpr int STEP = 2 * LANES, COUNT = 128;
  struct Sizes {
    float sizes[COUNT];
    Sizes() {
      u8x16 numbers;
      for (int i = 0; i < LANES; ++i) numbers[i] = uint8_t(i);
      for (int i = 0; i < COUNT; i += LANES, numbers += LANES) store(sizes + i, th::widen(numbers));
    }
  };
  __m512i sizes[4];

  explicit Fp8Block(float scale) {
    static const Sizes unscaled;
    bf16 scaled[COUNT];
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i += LANES) store(scaled + i, load(unscaled.sizes + i) * scale);
    std::memcpy(sizes, scaled, sizeof(sizes));
  }

  TH_INLINE void widen(const uint8_t* from, bf16* to) const {
    const __m512i bits = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
    const __m512i low = _mm512_permutex2var_epi16(sizes[0], bits, sizes[1]);
    const __m512i high = _mm512_permutex2var_epi16(sizes[2], bits, sizes[3]);
    const __mmask32 is_high = _mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x40));
    const __m512i size = _mm512_mask_blend_epi16(is_high, low, high);
    // size ^ (bits << 8 & 0x8000): a scale may be negative.
    const __m512i sign = _mm512_slli_epi16(bits, 8);
    _mm512_storeu_si512(to, _mm512_ternarylogic_epi64(size, sign, _mm512_set1_epi16(int16_t(0x8000)), 0x78));
  }
};
#endif

template <typename T>
struct Weights {
  const void* data;     // [N, K]
  const float* scales;  // [ceil(N / 128), ceil(K / 128)], or null
  int64_t K;

  const T* as_they_lie(int64_t row) const { return static_cast<const T*>(data) + row * K; }
};

template <typename T>
class Pieces {
 public:
  template <typename Body>
  TH_INLINE void each(const Weights<T>& W, int64_t first, int64_t count, int64_t M,
                      const Body& body) {
    if (!W.scales) return body(W.as_they_lie(first), int64_t(0), count);
    const int64_t most = M <= 4 ? 4 : M <= 16 ? 12 : 48;  // measured; whole tiles of skinny.h
    for (int64_t at = 0; at < count; at += most) {
      const int64_t rows = std::min(most, count - at);
      widen(W, first + at, rows);
      body(memory_.data(), at, rows);
    }
  }

 private:
  static constexpr int64_t AHEAD = 4096;  // bytes that are fetched before they are widened

  TH_NOINLINE void widen(const Weights<T>& W, int64_t first, int64_t count) {
    memory_.resize(count * W.K);
    for (int64_t at = 0; at < count;) {
      const int64_t row = first + at, left = FP8_BLOCK - row % FP8_BLOCK;
      const int64_t rows = std::min(left, count - at);
      const int64_t wide = (W.K + FP8_BLOCK - 1) / FP8_BLOCK;
      for (int64_t k = 0; k < W.K; k += FP8_BLOCK)
        widen_block(Fp8Block<T>{W.scales[row / FP8_BLOCK * wide + k / FP8_BLOCK]},
                    static_cast<const uint8_t*>(W.data) + row * W.K + k,
                    memory_.data() + at * W.K + k, W.K, rows, std::min(FP8_BLOCK, W.K - k));
      at += rows;
    }
  }

  static void widen_block(const Fp8Block<T>& block, const uint8_t* from, T* to, int64_t K,
                          int64_t rows, int64_t width) {
    constexpr int STEP = Fp8Block<T>::STEP;
    for (int64_t r = 0; r < rows; ++r, from += K, to += K) {
      __builtin_prefetch(from + AHEAD, 0, 2), __builtin_prefetch(from + AHEAD + 64, 0, 2);
      int64_t k = 0;
      for (; k + STEP <= width; k += STEP) block.widen(from + k, to + k);
      if (k == width) continue;
      uint8_t numbers[STEP] = {};
      T widened[STEP];
      std::memcpy(numbers, from + k, width - k);
      block.widen(numbers, widened);
      std::memcpy(to + k, widened, sizeof(T) * (width - k));
    }
  }

  std::vector<T> memory_;
};

}  // namespace th
