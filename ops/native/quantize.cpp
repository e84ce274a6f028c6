// Weights to numbers of 8 bits, or of 4 in groups, or of FP4, and their scales: see
// ops/formats/integers.py.
#include <algorithm>

#include "call.h"
#include "fp8_rows.h"
#include "simd.h"

namespace th {
namespace {

TH_CALL(Call,
  const void* weight;  // [rows, depth] of float or bf16
  void* numbers;       // [rows, depth], or [rows, depth / 2] of 4 bits
  void* scales;        // floats [rows], or [rows, depth / group]; bytes of FP4, see Mxfp4 and Nvfp4
  int64_t rows, depth, group, is_fp4, is_bf16, num_threads;  // group: 0 of 8 bits
);

constexpr int MOST_VECTORS = 128 / LANES;
constexpr float LARGEST_INT8 = 127, LARGEST_FP4 = 6, LEAST = -8, LARGEST = 7;
// By which the number that is furthest from 0 is divided, as ops/formats/integers.py has them.
constexpr float DIVISORS[] = {7, 8, 8.75f, 9.5f};
constexpr float TO_INTEGER = 12582912;  // added and taken away: rounds what is small

TH_INLINE f32x16 nearest(f32x16 x, float inverse) {
  x = x * inverse;
  x = select(x < LEAST, splat(LEAST), x);
  x = select(x > LARGEST, splat(LARGEST), x);
  return (x + TO_INTEGER) - TO_INTEGER;
}

// V vectors of a group; what is returned is their scale.
template <int V>
TH_INLINE float quantize_group(const f32x16* x, uint8_t* numbers) {
  f32x16 high = x[0], low = x[0];
  for (int v = 1; v < V; ++v) high = max(high, x[v]), low = max(-low, -x[v]), low = -low;
  const float top = max(high), bottom = max(-low);
  const float furthest = bottom > top ? bottom : -top;  // becomes a negative number
  float scale = 1, inverse = 1;
  if (furthest != 0) {
    float least = INFINITY;
    for (const float divisor : DIVISORS) {
      const float candidate = furthest / divisor, its_inverse = divisor / furthest;
      f32x16 squares = {};
      for (int v = 0; v < V; ++v) {
        const f32x16 error = fma(nearest(x[v], its_inverse), splat(candidate), -x[v]);
        squares = fma(error, error, squares);
      }
      const float error = sum(squares);
      if (error < least) least = error, scale = candidate, inverse = its_inverse;
    }
  }
  for (int v = 0; v < V; v += 2) {
    const f32x16 a = nearest(x[v], inverse), b = nearest(x[v + 1], inverse);
    const f32x16 pairs = every_second<false>(a, b) - LEAST + 16.0f * (every_second<true>(a, b) - LEAST);
    const u8x16 bytes = convert<u8x16>(convert<i32x16>(pairs));
    std::memcpy(numbers + v * LANES / 2, &bytes, sizeof(bytes));
  }
  return scale;
}

template <int V, typename T>
void quantize_rows(const Call& call) {
  const T* weight = static_cast<const T*>(call.weight);
  const int64_t groups = call.depth / call.group;
#pragma omp parallel for num_threads(int(call.num_threads))
  for (int64_t row = 0; row < call.rows; ++row)
    for (int64_t i = row * groups; i < (row + 1) * groups; ++i) {
      f32x16 x[V];
      for (int v = 0; v < V; ++v) x[v] = load(weight + (i * V + v) * LANES);
      static_cast<float*>(call.scales)[i] =
          quantize_group<V>(x, static_cast<uint8_t*>(call.numbers) + i * V * LANES / 2);
    }
}

TH_INLINE float not_zero(float scale) { return scale == 0 ? 1 : scale; }

template <typename T>
TH_INLINE float largest_size(const T* x, int64_t depth) {
  f32x16 largest = {};
  for_lanes(depth, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 lanes = load(x + i, n);
    largest = max(max(lanes, -lanes), largest);
  });
  return max(largest);
}

template <typename T>
void quantize_rows_to_8_bits(const Call& call) {
#pragma omp parallel for num_threads(int(call.num_threads))
  for (int64_t row = 0; row < call.rows; ++row) {
    const T* x = static_cast<const T*>(call.weight) + row * call.depth;
    int8_t* to = static_cast<int8_t*>(call.numbers) + row * call.depth;
    const float scale = not_zero(largest_size(x, call.depth) / LARGEST_INT8);
    static_cast<float*>(call.scales)[row] = scale;
    for_lanes(call.depth, [&](int64_t i, int n) TH_LAMBDA {
      const f32x16 nearest = (load(x + i, n) / scale + TO_INTEGER) - TO_INTEGER;
      const i8x16 bytes = convert<i8x16>(convert<i32x16>(nearest));
      std::memcpy(to + i, &bytes, n);
    });
  }
}

// Formats of FP4: how many vectors share a scale, which two scales suit the largest number of them,
// and what these are worth.
struct Mxfp4 {
  static constexpr int VECTORS = 2, FACTOR_BYTES = 0;

  template <typename T>
  static TH_INLINE float factor(const T*, int64_t) {
    return 1;
  }
  // With the first, the largest number is from 4 to 8, and cut off from 6 on.
  static TH_INLINE uint8_t scale(float largest, float, bool is_second) {
    const int32_t exponent = largest == 0 ? 124 : (bit_cast<int32_t>(largest) >> 23) - 2;
    return uint8_t(std::min(std::max(exponent, 1), 253) + is_second);
  }
  static TH_INLINE f32x16 worth(uint8_t scale, float) {
    return splat(bit_cast<float>(uint32_t(scale) << 23));
  }
};

struct Nvfp4 {
  static constexpr int VECTORS = 1, FACTOR_BYTES = sizeof(float);
  static constexpr float LARGEST_SCALE = 448;

  template <typename T>
  static TH_INLINE float factor(const T* x, int64_t depth) {
    return not_zero(largest_size(x, depth) / (LARGEST_FP4 * LARGEST_SCALE));
  }
  static TH_INLINE uint8_t scale(float largest, float factor, bool is_second) {
    fp8 scales[LANES];
    store(scales, splat(largest / (is_second ? 4 : LARGEST_FP4) / factor));
    return scales[0].bits;
  }
  static TH_INLINE f32x16 worth(uint8_t scale, float factor) {
    return widen(u8x16{} + scale) * factor;
  }
};

// Up to 2 numbers are 0.5 apart, up to 4 they are 1, and the others 2. A negative one stays so.
TH_INLINE f32x16 nearest_fp4(f32x16 x, f32x16 scale) {
  x = x / select(scale == 0.0f, splat(1), scale);
  f32x16 size = max(x, -x);
  size = select(size > LARGEST_FP4, splat(LARGEST_FP4), size);
  const f32x16 step = select(size < 2.0f, splat(0.5f), select(size < 4.0f, splat(1), splat(2)));
  size = (size + step * TO_INTEGER) - step * TO_INTEGER;
  return select(x < 0.0f, -size, size);
}

TH_INLINE u32x16 fp4_codes(f32x16 x) {
  const u32x16 sign = bit_cast<u32x16>(x) >> 31;
  const f32x16 size = max(x, -x);
  const f32x16 code =
      select(size < 2.0f, size * 2.0f, select(size < 4.0f, size + 2.0f, size * 0.5f + 4.0f));
  return bit_cast<u32x16>(convert<i32x16>(code)) + (sign << 3);
}

// The codes of a group; what is returned is its scale.
template <typename Format>
TH_INLINE uint8_t quantize_fp4(const f32x16* x, float factor, u32x16* codes) {
  f32x16 largest = {};  // of zeros it stays 0, not -0
  for (int v = 0; v < Format::VECTORS; ++v) largest = max(max(x[v], -x[v]), largest);
  const float top = max(largest);
  uint8_t scales[2];
  float errors[2];
  for (const int i : {0, 1}) {
    scales[i] = Format::scale(top, factor, i);
    const f32x16 scale = Format::worth(scales[i], factor);
    f32x16 squares = {};
    for (int v = 0; v < Format::VECTORS; ++v) {
      const f32x16 error = nearest_fp4(x[v], scale) * scale - x[v];
      squares = squares + error * error;
    }
    errors[i] = sum(squares);
  }
  const uint8_t best = scales[errors[1] < errors[0]];
  const f32x16 scale = Format::worth(best, factor);
  for (int v = 0; v < Format::VECTORS; ++v) codes[v] = fp4_codes(nearest_fp4(x[v], scale));
  return best;
}

template <typename Format, typename T>
void quantize_rows_to_fp4(const Call& call) {
  constexpr int V = Format::VECTORS;
  const int64_t groups = call.depth / (V * LANES);
#pragma omp parallel for num_threads(int(call.num_threads))
  for (int64_t row = 0; row < call.rows; ++row) {
    const T* from = static_cast<const T*>(call.weight) + row * call.depth;
    uint8_t* numbers = static_cast<uint8_t*>(call.numbers) + row * call.depth / 2;
    uint8_t* scales = static_cast<uint8_t*>(call.scales) + row * (groups + Format::FACTOR_BYTES);
    const float factor = Format::factor(from, call.depth);
    std::memcpy(scales + groups, &factor, Format::FACTOR_BYTES);
    for (int64_t i = 0; i < call.depth; i += 2 * LANES) {
      const f32x16 x[] = {load(from + i), load(from + i + LANES)};
      u32x16 codes[2];
      for (int v = 0; v < 2; v += V)
        *scales++ = quantize_fp4<Format>(x + v, factor, codes + v);
      const u32x16 pairs = every_second<false>(codes[0], codes[1]) |
                           every_second<true>(codes[0], codes[1]) << 4;
      const u8x16 bytes = convert<u8x16>(pairs);
      std::memcpy(numbers + i / 2, &bytes, sizeof(bytes));
    }
  }
}

template <typename T>
void run(const Call& call) {
  if (call.is_fp4)
    return call.group == LANES ? quantize_rows_to_fp4<Nvfp4, T>(call)
                               : quantize_rows_to_fp4<Mxfp4, T>(call);
  switch (call.group / LANES) {
    case 0: return quantize_rows_to_8_bits<T>(call);
    case 2: return quantize_rows<2, T>(call);
    case 4: return quantize_rows<4, T>(call);
    default: return quantize_rows<MOST_VECTORS, T>(call);
  }
}

}  // namespace
}  // namespace th

TH_EXPORT_CALL(quantize, th::Call) {
  call->is_bf16 ? th::run<th::bf16>(*call) : th::run<float>(*call);
  return true;
}
