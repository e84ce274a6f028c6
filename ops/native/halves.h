// Vectors of any number of lanes, as the registers that they take: one of the machine's is GCC's own
// vector type, a longer one its two halves. Of GCC's longer vectors, most stay in memory: AVX2 would
// load and store sums around each multiply-add.
//
//   Vector<E, N>                        N lanes of E; + - * / & | << >> ~ and comparisons work on it
//   V       load_lanes<V>(const E*), load_lanes<V>(const E*, n): n lanes, the others 0
//   void    store_lanes(E*, V), store_lanes(E*, V, n)
//   To      bit_cast<To>(x), convert<To>(x): the bits, or the numbers, lane by lane
//   V       fma(a, b, c), select(mask, a, b), sqrt(x), held(x)
//   V       repeated<V, W>(const E*): W elements, again and again
//   V       first_blocks<B>(a, b), ...  shuffles of two vectors
//   float   sum(V), max(V)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TH_INLINE inline __attribute__((always_inline))
#define TH_LAMBDA __attribute__((always_inline))

namespace th {

constexpr int LANES = 16;  // of the vectors of simd.h, whatever a register has
#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
// Vectors of LANES sums that a loop keeps in registers: the other half is for what it adds to them.
constexpr int SUMS = REGISTERS * REGISTER_LANES / LANES / 2;

template <typename V>
struct Halves {
  V low, high;

  // One lane; of a number known to the compiler, its half.
  TH_INLINE auto operator[](int i) const {
    constexpr int HALF = sizeof(V) / sizeof(low[0]);
    return i < HALF ? low[i] : high[i - HALF];
  }
  template <typename X>
  TH_INLINE Halves& operator+=(X x) { return *this = *this + x; }
  template <typename X>
  TH_INLINE Halves& operator-=(X x) { return *this = *this - x; }
  template <typename X>
  TH_INLINE Halves& operator*=(X x) { return *this = *this * x; }
};

namespace detail {

template <typename E, int N, bool IS_REGISTER = (N <= REGISTER_LANES)>
struct VectorOf {
  typedef Halves<typename VectorOf<E, N / 2>::Type> Type;
};
template <typename E, int N>
struct VectorOf<E, N, true> {
  typedef E Type __attribute__((vector_size(N * sizeof(E))));
};

template <typename V>
constexpr bool IS_HALVES = false;
template <typename V>
constexpr bool IS_HALVES<Halves<V>> = true;

}  // namespace detail

template <typename E, int N>
using Vector = typename detail::VectorOf<E, N>::Type;
template <typename V>
using Element = std::decay_t<decltype(std::declval<const V&>()[0])>;
template <typename V>
constexpr int LANES_OF = sizeof(V) / sizeof(Element<V>);

#define TH_OPERATOR(op)                                                                     \
  template <typename V>                                                                     \
  TH_INLINE auto operator op(Halves<V> a, Halves<V> b) {                                    \
    return Halves<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};              \
  }                                                                                         \
  template <typename V, typename S, std::enable_if_t<std::is_arithmetic_v<S>, int> = 0>     \
  TH_INLINE auto operator op(Halves<V> a, S b) {                                            \
    return Halves<decltype(a.low op b)>{a.low op b, a.high op b};                           \
  }                                                                                         \
  template <typename V, typename S, std::enable_if_t<std::is_arithmetic_v<S>, int> = 0>     \
  TH_INLINE auto operator op(S a, Halves<V> b) {                                            \
    return Halves<decltype(a op b.low)>{a op b.low, a op b.high};                           \
  }
TH_OPERATOR(+)
TH_OPERATOR(-)
TH_OPERATOR(*)
TH_OPERATOR(/)
TH_OPERATOR(&)
TH_OPERATOR(|)
TH_OPERATOR(<<)
TH_OPERATOR(>>)
TH_OPERATOR(<)
TH_OPERATOR(>)
TH_OPERATOR(>=)
TH_OPERATOR(==)
#undef TH_OPERATOR
template <typename V>
TH_INLINE Halves<V> operator-(Halves<V> x) { return {-x.low, -x.high}; }
template <typename V>
TH_INLINE Halves<V> operator~(Halves<V> x) { return {~x.low, ~x.high}; }

// ---- loads and stores ------------------------------------------------------------------------

template <typename V, typename E>
TH_INLINE V load_lanes(const E* p) {
  if constexpr (detail::IS_HALVES<V>) {
    using Half = decltype(V::low);
    return {load_lanes<Half>(p), load_lanes<Half>(p + LANES_OF<Half>)};
  } else {
    V x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
}
template <typename V, typename E>
TH_INLINE void store_lanes(E* p, V x) {
  if constexpr (detail::IS_HALVES<V>) {
    store_lanes(p, x.low), store_lanes(p + LANES_OF<decltype(x.low)>, x.high);
  } else {
    std::memcpy(p, &x, sizeof(x));
  }
}

namespace detail {

// The first n of N lanes are negative.
template <int N>
TH_INLINE Vector<int32_t, N> first_lanes(int n) {
  Vector<int32_t, N> number;
  for (int i = 0; i < N; ++i) number[i] = i;
  return number < n;
}

// n <= N elements, without a call: whatever registers hold would be stored around it.
template <int N, typename E>
TH_INLINE void copy_lanes(E* to, const E* from, int n) {
  if (n & N) std::memcpy(to, from, N * sizeof(E)), to += N, from += N;
  if constexpr (N > 1) copy_lanes<N / 2>(to, from, n);
}

}  // namespace detail

template <typename V, typename E>
TH_INLINE V load_lanes(const E* p, int n) {
  if constexpr (detail::IS_HALVES<V>) {
    using Half = decltype(V::low);
    constexpr int N = LANES_OF<Half>;
    if (n > N) return {load_lanes<Half>(p), load_lanes<Half>(p + N, n - N)};
    return {load_lanes<Half>(p, n), Half{}};
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
#elif defined(__AVX__)
    if constexpr (sizeof(V) == 32 && sizeof(E) == 4)
      return (V)_mm256_maskload_ps((const float*)p, (__m256i)detail::first_lanes<8>(n));
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (sizeof(V) == 32)
      return (V)_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p);
#endif
    E lanes[LANES_OF<V>] = {};
    detail::copy_lanes<LANES_OF<V>>(lanes, p, n);
    return load_lanes<V>(lanes);
  }
}
template <typename V, typename E>
TH_INLINE void store_lanes(E* p, V x, int n) {
  if constexpr (detail::IS_HALVES<V>) {
    constexpr int N = LANES_OF<decltype(x.low)>;
    if (n > N)
      store_lanes(p, x.low), store_lanes(p + N, x.high, n - N);
    else
      store_lanes(p, x.low, n);
  } else {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64)
      return _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)x);
#elif defined(__AVX__)
    if constexpr (sizeof(V) == 32 && sizeof(E) == 4)
      return _mm256_maskstore_ps((float*)p, (__m256i)detail::first_lanes<8>(n), (__m256)x);
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (sizeof(V) == 32)
      return _mm256_mask_storeu_epi16(p, __mmask16((1u << n) - 1), (__m256i)x);
#endif
    E lanes[LANES_OF<V>];
    store_lanes(lanes, x);
    detail::copy_lanes<LANES_OF<V>>(p, lanes, n);
  }
}

// W elements from p on, again and again.
template <typename V, int W, typename E>
TH_INLINE V repeated(const E* p) {
  constexpr int N = LANES_OF<V>;
  if constexpr (W == N) {
    return load_lanes<V>(p);
  } else if constexpr (detail::IS_HALVES<V>) {
    const auto half = repeated<decltype(V::low), W>(p);
    return {half, half};
  } else if constexpr (W == 1) {
    return *p - V{};
  } else if constexpr (W == 2) {
    typedef int64_t Pairs __attribute__((vector_size(sizeof(V))));
    int64_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return (V)(Pairs{} + pair);
  } else {
#ifdef __AVX512F__
    if constexpr (W == 8)
      return (V)_mm512_broadcast_f64x4(_mm256_loadu_pd(reinterpret_cast<const double*>(p)));
    else
      return (V)_mm512_broadcast_f32x4(_mm_loadu_ps(p));
#elif defined(__AVX__)
    return (V)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
#endif
  }
}

// Keeps a loaded vector in its register: GCC may otherwise load it anew in each of its uses.
template <typename V>
TH_INLINE V held(V x) {
  if constexpr (detail::IS_HALVES<V>) return {held(x.low), held(x.high)};
#if defined(__AVX512F__)
  __asm__("" : "+v"(x));
#elif defined(__AVX__)
  if constexpr (!detail::IS_HALVES<V>) __asm__("" : "+x"(x));
#endif
  return x;
}

// ---- lane by lane ----------------------------------------------------------------------------

template <typename To, typename From>
TH_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  if constexpr (detail::IS_HALVES<To> && detail::IS_HALVES<From>) {
    using Half = decltype(To::low);
    return {bit_cast<Half>(from.low), bit_cast<Half>(from.high)};
  } else {
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
  }
}

// The numbers, of any types; a vector of small ones is a register, or not even one.
template <typename To, typename From>
TH_INLINE To convert(const From& from) {
  if constexpr (detail::IS_HALVES<To> && detail::IS_HALVES<From>) {
    using Half = decltype(To::low);
    return {convert<Half>(from.low), convert<Half>(from.high)};
  } else if constexpr (detail::IS_HALVES<To>) {
    using Half = Vector<Element<From>, LANES_OF<From> / 2>;
    Half halves[2];
    std::memcpy(halves, &from, sizeof(halves));
    return {convert<decltype(To::low)>(halves[0]), convert<decltype(To::low)>(halves[1])};
  } else if constexpr (detail::IS_HALVES<From>) {
    using Half = Vector<Element<To>, LANES_OF<To> / 2>;
    const Half halves[2] = {convert<Half>(from.low), convert<Half>(from.high)};
    To to;
    std::memcpy(&to, halves, sizeof(to));
    return to;
  } else {
    // GCC 12 widens eight bytes one by one, and two bytes each by halves.
#if defined(__AVX2__)
    if constexpr (sizeof(Element<From>) == 1 && sizeof(From) == 8 && sizeof(To) == 32) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&from));
      const __m256i wide = std::is_signed_v<Element<From>> ? _mm256_cvtepi8_epi32(bytes)
                                                           : _mm256_cvtepu8_epi32(bytes);
      return __builtin_convertvector((Vector<int32_t, 8>)wide, To);
    }
    if constexpr (std::is_same_v<Element<From>, uint16_t> && sizeof(From) == 16 && sizeof(To) == 32)
      return __builtin_convertvector((Vector<int32_t, 8>)_mm256_cvtepu16_epi32((__m128i)from), To);
#endif
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<Element<From>, uint16_t> && sizeof(From) == 32 && sizeof(To) == 64)
      return __builtin_convertvector((Vector<int32_t, 16>)_mm512_cvtepu16_epi32((__m256i)from), To);
#endif
    return __builtin_convertvector(from, To);
  }
}

// a * b + c, rounded once wherever the machine has an instruction for it.
TH_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
template <typename V>
TH_INLINE V fma(V a, V b, V c) {
  if constexpr (detail::IS_HALVES<V>) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
  } else {
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
  }
}

template <typename M, typename V>
TH_INLINE V select(M mask, V a, V b) {
  if constexpr (detail::IS_HALVES<V>)
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  else
    return mask ? a : b;
}

template <typename V>
TH_INLINE V sqrt(V x) {
  if constexpr (detail::IS_HALVES<V>) {
    return {sqrt(x.low), sqrt(x.high)};
  } else {
#if defined(__AVX512F__)
    return (V)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
    return (V)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < LANES_OF<V>; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
  }
}

// ---- shuffles --------------------------------------------------------------------------------

namespace detail {

// Lanes of a register, numbered as those of a and then those of b.
template <int... LANE, typename V>
TH_INLINE V shuffle(V a, V b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, LANE...);
#else
  return __builtin_shuffle(a, b, Vector<int32_t, LANES_OF<V>>{LANE...});
#endif
}
template <int B, bool SECOND, typename V, int... LANE>
TH_INLINE V blocks(V a, V b, std::integer_sequence<int, LANE...>) {
  constexpr int N = LANES_OF<V>;
  return shuffle<((LANE & B) ? N + LANE - (SECOND ? 0 : B) : LANE + (SECOND ? B : 0))...>(a, b);
}
template <bool SECOND, typename V, int... LANE>
TH_INLINE V every_second(V a, V b, std::integer_sequence<int, LANE...>) {
  return shuffle<(2 * LANE + SECOND)...>(a, b);
}
template <bool SECOND, typename V, int... LANE>
TH_INLINE V in_turn(V a, V b, std::integer_sequence<int, LANE...>) {
  constexpr int N = LANES_OF<V>;
  return shuffle<(LANE / 2 + LANE % 2 * N + SECOND * N / 2)...>(a, b);
}
template <int BY, typename V, int... LANE>
TH_INLINE V moved_down(V x, std::integer_sequence<int, LANE...>) {
  return shuffle<(LANE + BY)...>(x, x);
}
template <typename V>
using Numbers = std::make_integer_sequence<int, LANES_OF<V>>;

template <int B, bool SECOND, typename V>
TH_INLINE V blocks(V a, V b) {
  if constexpr (!IS_HALVES<V>)
    return blocks<B, SECOND>(a, b, Numbers<V>{});
  else if constexpr (2 * B == LANES_OF<V>)
    return SECOND ? V{a.high, b.high} : V{a.low, b.low};
  else
    return {blocks<B, SECOND>(a.low, b.low), blocks<B, SECOND>(a.high, b.high)};
}

}  // namespace detail

// Of each two blocks of B lanes: the first ones of a and b side by side, or the second ones.
template <int B, typename V>
TH_INLINE V first_blocks(V a, V b) {
  return detail::blocks<B, false>(a, b);
}
template <int B, typename V>
TH_INLINE V second_blocks(V a, V b) {
  return detail::blocks<B, true>(a, b);
}

// Every second lane of a and b side by side, from the first or the second on.
template <bool SECOND, typename V>
TH_INLINE V every_second(V a, V b) {
  if constexpr (detail::IS_HALVES<V>)
    return {every_second<SECOND>(a.low, a.high), every_second<SECOND>(b.low, b.high)};
  else
    return detail::every_second<SECOND>(a, b, detail::Numbers<V>{});
}

// Lanes of a and b in turn: of the first halves of both, or of the second ones.
template <bool SECOND, typename V>
TH_INLINE V in_turn(V a, V b) {
  if constexpr (detail::IS_HALVES<V>) {
    const auto from_a = SECOND ? a.high : a.low, from_b = SECOND ? b.high : b.low;
    return {in_turn<false>(from_a, from_b), in_turn<true>(from_a, from_b)};
  } else {
    return detail::in_turn<SECOND>(a, b, detail::Numbers<V>{});
  }
}

// ---- along the lanes -------------------------------------------------------------------------

namespace detail {

// Lane by lane with what lies half of the lanes further on, until one is left: the order is the
// same whatever the registers are.
template <int B, typename V, typename Combine>
TH_INLINE float reduce(V x, Combine combine) {
  x = combine(x, moved_down<B>(x, Numbers<V>{}));
  if constexpr (B > 1) return reduce<B / 2>(x, combine);
  return x[0];
}

}  // namespace detail

template <typename V>
TH_INLINE float sum(V x) {
  if constexpr (detail::IS_HALVES<V>) {
    return sum(x.low + x.high);
  } else {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    return detail::reduce<LANES_OF<V> / 2>(x, [](V a, V b) TH_LAMBDA { return a + b; });
#endif
  }
}

template <typename V>
TH_INLINE float max(V x) {
  if constexpr (detail::IS_HALVES<V>) {
    return max(select(x.low > x.high, x.low, x.high));
  } else {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    return detail::reduce<LANES_OF<V> / 2>(x, [](V a, V b) TH_LAMBDA { return a > b ? a : b; });
#endif
  }
}

}  // namespace th
