// Sixteen float lanes and the elementwise functions that the kernels share.
//
// f32x16 is one register of AVX-512; with narrower ones it is halves (halves.h), down to registers
// of AVX2, SSE or NEON. + - * / and comparisons work on it. Everything is inline and holds for NaN
// and infinities. Compiled without contraction (build.py), a product and a sum are rounded once
// where fma() says so and nowhere else: no value depends on what is computed beside it.
//
//   bf16                                    storage only: load() widens, store() rounds to even
//   float    to_float(float | bf16)
//   T        from_float<T>(float)
//   f32x16   splat(float), load(const T*), load(const T*, n), with T = float or bf16;
//   void     store(T*, f32x16), store(T*, f32x16, n)      n < 16 lanes: nothing past n is touched,
//                                                         loaded lanes past n are 0
//   f32x16   fma(a, b, c) = a * b + c rounded once, max(a, b), select(mask, a, b), sqrt, exp, sigmoid,
//            silu, softplus; float fma(a, b, c)
//   float    sum(f32x16), max(f32x16);  f32x16 sum16(f32x16 (&)[16]): lane i = sum of vector i
//   void     for_lanes(size, body)          body(i, n) for each 16 (at last fewer) of size elements
//   float    dot(const TA*, const TB*, n), squared_norm(const T*, n)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "export.h"
#include "halves.h"

#define TH_NOINLINE __attribute__((noinline))

namespace th {

typedef Vector<float, LANES> f32x16;
typedef Vector<int32_t, LANES> i32x16;
typedef Vector<uint32_t, LANES> u32x16;
typedef Vector<uint16_t, LANES> u16x16;
typedef uint8_t u8x16 __attribute__((vector_size(LANES)));
typedef int8_t i8x16 __attribute__((vector_size(LANES)));

struct bf16 {
  uint16_t bits;
};

// ---- scalars ---------------------------------------------------------------------------------

TH_INLINE float to_float(float x) { return x; }
TH_INLINE float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

template <typename T>
TH_INLINE T from_float(float x);
template <>
TH_INLINE float from_float<float>(float x) {
  return x;
}
template <>
TH_INLINE bf16 from_float<bf16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return {0x7fc0};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// ---- loads and stores ------------------------------------------------------------------------

// x - 0 is x for every x, and so is left out; x + 0 would turn -0 into 0, and cost an addition.
TH_INLINE f32x16 splat(float x) { return x - f32x16{}; }

#if defined(__AVX2__) && !defined(__AVX512F__)
// By one shuffle: a shift would take a place of multiply-adds.
TH_INLINE Vector<float, 8> widen(Vector<uint16_t, 8> bits) {
  const __m256i twice = _mm256_broadcastsi128_si256((__m128i)bits);
  const __m256i places =
      _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,
                       -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return (Vector<float, 8>)_mm256_shuffle_epi8(twice, places);
}
TH_INLINE f32x16 widen(u16x16 bits) { return {widen(bits.low), widen(bits.high)}; }
#else
TH_INLINE f32x16 widen(u16x16 bits) { return bit_cast<f32x16>(convert<u32x16>(bits) << 16); }
#endif

TH_INLINE u16x16 narrow(f32x16 x) {
  const u32x16 bits = bit_cast<u32x16>(x);
  const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const u32x16 nan = u32x16{} + 0x7fc0;
  return convert<u16x16>(select(x == x, rounded, nan));
}

TH_INLINE f32x16 load(const float* p) { return load_lanes<f32x16>(p); }
TH_INLINE f32x16 load(const bf16* p) {
  return widen(load_lanes<u16x16>(reinterpret_cast<const uint16_t*>(p)));
}
TH_INLINE void store(float* p, f32x16 x) { store_lanes(p, x); }
TH_INLINE void store(bf16* p, f32x16 x) { store_lanes(reinterpret_cast<uint16_t*>(p), narrow(x)); }

TH_INLINE f32x16 load(const float* p, int n) {
  return n >= LANES ? load(p) : load_lanes<f32x16>(p, n);
}
TH_INLINE void store(float* p, f32x16 x, int n) {
  n >= LANES ? store(p, x) : store_lanes(p, x, n);
}
TH_INLINE f32x16 load(const bf16* p, int n) {
  return n >= LANES ? load(p)
                    : widen(load_lanes<u16x16>(reinterpret_cast<const uint16_t*>(p), n));
}
TH_INLINE void store(bf16* p, f32x16 x, int n) {
  n >= LANES ? store(p, x) : store_lanes(reinterpret_cast<uint16_t*>(p), narrow(x), n);
}

typedef Vector<float, REGISTER_LANES> Register;

TH_INLINE Register load_register(const float* p) { return load_lanes<Register>(p); }
TH_INLINE void store_register(float* p, Register x) { store_lanes(p, x); }

// ---- arithmetic ------------------------------------------------------------------------------

TH_INLINE i32x16 lane_numbers() {
  static constexpr int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_lanes<i32x16>(NUMBERS);
}
TH_INLINE f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }

// c + a * b of floats, or, lane by lane, of pairs of bf16 whose two products are summed.
template <bool PAIRS, typename V>
TH_INLINE V multiply_add(V a, V b, V c) {
#ifdef __AVX512BF16__
  if constexpr (PAIRS)
    return (V)_mm512_dpbf16_ps((__m512)c, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
#endif
  return fma(a, b, c);
}

// Transposes N rows of N elements, of LANES / N lanes each, by rounds that swap ever smaller blocks:
// of sixteen, those of 8, 4, 2 and 1 lanes.
template <int N, int B = LANES / 2>
TH_INLINE void transpose(f32x16 (&x)[N]) {
  constexpr int APART = B * N / LANES;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if (i & APART) continue;
    const f32x16 a = x[i], b = x[i + APART];
    x[i] = first_blocks<B>(a, b);
    x[i + APART] = second_blocks<B>(a, b);
  }
  if constexpr (APART > 1) transpose<N, B / 2>(x);
}
TH_INLINE void transpose16(f32x16 (&x)[LANES]) { transpose<LANES>(x); }

// Lane i of the result is the sum of x[i], for sixteen vectors at 45 instructions.
template <int B = LANES / 2>
TH_INLINE f32x16 sum16(f32x16 (&x)[LANES]) {
#pragma GCC unroll 8
  for (int i = 0; i < B; ++i)
    x[i] = first_blocks<B>(x[i], x[i + B]) + second_blocks<B>(x[i], x[i + B]);
  if constexpr (B > 1) return sum16<B / 2>(x);
  return x[0];
}

// sums[i] = the sum of x[i], added in the order of sum16; sums has room for whole vectors.
template <int N>
TH_INLINE void sum_each(const f32x16 (&x)[N], float* sums) {
  if constexpr (SUMS >= 16) {
#pragma GCC unroll 2
    for (int first = 0; first < N; first += LANES) {
      f32x16 all[LANES] = {};
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
        if (first + i < N) all[i] = x[first + i];
      store(sums + first, sum16(all));
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) sums[i] = sum(x[i]);
  }
}

// p * 2^n of whole n from -150 to 128, rounded once.
TH_INLINE f32x16 times_power_of_2(f32x16 p, f32x16 n) {
#ifdef __AVX512F__
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // In two factors, as the smallest and the largest are no normal numbers.
  const f32x16 shift = splat(12582912.0f);
  const i32x16 exponent = bit_cast<i32x16>(n + shift) - bit_cast<i32x16>(shift);
  const i32x16 first = exponent >> 1, second = exponent - first;
  return p * bit_cast<f32x16>((first + 127) << 23) * bit_cast<f32x16>((second + 127) << 23);
#endif
}

// e^x within 1e-7 relative (denormal results included). e^-inf = 0, e^inf = inf, NaN stays.
TH_INLINE f32x16 exp(f32x16 x) {
  // Below, e^x rounds to 0. A product that does so takes a processor ten times as long, and masked
  // logits are -inf.
  const auto vanishes = x < -104.0f;  // clang for Windows compares to lanes of long
  x = select(vanishes, f32x16{}, x);
  x = select(x > 89.0f, splat(89.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer.
  const f32x16 shift = splat(12582912.0f);
  const f32x16 n = fma(x, splat(1.44269504f), shift) - shift;
  f32x16 r = fma(n, splat(-0.693145751953125f), x);
  r = fma(n, splat(-1.42860677e-6f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r + 1.0f);
  return select(vanishes, f32x16{}, times_power_of_2(p, n));
}

TH_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
TH_INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp(-x)); }

// log(1 + e^x) within 3e-7 relative: log(1 + e) = 2 atanh(e / (2 + e)), whose series has no
// cancellation where e^-|x| is small. NaN stays.
TH_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 e = exp(select(x < 0.0f, x, -x));
  const f32x16 s = e / (2.0f + e), t = s * s;
  f32x16 series = splat(1.0f / 15);
#pragma GCC unroll 7
  for (int divisor = 13; divisor > 0; divisor -= 2) series = fma(series, t, splat(1.0f / float(divisor)));
  return fma(2.0f * s, series, select(x < 0.0f, f32x16{}, x));
}

// ---- loops ----------------------------------------------------------------------------------

// Calls body(i, n) for every n = LANES elements from i on, and once more for the n that are left.
// The body is inlined twice, so that whole vectors are handled without a mask.
template <typename Body>
TH_INLINE void for_lanes(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) body(i, LANES);
  if (i < size) body(i, int(size - i));
}

// ---- reductions ------------------------------------------------------------------------------

template <typename TA, typename TB>
TH_INLINE float dot(const TA* a, const TB* b, int64_t n) {
  f32x16 even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    even = fma(load(a + i), load(b + i), even);
    odd = fma(load(a + i + LANES), load(b + i + LANES), odd);
  }
  for (; i < n; i += LANES) even = fma(load(a + i, int(n - i)), load(b + i, int(n - i)), even);
  return sum(even + odd);
}

template <typename T>
TH_INLINE float squared_norm(const T* x, int64_t n) {
  return dot(x, x, n);
}

}  // namespace th
