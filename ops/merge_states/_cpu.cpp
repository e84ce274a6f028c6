// Two attention results joined in one pass over memory.
#include <algorithm>

#include "call.h"
#include "softmax.h"

namespace th {
namespace {

TH_CALL(Call,
  const void* o_a;  // [rows, dim] in the op's dtype, as are o_b and out
  const float* lse_a;
  const void* o_b;
  const float* lse_b;
  void* out;
  float* lse;
  int64_t rows, dim, is_bf16, num_threads;
);

struct Weights {
  float a, b, lse;
};

// Of the two results of a row; where neither has seen a key, both weights are 0 and lse is -inf.
inline Weights weigh(float lse_a, float lse_b) {
  const float largest = std::max(lse_a, lse_b);
  if (largest == NO_KEY) return {0, 0, NO_KEY};
  const float a = std::exp(lse_a - largest), b = std::exp(lse_b - largest);
  return {a / (a + b), b / (a + b), largest + std::log(a + b)};
}

template <typename T>
void merge(const Call& call) {
  const T *o_a = static_cast<const T*>(call.o_a), *o_b = static_cast<const T*>(call.o_b);
  T* out = static_cast<T*>(call.out);
#pragma omp parallel for num_threads(int(call.num_threads))
  for (int64_t row = 0; row < call.rows; ++row) {
    const Weights weights = weigh(call.lse_a[row], call.lse_b[row]);
    call.lse[row] = weights.lse;
    for (int64_t i = row * call.dim; i < (row + 1) * call.dim; i += LANES)
      store(out + i, fma(load(o_a + i), splat(weights.a), load(o_b + i) * weights.b));
  }
}

}  // namespace
}  // namespace th

TH_EXPORT_CALL(merge_states, th::Call) {
  call->is_bf16 ? th::merge<th::bf16>(*call) : th::merge<float>(*call);
  return true;
}
