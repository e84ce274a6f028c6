// Rows of a cache whose numbers have 8 bits (e4m3), or those of what is written: Kept is fp8 or T.
//
//   fp8                             storage only: load() widens, store() rounds to even and keeps
//                                   what is too large at the largest
//   keep_row(to, from, scale, n)    a row as it is kept: of fp8, divided by its scale
//   widen_row(to, from, n)          a row as it is worked on, without its scale
//   fetch_row(from, n)              brings it to L2
//
// n is a multiple of 16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "block_fp8.h"
#include "simd.h"

namespace th {

struct fp8 {
  uint8_t bits;
};

template <typename Kept>
constexpr bool IS_FP8 = std::is_same_v<Kept, fp8>;

TH_INLINE f32x16 load(const fp8* p) {
  u8x16 numbers;
  std::memcpy(&numbers, p, sizeof(numbers));
  return widen(numbers);
}

TH_INLINE void store(fp8* p, f32x16 x) {
  const f32x16 largest = splat(448.0f);
  x = select(x > largest, largest, select(x < -largest, -largest, x));  // NaN stays
  const u32x16 bits = bit_cast<u32x16>(x), size = bits & 0x7fffffffu;
  const u32x16 normal = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
  // Added to what is below 2^-6, 2^14 leaves multiples of 2^-9 in the last bits.
  const u32x16 small = bit_cast<u32x16>(bit_cast<f32x16>(size) + 0x1p14f) - 0x46800000u;
  u32x16 number = select(size < 0x3c800000u, small, normal);
  number = select(size > 0x7f800000u, u32x16{} + 0x7fu, number);
  number = number | ((bits >> 24) & 0x80u);
  const u8x16 narrowed = convert<u8x16>(number);
  std::memcpy(p, &narrowed, sizeof(narrowed));
}

template <typename T>
void keep_row(T* to, const T* from, float, int64_t n) {
  std::copy_n(from, n, to);
}
template <typename T>
void keep_row(fp8* to, const T* from, float scale, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(to + i, load(from + i) / scale);
}

template <typename T>
void widen_row(T* to, const T* from, int64_t n) {
  std::copy_n(from, n, to);
}
template <typename T>
void widen_row(T* to, const fp8* from, int64_t n) {
  constexpr int STEP = Fp8Block<T>::STEP;
  static const Fp8Block<T> unscaled{1.0f};
  const uint8_t* numbers = reinterpret_cast<const uint8_t*>(from);
  int64_t i = 0;
  for (; i + STEP <= n; i += STEP) unscaled.widen(numbers + i, to + i);
  for (; i < n; i += LANES) store(to + i, load(from + i));
}

template <typename Kept>
TH_INLINE void fetch_row(const Kept* from, int64_t n) {
  constexpr int64_t LINE = 64 / sizeof(Kept);
  for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(from + i, 0, 2);
}

}  // namespace th
