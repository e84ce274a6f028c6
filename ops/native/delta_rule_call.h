// What both execution forms of a delta rule are given, and how they find their way in it.
#pragma once

#include <cmath>
#include <cstdint>

#include "call.h"
#include "recurrent_call.h"
#include "simd.h"

namespace th::delta {

TH_CALL(Call,
  const void *q, *k, *v;  // [T, H, K], [T, H, K], [T, HV, V] in the op's dtype
  const float *g, *beta;  // [T, HV], and for g [T, HV, K] where channels decay on their own
  float* state;           // [S, HV, V, K]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  void* out;  // [T, HV, V], contiguous
  int64_t num_tokens, num_seqs, num_slots, num_k_heads, num_v_heads, k_dim, v_dim;
  int64_t q_stride, k_stride, v_stride, g_stride, beta_stride;  // from token to token
  int64_t qk_l2norm, chunk_size, is_bf16, num_threads;
  double scale;
);

// One sequence's share of a call; g is that of all heads.
template <typename T>
struct Sequence : RecurrentSequence<T, Call> {
  using RecurrentSequence<T, Call>::RecurrentSequence;

  const float* g(int64_t t) const {
    return this->call.g + (this->start + t) * this->call.g_stride;
  }
  float beta(int64_t t, int64_t j) const {
    return this->call.beta[(this->start + t) * this->call.beta_stride + j];
  }
};

// to = from * factor, where factor is `scale`, over the length of `from` when `normalize`.
template <typename T>
TH_INLINE void load_key(const T* from, int64_t k_dim, bool normalize, float scale, float* to) {
  const float norm = normalize ? std::sqrt(squared_norm(from, k_dim) + 1e-6f) : 1.0f;
  const f32x16 factor = splat(scale / norm);
  for_lanes(k_dim, [&](int64_t i, int n) TH_LAMBDA { store(to + i, load(from + i, n) * factor, n); });
}

}  // namespace th::delta
