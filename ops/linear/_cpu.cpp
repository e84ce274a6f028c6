// Sibling linears of one input with few rows: see README.md and skinny.h.
#include <atomic>

#include "skinny.h"

namespace {

// The arguments of one call, as the 64-bit integers that _cpu.py packs in this order.
struct Call {
  int64_t dtype_is_bf16, num_threads, M, K, x, ldx, y, ldy, num_weights;
};
struct Group {
  int64_t weight, bias, rows;
};

constexpr int64_t CHUNK_BYTES = 128 << 10;  // of weights: what a thread takes at a time

template <typename T>
void multiply_chunk(const th::PackedRows<T>& x, const Group& group, int64_t first, int64_t rows,
                    T* y, int64_t ldy) {
  const T* W = reinterpret_cast<const T*>(group.weight) + first * x.depth();
  const T* bias = reinterpret_cast<const T*>(group.bias);
  if (bias) bias += first;
  th::multiply_rows(x, W, x.depth(), rows, [&](int m, int64_t n, const float* values, int count) {
    for (int i = 0; i < count; ++i) {
      const float b = bias ? th::to_float(bias[n + i]) : 0.0f;
      y[m * ldy + first + n + i] = th::from_float<T>(values[i] + b);
    }
  });
}

template <typename T>
void linear(const Call& call, const Group* groups) {
  const T* x = reinterpret_cast<const T*>(call.x);
  T* y = reinterpret_cast<T*>(call.y);
  const int64_t wanted = CHUNK_BYTES / (call.K * int64_t(sizeof(T)) + 1);
  const int64_t chunk = std::max<int64_t>(wanted / th::LANES, 1) * th::LANES;
  std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(int(call.num_threads))
  {
    static thread_local th::PackedRows<T> packed;
    packed.pack(int(call.M), call.K, x, call.ldx);
    int64_t mine = taken++, index = 0, column = 0;
    for (int64_t g = 0; g < call.num_weights; ++g) {
      for (int64_t first = 0; first < groups[g].rows; first += chunk, ++index) {
        if (index != mine) continue;
        const int64_t rows = std::min(chunk, groups[g].rows - first);
        multiply_chunk(packed, groups[g], first, rows, y + column, call.ldy);
        mine = taken++;
      }
      column += groups[g].rows;
    }
  }
}

}  // namespace

extern "C" TH_EXPORT void th_linear(const int64_t* arguments) {
  const Call& call = *reinterpret_cast<const Call*>(arguments);
  const Group* groups = reinterpret_cast<const Group*>(arguments + sizeof(Call) / sizeof(int64_t));
  call.dtype_is_bf16 ? linear<th::bf16>(call, groups) : linear<float>(call, groups);
}
