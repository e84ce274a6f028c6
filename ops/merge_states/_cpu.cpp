// Two attention results joined in one pass over memory.
#include <algorithm>

#include "softmax.h"

namespace th {
namespace {

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
void merge(const T* o_a, const float* lse_a, const T* o_b, const float* lse_b, T* out, float* lse,
           int64_t rows, int64_t dim, int num_threads) {
#pragma omp parallel for num_threads(num_threads)
  for (int64_t row = 0; row < rows; ++row) {
    const Weights weights = weigh(lse_a[row], lse_b[row]);
    lse[row] = weights.lse;
    for (int64_t i = row * dim; i < (row + 1) * dim; i += LANES)
      store(out + i, load(o_a + i) * weights.a + load(o_b + i) * weights.b);
  }
}

}  // namespace
}  // namespace th

extern "C" TH_EXPORT void th_merge_states_f32(const float* o_a, const float* lse_a,
                                              const float* o_b, const float* lse_b, float* out,
                                              float* lse, int64_t rows, int64_t dim,
                                              int64_t num_threads) {
  th::merge(o_a, lse_a, o_b, lse_b, out, lse, rows, dim, int(num_threads));
}

extern "C" TH_EXPORT void th_merge_states_bf16(const th::bf16* o_a, const float* lse_a,
                                               const th::bf16* o_b, const float* lse_b,
                                               th::bf16* out, float* lse, int64_t rows,
                                               int64_t dim, int64_t num_threads) {
  th::merge(o_a, lse_a, o_b, lse_b, out, lse, rows, dim, int(num_threads));
}
