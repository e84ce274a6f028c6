// Adapters of rows: inner products of each row with its adapter's first factors, then tiles of
// columns, to which multiples of the second factors' rows are added.
#include <algorithm>
#include <cstring>
#include <vector>

#include "call.h"
#include "simd.h"
#include "threads.h"

namespace th {
namespace {

// Strides in elements.
TH_CALL(Call,
  const void *base, *x, *a, *b;                // [T, N], [T, K], [S, P, R, K], [S, R, N]
  const int32_t *ranks, *starts, *slots;       // [S, P], [P + 1], [T]
  void* out;                                   // [T, N], contiguous
  int64_t T, N, K, S, P, R, base_stride, x_stride, is_bf16, num_threads;
);

constexpr int64_t TILE = 512, ROWS = 64;  // columns and rows that a thread takes at once
constexpr int VECTORS = 4;                // that are summed at once

bool are_in_range(const Call& call) {
  for (int64_t t = 0; t < call.T; ++t)
    if (call.slots[t] < 0 || call.slots[t] > call.S) return false;
  for (int64_t i = 0; i < call.S * call.P; ++i)
    if (call.ranks[i] < 0 || call.ranks[i] > call.R) return false;
  for (int64_t p = 0; p < call.P; ++p)
    if (call.starts[p] > call.starts[p + 1]) return false;
  return call.starts[0] == 0 && call.starts[call.P] == call.N;
}

// The rows in the order of their slots: those of one adapter read its factors from the cache.
std::vector<int64_t> by_slot(const Call& call) {
  std::vector<int64_t> next(call.S + 2), order(call.T);
  for (int64_t t = 0; t < call.T; ++t) ++next[call.slots[t] + 1];
  for (int64_t slot = 0; slot <= call.S; ++slot) next[slot + 1] += next[slot];
  for (int64_t t = 0; t < call.T; ++t) order[next[call.slots[t]]++] = t;
  return order;
}

// out = base + the sum of h[r] * b[r], of N vectors of which the last has n lanes. The base comes
// last: beside a large one, each product would be rounded to its digits.
template <int N, typename T>
TH_INLINE void add(const T* base, const float* h, int rank, const T* b, int64_t stride, T* out,
                   int n) {
  f32x16 sums[N] = {};
  for (int r = 0; r < rank; ++r, b += stride) {
    const f32x16 factor = splat(h[r]);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i)
      sums[i] = fma(factor, load(b + i * LANES, i + 1 < N ? LANES : n), sums[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    const int lanes = i + 1 < N ? LANES : n;
    store(out + i * LANES, load(base + i * LANES, lanes) + sums[i], lanes);
  }
}

template <typename T>
void run(const Call& call) {
  const int64_t parts = call.P, most = call.R;
  std::vector<float> inner(call.T * parts * most);
  const std::vector<int64_t> order = by_slot(call);
  const int64_t tiles = (call.N + TILE - 1) / TILE, blocks = (call.T + ROWS - 1) / ROWS;
  const int64_t read = most * (parts * call.K + call.N) * std::min(call.T, call.S);
  const int threads = threads_for((read + call.T * call.N) * int64_t(sizeof(T)), call.num_threads);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 4)
    for (int64_t item = 0; item < call.T * parts; ++item) {
      const int64_t t = order[item % call.T], p = item / call.T, slot = call.slots[t] - 1;
      if (slot < 0) continue;
      const T* x = static_cast<const T*>(call.x) + t * call.x_stride;
      const T* a = static_cast<const T*>(call.a) + (slot * parts + p) * most * call.K;
      for (int r = 0; r < call.ranks[slot * parts + p]; ++r)
        inner[(t * parts + p) * most + r] = dot(x, a + r * call.K, call.K);
    }
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < tiles * blocks; ++item) {
      const int64_t first = item % tiles * TILE, last = std::min(first + TILE, call.N);
      const int64_t end = std::min((item / tiles + 1) * ROWS, call.T);
      for (int64_t place = item / tiles * ROWS; place < end; ++place) {
        const int64_t t = order[place];
        const T* base = static_cast<const T*>(call.base) + t * call.base_stride;
        T* out = static_cast<T*>(call.out) + t * call.N;
        const int64_t slot = call.slots[t] - 1;
        for (int64_t p = 0; p < parts; ++p) {
          int64_t c = std::max<int64_t>(first, call.starts[p]);
          const int64_t stop = std::min<int64_t>(last, call.starts[p + 1]);
          const int rank = slot < 0 ? 0 : call.ranks[slot * parts + p];
          if (c >= stop) continue;
          if (!rank) {
            std::memcpy(out + c, base + c, (stop - c) * sizeof(T));
            continue;
          }
          const T* b = static_cast<const T*>(call.b) + slot * most * call.N;
          const float* h = inner.data() + (t * parts + p) * most;
          for (; c + VECTORS * LANES <= stop; c += VECTORS * LANES)
            add<VECTORS>(base + c, h, rank, b + c, call.N, out + c, LANES);
          for (; c < stop; c += LANES)
            add<1>(base + c, h, rank, b + c, call.N, out + c, int(std::min<int64_t>(LANES, stop - c)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace th

TH_EXPORT_CALL(lora, th::Call) {
  if (!th::are_in_range(*call)) return false;
  call->is_bf16 ? th::run<th::bf16>(*call) : th::run<float>(*call);
  return true;
}
