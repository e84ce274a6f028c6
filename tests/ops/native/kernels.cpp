// The shared headers behind a C interface, for test_headers.py.
#include "gemm.h"
#include "simd.h"

using th::bf16;

#define GEMM(form, suffix, TA, TB)                                                              \
  extern "C" TH_EXPORT void form##_##suffix(int M, int N, int K, const TA* A, int64_t lda,      \
                                            const TB* B, int64_t ldb, float* C, int64_t ldc,    \
                                            float keep) {                                       \
    th::form(M, N, K, A, lda, B, ldb, C, ldc, keep);                                            \
  }
#define FORMS(suffix, TA, TB)   \
  GEMM(gemm_nt, suffix, TA, TB) \
  GEMM(gemm_nn, suffix, TA, TB) \
  GEMM(gemm_tn, suffix, TA, TB)
FORMS(ff, float, float)
FORMS(fb, float, bf16)
FORMS(bb, bf16, bf16)

#define ELEMENTWISE(name, TX, TY)                                            \
  extern "C" TH_EXPORT void map_##name(const TX* x, TY* y, int64_t n) {      \
    for (int64_t i = 0; i < n; i += th::LANES) {                             \
      const int left = int(n - i < th::LANES ? n - i : th::LANES);           \
      th::store(y + i, apply_##name(th::load(x + i, left)), left);           \
    }                                                                        \
  }
static th::f32x16 apply_exp(th::f32x16 x) { return th::exp(x); }
static th::f32x16 apply_sigmoid(th::f32x16 x) { return th::sigmoid(x); }
static th::f32x16 apply_silu(th::f32x16 x) { return th::silu(x); }
static th::f32x16 apply_round(th::f32x16 x) { return x; }
static th::f32x16 apply_widen(th::f32x16 x) { return x; }
ELEMENTWISE(exp, float, float)
ELEMENTWISE(sigmoid, float, float)
ELEMENTWISE(silu, float, float)
ELEMENTWISE(round, float, bf16)
ELEMENTWISE(widen, bf16, float)

extern "C" TH_EXPORT float dot_fb(const float* a, const bf16* b, int64_t n) {
  return th::dot(a, b, n);
}

// y = the transpose of x, and sums = the sum of each row of x; x is [16, 16].
extern "C" TH_EXPORT void sixteen(const float* x, float* y, float* sums) {
  th::f32x16 rows[th::LANES], copy[th::LANES];
  for (int i = 0; i < th::LANES; ++i) rows[i] = copy[i] = th::load(x + i * th::LANES);
  th::transpose16(rows);
  for (int i = 0; i < th::LANES; ++i) th::store(y + i * th::LANES, rows[i]);
  th::store(sums, th::sum16(copy));
}
