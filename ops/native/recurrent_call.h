// How the kernels of a recurrent op find their way in a call's tensors.
//
// A Call (call.h) has at least these fields:
//
//   const void *q, *k, *v;                   [T, H, K], [T, H, K], [T, HV, V] in the op's dtype
//   float* state;                            [S, HV, V, K]
//   const int32_t *cu_seqlens, *initial_indices, *state_indices;
//   void* out;                               [T, HV, V], contiguous
//   int64_t num_tokens, num_seqs, num_slots, num_k_heads, num_v_heads, k_dim, v_dim;
//   int64_t q_stride, k_stride, v_stride;    from token to token
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"

namespace th {

// Memory of a thread for the states that are stored nowhere; taken when there is one.
class Spare {
 public:
  float* take(int64_t size) {
    if (int64_t(floats_.size()) < size) floats_.resize(size);
    return floats_.data();
  }

 private:
  std::vector<float> floats_;
};

// One sequence's share of a call, with typed pointers for value head j and key head h.
template <typename T, typename Call>
struct RecurrentSequence {
  const Call& call;
  int64_t start, length;
  int64_t initial, slot;  // where the state is read and where it is left; 0: nowhere

  RecurrentSequence(const Call& call, int64_t n)
      : call(call),
        start(call.cu_seqlens[n]),
        length(call.cu_seqlens[n + 1] - start),
        initial(call.initial_indices[n]),
        slot(call.state_indices[n]) {}

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
  // What value head j starts from, or null: from zeros.
  const float* initial_state(int64_t j) const { return initial ? state(initial, j) : nullptr; }
  // Where its state is left, or null: nowhere.
  float* final_state(int64_t j) const { return slot ? state(slot, j) : nullptr; }
  // Its initial state where it may be advanced in place: in its slot, or in `spare`.
  float* open_state(int64_t j, Spare& spare) const {
    const int64_t size = call.v_dim * call.k_dim;
    float* opened = slot ? state(slot, j) : spare.take(size);
    if (!initial)
      std::fill(opened, opened + size, 0.0f);
    else if (initial != slot)
      std::memcpy(opened, state(initial, j), size * sizeof(float));
    return opened;
  }
  int64_t key_head(int64_t j) const { return j / (call.num_v_heads / call.num_k_heads); }

 private:
  float* state(int64_t at, int64_t j) const {
    return call.state + (at * call.num_v_heads + j) * call.v_dim * call.k_dim;
  }
};

// Whether sequence n starts from a slot that another one leaves its state in: it might find either.
template <typename Call>
bool reads_what_is_written(const Call& call, int64_t n) {
  const int32_t initial = call.initial_indices[n];
  if (initial == 0 || initial == call.state_indices[n]) return false;
  if (call.cu_seqlens[n] == call.cu_seqlens[n + 1]) return false;
  for (int64_t m = 0; m < call.num_seqs; ++m)
    if (call.state_indices[m] == initial && call.cu_seqlens[m] < call.cu_seqlens[m + 1]) return true;
  return false;
}

// Whether all that a call reads and writes is there; the launcher says what is not.
template <typename Call>
bool indices_are_valid(const Call& call) {
  if (call.cu_seqlens[0] != 0 || call.cu_seqlens[call.num_seqs] > call.num_tokens) return false;
  for (int64_t n = 0; n < call.num_seqs; ++n) {
    if (call.cu_seqlens[n + 1] < call.cu_seqlens[n]) return false;
    for (const int32_t* indices : {call.initial_indices, call.state_indices})
      if (indices[n] < 0 || indices[n] >= call.num_slots) return false;
    if (reads_what_is_written(call, n)) return false;
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
