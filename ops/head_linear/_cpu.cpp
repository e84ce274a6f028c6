// Tokens by the weight of each head: see README.md.
#include <algorithm>
#include <vector>

#include "call.h"
#include "gemm.h"

namespace th {
namespace {

// Strides in elements.
TH_CALL(Call,
  const void *x, *weight, *bias;  // [T, H, K], [H, N, K], [H, N] or null, in the op's dtype
  void* out;                      // [T, H, N], contiguous
  int64_t T, H, N, K, x_token, x_head, weight_head, weight_row, weight_column, is_bf16;
  int64_t num_threads;
);

constexpr int64_t TOKENS = 64;  // that a thread takes at once

// The form of gemm.h for many rows, however few they are: a row has the bits that it has alone.
template <typename T>
void run(const Call& call) {
  const int64_t blocks = (call.T + TOKENS - 1) / TOKENS;
#pragma omp parallel num_threads(int(call.num_threads))
  {
    std::vector<float> sums(std::min(TOKENS, call.T) * call.N);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < call.H * blocks; ++item) {
      const int64_t h = item / blocks, first = item % blocks * TOKENS;
      const int count = int(std::min(TOKENS, call.T - first));
      const T* x = static_cast<const T*>(call.x) + first * call.x_token + h * call.x_head;
      const T* weight = static_cast<const T*>(call.weight) + h * call.weight_head;
      detail::gemm(count, int(call.N), int(call.K), detail::Strided<T>{x, call.x_token, 1},
                   detail::Strided<T>{weight, call.weight_row, call.weight_column}, sums.data(),
                   call.N, 0.0f);
      const T* bias = call.bias ? static_cast<const T*>(call.bias) + h * call.N : nullptr;
      for (int64_t t = 0; t < count; ++t) {
        T* out = static_cast<T*>(call.out) + ((first + t) * call.H + h) * call.N;
        for_lanes(call.N, [&](int64_t i, int n) TH_LAMBDA {
          auto sum = load(sums.data() + t * call.N + i, n);
          if (bias) sum += load(bias + i, n);
          store(out + i, sum, n);
        });
      }
    }
  }
}

}  // namespace
}  // namespace th

TH_EXPORT_CALL(head_linear, th::Call) {
  call->is_bf16 ? th::run<th::bf16>(*call) : th::run<float>(*call);
  return true;
}
