// Sixteen float lanes and the elementwise functions that the kernels share.
//
// f32x16 is a GCC vector type: + - * / and comparisons work on it, and it becomes one AVX-512
// register, two of AVX2 or four of NEON. Everything is inline and holds for NaN and infinities.
//
//   bf16                                    storage only: load() widens, store() rounds to even
//   float    to_float(float | bf16)
//   T        from_float<T>(float)
//   f32x16   splat(float), load(const T*), load(const T*, n), with T = float or bf16;
//   void     store(T*, f32x16), store(T*, f32x16, n)      n < 16 lanes: nothing past n is touched,
//                                                         loaded lanes past n are 0
//   f32x16   fma(a, b, c) = a * b + c, max(a, b), select(mask, a, b), exp, sigmoid, silu, softplus
//   float    sum(f32x16), max(f32x16);  f32x16 sum16(f32x16 (&)[16]): lane i = sum of vector i
//   void     for_lanes(size, body)          body(i, n) for each 16 (at last fewer) of size elements
//   float    dot(const TA*, const TB*, n), squared_norm(const T*, n)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "export.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define TH_INLINE inline __attribute__((always_inline))
#define TH_NOINLINE __attribute__((noinline))

namespace th {

constexpr int LANES = 16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

template <typename To, typename From>
TH_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

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

TH_INLINE f32x16 widen(u16x16 bits) {
  return bit_cast<f32x16>(__builtin_convertvector(bits, u32x16) << 16);
}

TH_INLINE u16x16 narrow(f32x16 x) {
  const u32x16 bits = bit_cast<u32x16>(x);
  const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const u32x16 nan = u32x16{} + 0x7fc0;
  return __builtin_convertvector(x == x ? rounded : nan, u16x16);
}

TH_INLINE f32x16 load(const float* p) {
  f32x16 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
TH_INLINE f32x16 load(const bf16* p) {
  u16x16 bits;
  std::memcpy(&bits, p, sizeof(bits));
  return widen(bits);
}
TH_INLINE void store(float* p, f32x16 x) { std::memcpy(p, &x, sizeof(x)); }
TH_INLINE void store(bf16* p, f32x16 x) {
  const u16x16 bits = narrow(x);
  std::memcpy(p, &bits, sizeof(bits));
}

#ifdef __AVX512F__
TH_INLINE __mmask16 lane_mask(int n) { return __mmask16((1u << n) - 1); }
TH_INLINE f32x16 load(const float* p, int n) {
  return n >= LANES ? load(p) : (f32x16)_mm512_maskz_loadu_ps(lane_mask(n), p);
}
TH_INLINE void store(float* p, f32x16 x, int n) {
  if (n >= LANES) return store(p, x);
  _mm512_mask_storeu_ps(p, lane_mask(n), (__m512)x);
}
#else
TH_INLINE f32x16 load(const float* p, int n) {
  f32x16 x{};
  std::memcpy(&x, p, sizeof(float) * (n < LANES ? n : LANES));
  return x;
}
TH_INLINE void store(float* p, f32x16 x, int n) {
  std::memcpy(p, &x, sizeof(float) * (n < LANES ? n : LANES));
}
#endif

#if defined(__AVX512BW__) && defined(__AVX512VL__)
TH_INLINE f32x16 load(const bf16* p, int n) {
  return n >= LANES ? load(p) : widen((u16x16)_mm256_maskz_loadu_epi16(lane_mask(n), p));
}
TH_INLINE void store(bf16* p, f32x16 x, int n) {
  if (n >= LANES) return store(p, x);
  _mm256_mask_storeu_epi16(p, lane_mask(n), (__m256i)narrow(x));
}
#else
TH_INLINE f32x16 load(const bf16* p, int n) {
  u16x16 bits{};
  std::memcpy(&bits, p, sizeof(bf16) * (n < LANES ? n : LANES));
  return widen(bits);
}
TH_INLINE void store(bf16* p, f32x16 x, int n) {
  const u16x16 bits = narrow(x);
  std::memcpy(p, &bits, sizeof(bf16) * (n < LANES ? n : LANES));
}
#endif

// Keeps a loaded vector in its register: GCC may otherwise load it anew in each of its uses.
template <typename V>
TH_INLINE V held(V x) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(x));
#elif defined(__AVX__)
  if constexpr (sizeof(V) <= 32) __asm__("" : "+x"(x));
#endif
  return x;
}

// As many lanes as one register has. GCC keeps an array of these in registers, where one of f32x16
// that are several registers each lies in memory.
#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif
typedef float Register __attribute__((vector_size(REGISTER_LANES * sizeof(float))));

// FLOATS floats from p on, one or two, again and again.
template <int FLOATS>
TH_INLINE Register splat_register(const float* p) {
  if constexpr (FLOATS == 1) return *p - Register{};
  typedef int64_t Pairs __attribute__((vector_size(sizeof(Register))));
  int64_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return (Register)(Pairs{} + pair);
}
TH_INLINE Register load_register(const float* p) {
  Register x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
TH_INLINE void store_register(float* p, Register x) { std::memcpy(p, &x, sizeof(x)); }

// ---- arithmetic ------------------------------------------------------------------------------

TH_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }
TH_INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) {
#ifdef __AVX512F__
  return mask ? a : b;
#else
  // Of vectors longer than a register, GCC would make that lane by lane.
  return bit_cast<f32x16>((mask & bit_cast<i32x16>(a)) | (~mask & bit_cast<i32x16>(b)));
#endif
}
TH_INLINE f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }

// c + a * b of floats, or, lane by lane, of pairs of bf16 whose two products are summed.
template <bool PAIRS, typename V>
TH_INLINE V multiply_add(V a, V b, V c) {
#ifdef __AVX512BF16__
  if constexpr (PAIRS)
    return (V)_mm512_dpbf16_ps((__m512)c, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
#endif
  return a * b + c;
}

// Halves are added pairwise: the order of the sum is the same on every instruction set.
TH_INLINE float sum(f32x16 x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
#endif
}

// Of each two blocks of B lanes: the first ones of a and b side by side, or the second ones.
template <int B, bool SECOND, int... LANE>
TH_INLINE f32x16 blocks(f32x16 a, f32x16 b, std::integer_sequence<int, LANE...>) {
#ifdef __clang__
  return __builtin_shufflevector(
      a, b, ((LANE & B) ? LANES + LANE - (SECOND ? 0 : B) : LANE + (SECOND ? B : 0))...);
#else
  return __builtin_shuffle(
      a, b, i32x16{((LANE & B) ? LANES + LANE - (SECOND ? 0 : B) : LANE + (SECOND ? B : 0))...});
#endif
}
template <int B>
TH_INLINE f32x16 first_blocks(f32x16 a, f32x16 b) {
  return blocks<B, false>(a, b, std::make_integer_sequence<int, LANES>{});
}
template <int B>
TH_INLINE f32x16 second_blocks(f32x16 a, f32x16 b) {
  return blocks<B, true>(a, b, std::make_integer_sequence<int, LANES>{});
}

// Every second lane of a and b side by side, from the first or the second on.
template <bool SECOND, int... LANE>
TH_INLINE f32x16 every_second(f32x16 a, f32x16 b, std::integer_sequence<int, LANE...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (2 * LANE + SECOND)...);
#else
  return __builtin_shuffle(a, b, i32x16{(2 * LANE + SECOND)...});
#endif
}
template <bool SECOND>
TH_INLINE f32x16 every_second(f32x16 a, f32x16 b) {
  return every_second<SECOND>(a, b, std::make_integer_sequence<int, LANES>{});
}

// Lanes of a and b in turn: of the first halves of both, or of the second ones.
template <bool SECOND, int... LANE>
TH_INLINE f32x16 in_turn(f32x16 a, f32x16 b, std::integer_sequence<int, LANE...>) {
#ifdef __clang__
  return __builtin_shufflevector(
      a, b, (LANE / 2 + LANE % 2 * LANES + SECOND * LANES / 2)...);
#else
  return __builtin_shuffle(a, b, i32x16{(LANE / 2 + LANE % 2 * LANES + SECOND * LANES / 2)...});
#endif
}
template <bool SECOND>
TH_INLINE f32x16 in_turn(f32x16 a, f32x16 b) {
  return in_turn<SECOND>(a, b, std::make_integer_sequence<int, LANES>{});
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

TH_INLINE float max(f32x16 x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float m = x[0];
  for (int i = 1; i < LANES; ++i) m = x[i] > m ? x[i] : m;
  return m;
#endif
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
  const i32x16 vanishes = x < -104.0f;
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
  return select(x < 0.0f, f32x16{}, x) + 2.0f * s * series;
}

// ---- loops ----------------------------------------------------------------------------------

// Calls body(i, n) for every n = LANES elements from i on, and once more for the n that are left.
// The body is inlined twice, so that whole vectors are handled without a mask.
#define TH_LAMBDA __attribute__((always_inline))
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
