// How the kernels of a recurrent op find their way in a call's tensors.
//
// A Call (call.h) has at least these fields:
//
//   const void *q, *k, *v;                   [T, H, K], [T, H, K], [T, HV, V] in the op's dtype
//   float* state;                            [S, HV, V, K]
//   const int32_t *cu_seqlens, *state_indices;  const bool* has_initial_state;
//   void* out;                               [T, HV, V], contiguous
//   int64_t num_tokens, num_seqs, num_slots, num_k_heads, num_v_heads, k_dim, v_dim;
//   int64_t q_stride, k_stride, v_stride;    from token to token
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace th {

// One sequence's share of a call, with typed pointers for value head j and key head h.
template <typename T, typename Call>
struct RecurrentSequence {
  const Call& call;
  int64_t start, length, slot;
  bool has_initial_state;

  RecurrentSequence(const Call& call, int64_t n)
      : call(call),
        start(call.cu_seqlens[n]),
        length(call.cu_seqlens[n + 1] - start),
        slot(call.state_indices[n]),
        has_initial_state(call.has_initial_state[n]) {}

  const T* q(int64_t t, int64_t h) const {
    return (const T*)call.q + (start + t) * call.q_stride + h * call.k_dim;
  }
  const T* k(int64_t t, int64_t h) const {
    return (const T*)call.k + (start + t) * call.k_stride + h * call.k_dim;
  }
  const T* v(int64_t t, int64_t j) const {
    return (const T*)call.v + (start + t) * call.v_stride + j * call.v_dim;
  }
  T* out(int64_t t, int64_t j) const {
    return (T*)call.out + ((start + t) * call.num_v_heads + j) * call.v_dim;
  }
  float* state(int64_t j) const {
    return call.state + (slot * call.num_v_heads + j) * call.v_dim * call.k_dim;
  }
  int64_t key_head(int64_t j) const { return j / (call.num_v_heads / call.num_k_heads); }
  void clear_out(int64_t j) const {
    for (int64_t t = 0; t < length; ++t) std::memset(out(t, j), 0, call.v_dim * sizeof(T));
  }
};

// Whether all that a call reads and writes is there; the launcher says what is not.
template <typename Call>
bool indices_are_valid(const Call& call) {
  if (call.cu_seqlens[0] != 0 || call.cu_seqlens[call.num_seqs] > call.num_tokens) return false;
  for (int64_t n = 0; n < call.num_seqs; ++n) {
    if (call.cu_seqlens[n + 1] < call.cu_seqlens[n]) return false;
    if (call.state_indices[n] < 0 || call.state_indices[n] >= call.num_slots) return false;
  }
  return true;
}

// Outputs of the tokens past the last sequence; to be called by all threads of a team.
template <typename T, typename Call>
void clear_padding(const Call& call) {
  const int64_t row = call.num_v_heads * call.v_dim;
#pragma omp for schedule(static) nowait
  for (int64_t t = call.cu_seqlens[call.num_seqs]; t < call.num_tokens; ++t)
    std::memset((T*)call.out + t * row, 0, row * sizeof(T));
}

}  // namespace th
