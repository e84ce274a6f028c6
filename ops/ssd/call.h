// What both execution forms are given, and how they find their way in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace ssd {

using th::LANES;
using th::f32x16;

// The arguments of an op, in the order in which _cpu.py packs them.
struct Call {
  const void *q, *k, *v;  // [T, G, K], [T, G, K], [T, H, V] in the op's dtype
  const float *g, *dt;    // [T, H]; dt may be null
  const float* D;         // [H], or null
  float* state;           // [S, H, V, K]
  const int32_t* cu_seqlens;
  const int32_t* state_indices;
  const bool* has_initial_state;
  void* out;  // [T, H, V], contiguous
  int64_t num_tokens, num_seqs, num_groups, num_heads, k_dim, v_dim;
  int64_t q_stride, k_stride, v_stride, g_stride, dt_stride;  // from token to token
  int64_t chunk_size, num_threads;
  float scale;
  bool is_bf16;

  int64_t heads_per_group() const { return num_heads / num_groups; }
};
static_assert(offsetof(Call, is_bf16) == 24 * 8 + 4, "Call is packed by _cpu.py");

// One sequence's share of a call, with typed pointers for head h and group of heads i.
template <typename T>
struct Sequence {
  const Call& call;
  int64_t start, length, slot;
  bool has_initial_state;

  Sequence(const Call& call, int64_t n)
      : call(call),
        start(call.cu_seqlens[n]),
        length(call.cu_seqlens[n + 1] - start),
        slot(call.state_indices[n]),
        has_initial_state(call.has_initial_state[n]) {}

  const T* q(int64_t t, int64_t i) const {
    return (const T*)call.q + (start + t) * call.q_stride + i * call.k_dim;
  }
  const T* k(int64_t t, int64_t i) const {
    return (const T*)call.k + (start + t) * call.k_stride + i * call.k_dim;
  }
  const T* v(int64_t t, int64_t h) const {
    return (const T*)call.v + (start + t) * call.v_stride + h * call.v_dim;
  }
  float g(int64_t t, int64_t h) const { return call.g[(start + t) * call.g_stride + h]; }
  float dt(int64_t t, int64_t h) const {
    return call.dt ? call.dt[(start + t) * call.dt_stride + h] : 1.0f;
  }
  float D(int64_t h) const { return call.D ? call.D[h] : 0.0f; }
  T* out(int64_t t, int64_t h) const {
    return (T*)call.out + ((start + t) * call.num_heads + h) * call.v_dim;
  }
  float* state(int64_t h) const {
    return call.state + (slot * call.num_heads + h) * call.v_dim * call.k_dim;
  }
  void clear_out(int64_t h) const {
    for (int64_t t = 0; t < length; ++t) std::memset(out(t, h), 0, call.v_dim * sizeof(T));
  }
};

// Outputs of the tokens past the last sequence; to be called by all threads of a team.
template <typename T>
void clear_padding(const Call& call) {
  const int64_t row = call.num_heads * call.v_dim;
#pragma omp for schedule(static) nowait
  for (int64_t t = call.cu_seqlens[call.num_seqs]; t < call.num_tokens; ++t)
    std::memset((T*)call.out + t * row, 0, row * sizeof(T));
}

}  // namespace ssd
