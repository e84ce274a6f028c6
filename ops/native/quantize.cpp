// Weights to numbers of 8 bits, or of 4 in groups, and their scales: see ops/formats/integers.py.
#include "call.h"
#include "simd.h"

namespace th {
namespace {

TH_CALL(Call,
  const void* weight;  // [rows, depth] of float or bf16
  void* numbers;       // [rows, depth], or [rows, depth / 2] of 4 bits
  float* scales;       // [rows], or [rows, depth / group]
  int64_t rows, depth, group, is_bf16, num_threads;  // group: 0 of 8 bits
);

constexpr int MOST_VECTORS = 128 / LANES;
constexpr float LARGEST_INT8 = 127, LEAST = -8, LARGEST = 7;
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
      call.scales[i] = quantize_group<V>(x, static_cast<uint8_t*>(call.numbers) + i * V * LANES / 2);
    }
}

template <typename T>
void quantize_rows_to_8_bits(const Call& call) {
#pragma omp parallel for num_threads(int(call.num_threads))
  for (int64_t row = 0; row < call.rows; ++row) {
    const T* x = static_cast<const T*>(call.weight) + row * call.depth;
    int8_t* to = static_cast<int8_t*>(call.numbers) + row * call.depth;
    f32x16 furthest = {};
    for_lanes(call.depth, [&](int64_t i, int n) TH_LAMBDA {
      const f32x16 lanes = load(x + i, n);
      furthest = max(furthest, max(lanes, -lanes));
    });
    const float largest = max(furthest) / LARGEST_INT8, scale = largest == 0 ? 1 : largest;
    call.scales[row] = scale;
    for_lanes(call.depth, [&](int64_t i, int n) TH_LAMBDA {
      const f32x16 nearest = (load(x + i, n) / scale + TO_INTEGER) - TO_INTEGER;
      const i8x16 bytes = convert<i8x16>(convert<i32x16>(nearest));
      std::memcpy(to + i, &bytes, n);
    });
  }
}

template <typename T>
void run(const Call& call) {
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
