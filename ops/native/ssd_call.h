// What both execution forms are given, and how they find their way in it.
#pragma once

#include <cstdint>

#include "call.h"
#include "recurrent_call.h"
#include "simd.h"

namespace th::ssd {

using th::LANES;
using th::f32x16;

TH_CALL(Call,
  const void *q, *k, *v;  // [T, G, K], [T, G, K], [T, H, V] in the op's dtype
  const float *g, *dt;    // [T, H]; dt may be null
  const float* D;         // [H], or null
  float* state;           // [S, H, V, K]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  void* out;  // [T, H, V], contiguous
  int64_t num_tokens, num_seqs, num_slots, num_k_heads, num_v_heads, k_dim, v_dim;  // G, H, K, V
  int64_t q_stride, k_stride, v_stride, g_stride, dt_stride;  // from token to token
  int64_t chunk_size, sums_decays, is_bf16, num_threads;
  double scale;
);

// One sequence's share of a call. A key head is what Mamba2 calls a group.
template <typename T>
struct Sequence : th::RecurrentSequence<T, Call> {
  using th::RecurrentSequence<T, Call>::RecurrentSequence;

  float g(int64_t t, int64_t h) const {
    return this->call.g[(this->start + t) * this->call.g_stride + h];
  }
  float dt(int64_t t, int64_t h) const {
    const Call& call = this->call;
    return call.dt ? call.dt[(this->start + t) * call.dt_stride + h] : 1.0f;
  }
  float D(int64_t h) const { return this->call.D ? this->call.D[h] : 0.0f; }
};

}  // namespace th::ssd
