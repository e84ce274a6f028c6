// Backward of a recurrence with a few state numbers a channel: a thread takes some channels through
// all sequences, so that sums over tokens have one order, whatever the number of threads.
//
// It walks the tokens of a sequence as the forward does and keeps the state before each, then walks
// back. A Call has cu_seqlens, num_seqs, num_tokens and num_threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "aligned_floats.h"
#include "denormals.h"
#include "simd.h"

namespace th {

constexpr int64_t SUMMED = 64;  // tokens: their sums are short, so that rounding of long ones is small

template <typename Call>
bool offsets_are_valid(const Call& call) {
  if (call.cu_seqlens[0] != 0 || call.cu_seqlens[call.num_seqs] > call.num_tokens) return false;
  for (int64_t n = 0; n < call.num_seqs; ++n)
    if (call.cu_seqlens[n + 1] < call.cu_seqlens[n]) return false;
  return true;
}

template <typename Call>
int64_t longest_sequence(const Call& call) {
  int64_t longest = 0;
  for (int64_t n = 0; n < call.num_seqs; ++n)
    longest = std::max<int64_t>(longest, call.cu_seqlens[n + 1] - call.cu_seqlens[n]);
  return longest;
}

// Takes all channels, heads of head_dim, through Walk<VECTORS>::run(call, head, first, n, kept): of a
// head VECTORS * LANES from `first` on, or n of one vector. `kept` has STATES numbers for each token.
template <template <int> class Walk, int VECTORS, int STATES, typename Call>
void walk_channels(const Call& call, int64_t num_heads, int64_t head_dim) {
  constexpr int64_t WHOLE = VECTORS * LANES;
  const int64_t blocks = (head_dim + WHOLE - 1) / WHOLE, longest = longest_sequence(call);
#pragma omp parallel num_threads(call.num_threads)
  {
    const DenormalsAreZero denormals;
    AlignedFloats kept(longest * STATES * WHOLE);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_heads * blocks; ++item) {
      const int64_t head = item / blocks, first = item % blocks * WHOLE;
      const int64_t size = std::min(WHOLE, head_dim - first);
      if (size == WHOLE) {
        Walk<VECTORS>::run(call, head, first, LANES, kept.data());
        continue;
      }
      for (int64_t c = 0; c < size; c += LANES)
        Walk<1>::run(call, head, first + c, int(std::min<int64_t>(LANES, size - c)), kept.data());
    }
  }
}

// Clears the rows of the tokens past the last sequence.
template <typename T, typename Call>
void clear_padding(const Call& call, T* rows, int64_t size) {
  const int64_t end = call.cu_seqlens[call.num_seqs];
  std::memset(rows + end * size, 0, (call.num_tokens - end) * size * sizeof(T));
}

}  // namespace th
