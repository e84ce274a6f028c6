// Weights that are integers of 8 or 4 bits, or FP4, with scales: met by a few rows of x as they lie, or widened
// a few rows at a time, into memory that stays in a cache while they meet many.
//
//   Int8   [N, K] signed bytes, and a scale for each row
//   Int4   [N, K / 2] bytes: element 2i is the low half of byte i, 2i + 1 the high half, each 8 more
//          than it is worth; and a scale for each group of 32, 64 or 128 elements of a row. Where
//          groups have zero points, these stand behind the scales, and in the place of 8
//   Fp4<G>   the same bytes of numbers of E2M1; and a byte for each G elements of a row: of 32 a power
//          of two (E8M0, MXFP4), of 16 an E4M3 (NVFP4), behind which a row has a factor, a float
//
//   Integers<Q> W{data, scales, K, group, has_zeros};
//   IntegerRows<Q> x;                      keep one per thread: its memory is reused
//   x.pack(M, K, row)                      row(i) is a pointer to row i of x, of float or bf16
//   x.multiply(W, first, N, y, ldy)        y[m * ldy + n] = x W^T for rows [first, first + N) of W,
//                                          in float
//   IntegerPieces<Q, C> pieces;            keep one per thread: its memory is reused
//   pieces.each(W, first, N, M, body)      body(rows, at, n): rows [first + at, first + at + n) of W
//                                          in C, K apart, for M rows of x
//
// FP4 meets a few rows of x 128 elements at a time, eight in a lane, whose sum its scale then meets.
//
// x is not rounded: integers are widened to floats in registers. A number of 4 bits picks what it is
// worth, scaled, from sixteen floats; by AVX2 the scale of its group meets the group's sum, as the scale
// of a row of 8 bits meets the row's. Bytes of scales become floats a row at a time.
//
// An element of y is a sum in the order of k, in sixteen lanes: it depends on its row of x and its row
// of W, never on M, N or the form.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "aligned_floats.h"
#include "block_fp8.h"
#include "simd.h"

namespace th {

#if defined(__AVX2__) && !defined(__AVX512F__)
#define TH_INT4_BY_WORDS  // INT4 meets few rows of x as pairs of words in a lane
#endif

constexpr int INTEGER_STEP = 2 * LANES;  // elements that are widened at a time
constexpr int FP4_VECTORS = 8, FP4_STEP = FP4_VECTORS * LANES;  // that meet few rows at a time

struct Widened {
  f32x16 first, second;
};

struct Int8 {
  using Scale = float;  // as it is stored
  static constexpr int STEP_BYTES = INTEGER_STEP, X_STEP = INTEGER_STEP;
  static constexpr int BLOCK_STEPS = 4;  // of a loop without tails
  static constexpr bool SCALES_SUMS = true;

  // In the order of memory: lanes of the first half, then of the second.
  template <typename T>
  static TH_INLINE void order(const T* x, Widened* to) {
    *to = {load(x), load(x + LANES)};
  }
  template <typename C>
  static TH_INLINE void store_in_order(C* to, const Widened& x) {
    store(to, x.first), store(to + LANES, x.second);
  }
  static TH_INLINE Widened worth(const Widened& x, float scale) {
    return {x.first * scale, x.second * scale};
  }

  struct Scaled {
    Scaled() = default;
    TH_INLINE Scaled(const float*, float) {}
    TH_INLINE Widened widen(const uint8_t* p) const { return {half(p), half(p + LANES)}; }
    static TH_INLINE f32x16 half(const uint8_t* p) {
#ifdef __AVX512F__
      return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
      i8x16 numbers;
      std::memcpy(&numbers, p, sizeof(numbers));
      return convert<f32x16>(convert<i32x16>(numbers));
#endif
    }
  };
};

struct Int4 {
  using Scale = float;
  static constexpr int STEP_BYTES = LANES;
  static constexpr bool SCALES_SUMS = false;

#ifndef TH_INT4_BY_WORDS
  static constexpr int X_STEP = INTEGER_STEP;
  // Lanes are bytes: even elements, then odd ones.
  template <typename T>
  static TH_INLINE void order(const T* x, Widened* to) {
    const f32x16 a = load(x), b = load(x + LANES);
    *to = {every_second<false>(a, b), every_second<true>(a, b)};
  }
#else
  // By two lookups of bytes, numbers become words, each the upper one of a float. A vector has the even
  // words of eight lanes, then their odd ones.
  static constexpr int X_STEP = 2 * INTEGER_STEP;
  template <typename T>
  static TH_INLINE void order(const T* x, Widened* to) {
    float lanes[4][LANES];
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4 * REGISTER_LANES; ++i)
        lanes[i % 4][i / 4] = to_float(x[i / LANES * INTEGER_STEP + half * LANES + i % LANES]);
      const auto from = [&](int i) TH_LAMBDA { return load_register(lanes[i]); };
      to[half] = {{from(0), from(2)}, {from(1), from(3)}};
    }
  }
  // Thirty-two numbers of the lowest four bits of bytes; eight less, unless a zero point is taken off.
  template <bool HAS_ZEROS>
  struct Words {
    __m256i halves[2];
    explicit TH_INLINE Words(__m256i bytes) {
      static constexpr uint8_t LOWER[] = {0,    0xe0, 0xc0, 0xa0, 0x80, 0x40, 0,    0x80,
                                          0,    0x80, 0,    0x40, 0x80, 0xa0, 0xc0, 0xe0,
                                          0,    0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70};
      static constexpr uint8_t UPPER[] = {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf,
                                          0,    0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
                                          0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41};
      const __m256i numbers = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
      const __m256i lower = find(LOWER, numbers), upper = find(UPPER, numbers);
      halves[0] = _mm256_unpacklo_epi8(lower, upper);
      halves[1] = _mm256_unpackhi_epi8(lower, upper);
    }
    TH_INLINE f32x16 floats(int half, Register zero) const {
      const __m256i odd = _mm256_and_si256(halves[half], _mm256_set1_epi32(int(0xffff0000)));
      const f32x16 numbers = {(Register)_mm256_slli_epi32(halves[half], 16), (Register)odd};
      return HAS_ZEROS ? numbers - f32x16{zero, zero} : numbers;
    }
    static TH_INLINE __m256i find(const uint8_t* table, __m256i numbers) {
      const auto* from = reinterpret_cast<const __m128i*>(table + (HAS_ZEROS ? 8 : 0));
      return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(from)), numbers);
    }
  };
#endif
  template <typename C>
  static TH_INLINE void store_in_order(C* to, const Widened& x) {
    store(to, in_turn<false>(x.first, x.second));
    store(to + LANES, in_turn<true>(x.first, x.second));
  }
  static TH_INLINE Widened worth(const Widened& x, float) { return x; }

  // What each of the sixteen numbers is worth in a group.
  struct Scaled {
#ifdef __AVX512F__
    f32x16 worth;
    Scaled() = default;
    explicit TH_INLINE Scaled(f32x16 worth) : worth(worth) {}
    TH_INLINE Scaled(const float* scale, float zero)
        : worth((f32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - zero) * *scale) {}
    TH_INLINE Widened widen(const uint8_t* p) const {
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
      // The lookup reads four bits of each lane.
      return {(f32x16)_mm512_permutexvar_ps(bytes, (__m512)worth),
              (f32x16)_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), (__m512)worth)};
    }
#else
    float scale, zero;
    Scaled() = default;
    TH_INLINE Scaled(const float* scale, float zero) : scale(*scale), zero(zero) {}
    TH_INLINE Widened widen(const uint8_t* p) const {
      u8x16 bytes;
      std::memcpy(&bytes, p, sizeof(bytes));
      const i32x16 pairs = convert<i32x16>(bytes);
      return {(convert<f32x16>(pairs & 15) - zero) * scale,
              (convert<f32x16>(pairs >> 4) - zero) * scale};
    }
#endif
  };
};

// GROUP elements share a scale: 32, or 16, where the lanes of a vector have two.
template <int GROUP>
struct Fp4 : Int4 {
  using Scale = uint8_t;
  static constexpr int SCALES = INTEGER_STEP / GROUP;  // of a step
  static constexpr int X_STEP = FP4_STEP;
  static constexpr bool HAS_FACTOR = GROUP == 16;

  static int64_t row_scales(int64_t K) { return K / GROUP + (HAS_FACTOR ? sizeof(float) : 0); }

  // The scales of a row as floats; `to` has room for whole vectors.
  static TH_INLINE void widen_scales(const uint8_t* from, int64_t K, float* to) {
    const int64_t count = K / GROUP;
    const float factor = factor_of(from, K);
    const auto widen = [&](const uint8_t* p) TH_LAMBDA {
      u8x16 bytes;
      std::memcpy(&bytes, p, sizeof(bytes));
      return HAS_FACTOR ? th::widen(bytes) * factor : power(bytes);
    };
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, widen(from + i));
    if (i == count) return;
    uint8_t last[LANES] = {};
    std::memcpy(last, from + i, count - i);
    store(to + i, widen(last));
  }
  static TH_INLINE f32x16 power(u8x16 bytes) {
    const u32x16 exponents = as_integers(bytes), bits = exponents << 23;
    // The first is a denormal float; the last one stands for NaN.
    return bit_cast<f32x16>(select(exponents - 1u < 254u, bits, bits | 0x400000u));
  }
  static TH_INLINE f32x16 by_lane(const float* scales) {
    if (SCALES == 1) return splat(*scales);
#ifdef __AVX512F__
    const __m512 first = _mm512_set1_ps(scales[0]), second = _mm512_set1_ps(scales[1]);
    return (f32x16)_mm512_mask_blend_ps(0xff00, first, second);
#else
    typedef decltype(f32x16::low) Half;
    return {scales[0] - Half{}, scales[1] - Half{}};
#endif
  }

  // FP4_STEP elements of x: vector i has from each eight that follow one another the PLACE[i]-th.
  static constexpr int PLACE[FP4_VECTORS] = {0, 4, 2, 6, 1, 5, 3, 7};
  template <typename T>
  static TH_INLINE void order(const T* x, Widened* to) {
    f32x16 vectors[FP4_VECTORS], from[FP4_VECTORS];
    for (int i = 0; i < FP4_VECTORS; ++i) vectors[i] = load(x + i * LANES);
#pragma GCC unroll 4
    for (int n = FP4_VECTORS; n > 1; n /= 2) {
      std::memcpy(from, vectors, sizeof(from));
#pragma GCC unroll 8
      for (int i = 0; i < FP4_VECTORS; i += 2) {
        f32x16* half = vectors + i / n * n + i % n / 2;
        half[0] = every_second<false>(from[i], from[i + 1]);
        half[n / 2] = every_second<true>(from[i], from[i + 1]);
      }
    }
    std::memcpy(to, vectors, sizeof(vectors));
  }
  // What the lowest four bits of each lane stand for.
  static TH_INLINE f32x16 numbers(u32x16 codes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_permutexvar_ps((__m512i)codes, (__m512)f32x16{
        0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6});
#elif defined(__AVX2__)
    const auto half = [](auto codes) TH_LAMBDA {
      const __m256 sizes = _mm256_setr_ps(0, .5, 1, 1.5, 2, 3, 4, 6);
      const __m256 size = _mm256_permutevar8x32_ps(sizes, (__m256i)codes);
      const __m256i sign = _mm256_slli_epi32((__m256i)(codes & 8u), 28);
      return (decltype(f32x16::low))_mm256_or_ps(size, (__m256)sign);
    };
    return {half(codes.low), half(codes.high)};
#else
    const u32x16 size = codes & 7u, sign = (codes & 8u) << 28;
    const f32x16 normal = bit_cast<f32x16>((size << 22) + (126u << 23));
    const f32x16 small = convert<f32x16>(bit_cast<i32x16>(size)) * 0.5f;
    return bit_cast<f32x16>(bit_cast<u32x16>(select(size < 2u, small, normal)) | sign);
#endif
  }
  // The bytes of a step, each as what it stands for in the lanes of its elements.
  static TH_INLINE f32x16 lanes_of(const uint8_t* scales) {
    std::conditional_t<GROUP == 16, int64_t, int32_t> bytes;  // a vector would pass through memory
    std::memcpy(&bytes, scales, sizeof(bytes));
#ifdef __AVX__
    const __m128i read = GROUP == 16 ? _mm_cvtsi64_si128(bytes) : _mm_cvtsi32_si128(int(bytes));
    const __m128i twice = _mm_unpacklo_epi8(read, read);
    const u8x16 by_lane = (u8x16)(GROUP == 16 ? twice : _mm_unpacklo_epi16(twice, twice));
#else
    u8x16 by_lane;
    for (int i = 0; i < LANES; ++i) by_lane[i] = uint8_t(bytes >> i * FP4_VECTORS / GROUP * 8);
#endif
    return HAS_FACTOR ? th::widen(by_lane) : power(by_lane);
  }
  static float factor_of(const uint8_t* scales, int64_t K) {
    float factor = 1;
    if (HAS_FACTOR) std::memcpy(&factor, scales + K / GROUP, sizeof(factor));
    return factor;
  }

#ifdef __AVX512F__
  struct Scaled : Int4::Scaled {
    f32x16 scale;
    Scaled() = default;
    TH_INLINE Scaled(const float* scales, float)
        : Int4::Scaled(f32x16{0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6} *
                       (SCALES == 1 ? *scales : 1)),
          scale(by_lane(scales)) {}
    TH_INLINE Widened widen(const uint8_t* p) const {
      const Widened numbers = Int4::Scaled::widen(p);
      if (SCALES == 1) return numbers;
      return {numbers.first * scale, numbers.second * scale};
    }
  };
#else
  struct Scaled {
    f32x16 half;  // of scales: numbers are looked up twice as large
    Scaled() = default;
    TH_INLINE Scaled(const float* scales, float) : half(by_lane(scales) * 0.5f) {}
    TH_INLINE Widened widen(const uint8_t* p) const {
      u8x16 bytes;
      std::memcpy(&bytes, p, sizeof(bytes));
      return {convert<f32x16>(convert<i32x16>(twice(bytes & 15))) * half,
              convert<f32x16>(convert<i32x16>(twice(bytes >> 4))) * half};
    }
    static TH_INLINE i8x16 twice(u8x16 codes) {
      constexpr i8x16 VALUES = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#if defined(__AVX__)
      return (i8x16)_mm_shuffle_epi8((__m128i)VALUES, (__m128i)codes);
#elif defined(__aarch64__)
      return (i8x16)vqtbl1q_s8((int8x16_t)VALUES, (uint8x16_t)codes);
#else
      i8x16 found = {};
      for (int i = 0; i < LANES; ++i) found[i] = VALUES[codes[i]];
      return found;
#endif
    }
  };
#endif
};

template <typename Q>
constexpr bool IS_FP4 = std::is_same_v<typename Q::Scale, uint8_t>;

template <typename Q>
struct Integers {
  const void* data;
  const void* scales;
  int64_t K, group;  // elements of a row that share a scale
  bool has_zeros;    // each scale is followed by what the number is that is worth nothing

  int64_t row_bytes() const { return K * Q::STEP_BYTES / INTEGER_STEP; }
  // Of a group, or of the groups of a step.
  int64_t scale_floats() const {
    if constexpr (IS_FP4<Q>) return Q::SCALES;
    return 1 + has_zeros;
  }
  int64_t row_scales() const {
    if constexpr (IS_FP4<Q>) return Q::row_scales(K);
    return Q::SCALES_SUMS ? 1 : K / group * scale_floats();
  }
  const uint8_t* row(int64_t n) const {
    return static_cast<const uint8_t*>(data) + n * row_bytes();
  }
  const auto* scales_of(int64_t n) const {
    return static_cast<const typename Q::Scale*>(scales) + n * row_scales();
  }
};

// The scales of rows n, n + stride, ..., R of them: where they lie, or as floats in this thread's memory.
struct RowScales {
  const float* first;
  int64_t step;  // to those of the next row

  template <typename Q>
  static TH_INLINE RowScales of(const Integers<Q>& W, int64_t n, int64_t stride, int R) {
    if constexpr (IS_FP4<Q>) {
      static thread_local std::vector<float> memory;
      const int64_t step = (W.K / W.group + LANES - 1) / LANES * LANES;
      if (int64_t(memory.size()) < R * step) memory.resize(R * step);
      for (int r = 0; r < R; ++r) Q::widen_scales(W.scales_of(n + r * stride), W.K, &memory[r * step]);
      return {memory.data(), step};
    } else {
      return {W.scales_of(n), stride * W.row_scales()};
    }
  }
};

// The zero points of groups beside their scales, or as many eights.
struct Zeros {
  template <typename Q>
  Zeros(const Integers<Q>& W, const float* scales)
      : at(W.has_zeros ? scales + 1 : &EIGHT), moves(W.has_zeros) {}
  TH_INLINE float operator[](int64_t scale) const { return at[moves * scale]; }

  static constexpr float EIGHT = 8;
  const float* at;
  int64_t moves;
};

namespace detail {

#ifdef __AVX512F__
constexpr int INTEGER_GROUP = 8;  // rows of x that meet what is widened at once
template <typename Q>
constexpr int integer_streams(int rows) { return rows <= 4 ? 4 : IS_FP4<Q> ? 2 : 3; }
#else
constexpr int INTEGER_GROUP = 2;
template <typename Q>
constexpr int integer_streams(int rows) { return IS_FP4<Q> ? 2 : rows == 1 ? 4 : Q::SCALES_SUMS ? 2 : 1; }
#endif
constexpr int64_t INTEGER_LEAD = 2048;  // bytes that are fetched ahead of each stream

// Rows n, n + stride, ... of W, R of them, times G rows of x, in blocks of STEPS with one scale.
template <typename Q, int STEPS, int R, int G>
TH_NOINLINE void multiply_integers(const Integers<Q>& W, int64_t n, int64_t stride, const Widened* x,
                                   float* y, int64_t ldy) {
  constexpr int LINE_STEPS = 64 / Q::STEP_BYTES, SUMS = (R * G + LANES - 1) / LANES * LANES;
  const int64_t w_step = stride * W.row_bytes(), s_width = W.scale_floats();
  const uint8_t* w = W.row(n);
  const RowScales scales = RowScales::of(W, n, stride, R);
  const float* s = scales.first;
  const int64_t s_step = scales.step;
  f32x16 acc[R * G] = {};
  const Zeros zeros(W, s);
  int64_t group = 0;
  const auto scaled = [&](int r) TH_LAMBDA {
    const int64_t i = r * s_step + group;
    return Q::SCALES_SUMS ? typename Q::Scaled() : typename Q::Scaled(s + i, zeros[i]);
  };
  const auto meet = [&](const Widened& numbers, const Widened* xs, int r) TH_LAMBDA {
#pragma GCC unroll 8
    for (int m = 0; m < G; ++m)
      acc[m * R + r] = fma(numbers.second, xs[m].second, fma(numbers.first, xs[m].first, acc[m * R + r]));
  };
  int64_t k = 0;
  for (; k + STEPS * INTEGER_STEP <= W.K; k += STEPS * INTEGER_STEP) {
    if (k / INTEGER_STEP % LINE_STEPS == 0)
      for (int r = 0; r < R; ++r)
        for (int line = 0; line < std::max(1, STEPS / LINE_STEPS); ++line)
          __builtin_prefetch(w + r * w_step + line * 64 + INTEGER_LEAD, 0, 2);
    if constexpr (G <= 4) {  // a row after the other: its scaled numbers are all that is kept of it
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const typename Q::Scaled numbers = scaled(r);
#pragma GCC unroll 4
        for (int i = 0; i < STEPS; ++i)
          meet(numbers.widen(w + r * w_step + i * Q::STEP_BYTES), x + i * G, r);
      }
    } else {  // all rows at once: a vector of x is loaded once for them
      for (int i = 0; i < STEPS; ++i) {
        Widened numbers[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          numbers[r] = scaled(r).widen(w + r * w_step + i * Q::STEP_BYTES);
#pragma GCC unroll 8
        for (int m = 0; m < G; ++m) {
          const f32x16 first = held(x[i * G + m].first);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[m * R + r] = fma(numbers[r].first, first, acc[m * R + r]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < G; ++m) {
          const f32x16 second = held(x[i * G + m].second);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[m * R + r] = fma(numbers[r].second, second, acc[m * R + r]);
        }
      }
    }
    w += STEPS * Q::STEP_BYTES, x += STEPS * G;
    if (!Q::SCALES_SUMS) group += s_width;
  }
  if constexpr (Q::SCALES_SUMS)
    for (; k < W.K; k += INTEGER_STEP, w += INTEGER_STEP, x += G)
      for (int r = 0; r < R; ++r) {
        uint8_t last[INTEGER_STEP] = {};
        std::memcpy(last, w + r * w_step, std::min<int64_t>(INTEGER_STEP, W.K - k));
        meet(typename Q::Scaled().widen(last), x, r);
      }
  float sums[SUMS];
  sum_each(acc, sums);
#pragma GCC unroll 8
  for (int m = 0; m < G; ++m)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      y[m * ldy + r * stride] = sums[m * R + r] * (Q::SCALES_SUMS ? s[r * s_step] : 1.0f);
}

#ifdef TH_INT4_BY_WORDS
// The same of INT4: numbers as they are, and a scale for the sum of a group. Of 32, two groups are met at
// once.
template <int STEPS, bool HAS_ZEROS, int R, int G>
TH_NOINLINE void multiply_int4(const Integers<Int4>& W, int64_t n, int64_t stride, const Widened* x,
                               float* y, int64_t ldy) {
  constexpr int SUMS = (R * G + LANES - 1) / LANES * LANES, PARTS = std::max(STEPS, 2);
  constexpr int BYTES = PARTS * Int4::STEP_BYTES, WIDTH = 1 + HAS_ZEROS;
  using Words = Int4::Words<HAS_ZEROS>;
  const int64_t w_step = stride * W.row_bytes(), s_step = stride * W.row_scales();
  const uint8_t* w = W.row(n);
  const float* s = W.scales_of(n);
  f32x16 acc[R * G] = {};
  const auto meet = [&](const uint8_t* p, Register scale, Register zero, int r) TH_LAMBDA {
    f32x16 sums[G] = {};
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part += 2) {
      const __m256i bytes = _mm256_loadu_si256((const __m256i*)(p + part * Int4::STEP_BYTES));
      const Words low(bytes), high(_mm256_srli_epi32(bytes, 4));
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const f32x16 first = low.floats(half, zero), second = high.floats(half, zero);
#pragma GCC unroll 8
        for (int m = 0; m < G; ++m) {
          const Widened& its = x[part * G + m * 2 + half];
          const f32x16 sum = part + half ? fma(first, its.first, sums[m]) : first * its.first;
          sums[m] = fma(second, its.second, sum);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < G; ++m) acc[m * R + r] = fma(sums[m], {scale, scale}, acc[m * R + r]);
  };
  const auto of = [&](float first, float second) TH_LAMBDA {
    const auto both = [](float x) TH_LAMBDA { return _mm_set1_ps(x); };
    return STEPS > 1 ? first - Register{} : (Register)_mm256_set_m128(both(second), both(first));
  };
  int64_t k = 0;
  for (; k + PARTS * INTEGER_STEP <= W.K; k += PARTS * INTEGER_STEP) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float *its = s + r * s_step, *next = STEPS > 1 ? its : its + WIDTH;
      __builtin_prefetch(w + r * w_step + INTEGER_LEAD, 0, 2);
      meet(w + r * w_step, of(*its, *next), of(its[HAS_ZEROS], next[HAS_ZEROS]), r);
    }
    w += BYTES, x += PARTS * G, s += PARTS / STEPS * WIDTH;
  }
  if (k < W.K)
    for (int r = 0; r < R; ++r) {
      uint8_t last[BYTES] = {};
      std::memcpy(last, w + r * w_step, Int4::STEP_BYTES);
      const float* its = s + r * s_step;
      meet(last, of(*its, 0), of(its[HAS_ZEROS], 0), r);
    }
  float sums[SUMS];
  sum_each(acc, sums);
#pragma GCC unroll 8
  for (int m = 0; m < G; ++m)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) y[m * ldy + r * stride] = sums[m * R + r];
}
#endif

// The same of FP4, FP4_STEP elements at a time.
template <typename Q, int R, int G>
TH_NOINLINE void multiply_fp4(const Integers<Q>& W, int64_t n, int64_t stride, const Widened* x,
                              float* y, int64_t ldy) {
  constexpr int SUMS = (R * G + LANES - 1) / LANES * LANES, BYTES = FP4_STEP / 2;
  constexpr int SCALES = FP4_STEP / INTEGER_STEP * Q::SCALES;
  const int64_t w_step = stride * W.row_bytes(), s_step = stride * W.row_scales();
  const uint8_t *w = W.row(n), *s = W.scales_of(n);
  f32x16 acc[R * G] = {};
  const auto meet = [&](const uint8_t* p, const uint8_t* scales, int r) TH_LAMBDA {
    f32x16 read;
    std::memcpy(&read, p, sizeof(read));
    const u32x16 words = bit_cast<u32x16>(held(read));  // else each shift would read memory again
    f32x16 sums[G];
#pragma GCC unroll 8
    for (int i = 0; i < FP4_VECTORS; ++i) {
      const f32x16 numbers = Q::numbers(words >> (4 * Q::PLACE[i]));
#pragma GCC unroll 8
      for (int m = 0; m < G; ++m) {
        const Widened& pair = x[m * FP4_VECTORS / 2 + i / 2];
        const f32x16 its = i % 2 ? pair.second : pair.first;
        sums[m] = i == 0 ? numbers * its : fma(numbers, its, sums[m]);
      }
    }
    const f32x16 scale = Q::lanes_of(scales);
#pragma GCC unroll 8
    for (int m = 0; m < G; ++m) acc[m * R + r] = fma(sums[m], scale, acc[m * R + r]);
  };
  int64_t k = 0;
  for (; k + FP4_STEP <= W.K; k += FP4_STEP, w += BYTES, s += SCALES, x += G * FP4_VECTORS / 2)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(w + r * w_step + INTEGER_LEAD, 0, 2);
      meet(w + r * w_step, s + r * s_step, r);
    }
  if (k < W.K)
    for (int r = 0; r < R; ++r) {
      uint8_t last[BYTES] = {}, its_scales[SCALES] = {};
      std::memcpy(last, w + r * w_step, (W.K - k) / 2);
      std::memcpy(its_scales, s + r * s_step, (W.K - k) / W.group);
      meet(last, its_scales, r);
    }
  float sums[SUMS];
  sum_each(acc, sums);
  for (int r = 0; r < R; ++r) {
    const float factor = Q::factor_of(W.scales_of(n + r * stride), W.K);
    for (int m = 0; m < G; ++m) y[m * ldy + r * stride] = sums[m * R + r] * factor;
  }
}

// G rows of x, which R streams of W meet, and then what rows are left, one by one.
template <typename Q, int STEPS, int R, int G>
void stream_integers(const Integers<Q>& W, int64_t first, int64_t N, const Widened* x, float* y,
                     int64_t ldy) {
  const int64_t stream = N / R;
  const auto multiply = [&](auto rows, int64_t n, int64_t stride) {
#ifdef TH_INT4_BY_WORDS
    if constexpr (std::is_same_v<Q, Int4>)
      return (W.has_zeros ? multiply_int4<STEPS, true, rows, G> : multiply_int4<STEPS, false, rows, G>)(
          W, first + n, stride, x, y + n, ldy);
#endif
    if constexpr (IS_FP4<Q>)
      multiply_fp4<Q, rows, G>(W, first + n, stride, x, y + n, ldy);
    else
      multiply_integers<Q, STEPS, rows, G>(W, first + n, stride, x, y + n, ldy);
  };
  for (int64_t n = 0; n < stream; ++n) multiply(std::integral_constant<int, R>{}, n, stream);
  for (int64_t n = stream * R; n < N; ++n) multiply(std::integral_constant<int, 1>{}, n, 1);
}

}  // namespace detail

template <typename Q>
class IntegerRows {
 public:
  template <typename Row>
  void pack(int M, int64_t K, const Row& row) {
    using namespace detail;
    M_ = M, steps_ = (K + STEP - 1) / STEP * PARTS;
    reserve(M * steps_);
    for (int i = 0; i < M; ++i) {
      const int first = i / INTEGER_GROUP * INTEGER_GROUP, rows = std::min(INTEGER_GROUP, M - first);
      pack_row(row(i), K, data_ + first * steps_ + (i - first) * PARTS, rows * PARTS);
    }
  }

  void multiply(const Integers<Q>& W, int64_t first, int64_t N, float* y, int64_t ldy) const {
    if constexpr (!IS_FP4<Q>) {
      if (Q::SCALES_SUMS || W.group == 4 * INTEGER_STEP) return run<4>(W, first, N, y, ldy);
      if (W.group == 2 * INTEGER_STEP) return run<2>(W, first, N, y, ldy);
    }
    run<1>(W, first, N, y, ldy);
  }

 private:
  static constexpr int STEP = Q::X_STEP, PARTS = STEP / INTEGER_STEP;

  template <typename T>
  static TH_NOINLINE void pack_row(const T* x, int64_t K, Widened* to, int64_t stride) {
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP, to += stride) Q::order(x + k, to);
    if (k == K) return;
    T last[STEP] = {};
    std::memcpy(last, x + k, sizeof(T) * (K - k));
    Q::order(last, to);
  }

  template <int STEPS>
  void run(const Integers<Q>& W, int64_t first, int64_t N, float* y, int64_t ldy) const {
    for (int m = 0; m < M_; m += detail::INTEGER_GROUP)
      meet<STEPS, detail::INTEGER_GROUP>(std::min(detail::INTEGER_GROUP, M_ - m), W, first, N,
                                         data_ + m * steps_, y + m * ldy, ldy);
  }

  template <int STEPS, int G>
  static void meet(int rows, const Integers<Q>& W, int64_t first, int64_t N, const Widened* x,
                   float* y, int64_t ldy) {
    if constexpr (G > 1)
      if (rows < G) return meet<STEPS, G - 1>(rows, W, first, N, x, y, ldy);
    constexpr int STREAMS = detail::integer_streams<Q>(G);
    detail::stream_integers<Q, STEPS, STREAMS, G>(W, first, N, x, y, ldy);
  }

  void reserve(int64_t count) {
    constexpr int64_t FLOATS = sizeof(Widened) / sizeof(float);
    if (count <= capacity_) return;
    memory_.reset(), memory_.reset(new AlignedFloats(count * FLOATS));
    data_ = reinterpret_cast<Widened*>(memory_->data()), capacity_ = count;
  }

  int M_ = 0;
  int64_t steps_ = 0, capacity_ = 0;  // Widened of a row; of all
  std::unique_ptr<AlignedFloats> memory_;
  Widened* data_ = nullptr;  // groups of rows, each [steps][rows]
};

template <typename Q, typename C>
class IntegerPieces {
 public:
  template <typename Body>
  TH_INLINE void each(const Integers<Q>& W, int64_t first, int64_t count, int64_t, const Body& body) {
    for (int64_t at = 0; at < count; at += ROWS) {
      const int64_t rows = std::min(ROWS, count - at);
      memory_.resize(rows * W.K);
      for (int64_t n = 0; n < rows; ++n) widen(W, first + at + n, memory_.data() + n * W.K);
      body(memory_.data(), at, rows);
    }
  }

 private:
  static constexpr int64_t ROWS = 48;  // measured

  TH_NOINLINE static void widen(const Integers<Q>& W, int64_t n, C* to) {
    const uint8_t* w = W.row(n);
    const float* s = RowScales::of(W, n, 1, 1).first;
    const Zeros zeros(W, s);
    const int64_t width = Q::SCALES_SUMS ? W.K : std::max<int64_t>(W.group, INTEGER_STEP);
    for (int64_t first = 0, i = 0; first < W.K; first += width, i += W.scale_floats()) {
      const typename Q::Scaled scaled(s + i, zeros[i]);
      int64_t k = 0;
      for (; k + INTEGER_STEP <= width; k += INTEGER_STEP, w += Q::STEP_BYTES, to += INTEGER_STEP)
        Q::store_in_order(to, Q::worth(scaled.widen(w), s[i]));
      if (k == width) continue;
      uint8_t last[INTEGER_STEP] = {};
      C widened[INTEGER_STEP];
      std::memcpy(last, w, width - k);
      Q::store_in_order(widened, Q::worth(scaled.widen(last), s[i]));
      std::memcpy(to, widened, sizeof(C) * (width - k));
    }
  }

  std::vector<C> memory_;
};

}  // namespace th
