// Backward of a recurrence with a few state numbers a channel: a thread takes some channels through
// all sequences, so that sums over tokens have one order, whatever the number of threads.
//
// It walks the tokens of a sequence as the forward does and keeps the state before each, then walks
// back. A Call has cu_seqlens, num_seqs, num_tokens and num_threads. A Rule is one vector of channels:
//
//   STATES, SUMS                            numbers of a state, and gradients that are sums over tokens
//   State                                   with h.keep(float*) and State::kept(float*)
//   Gradient                                of a state
//   prepare(call, head, first, n)           takes n channels of a head from `first` on
//   open(seq) -> State                      that a sequence starts from
//   advance(t, is_first, h) -> State        after token t
//   close(seq, h) -> Gradient               of the state after the last token, h
//   back(t, is_first, h, grad, sums)        to before token t, where the state is h
//   leave(seq, h, grad)                     stores that of the state that a sequence starts from, h
//   finish(sums)                            stores the sums
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "aligned_floats.h"
#include "denormals.h"
#include "offsets.h"
#include "simd.h"

namespace th {

constexpr int64_t SUMMED = 64;  // tokens: their sums are short, so that rounding of long ones is small

template <typename Call>
int64_t longest_sequence(const Call& call) {
  int64_t longest = 0;
  for (int64_t n = 0; n < call.num_seqs; ++n)
    longest = std::max<int64_t>(longest, call.cu_seqlens[n + 1] - call.cu_seqlens[n]);
  return longest;
}

// Some channels of one sequence, and what is kept of its tokens.
template <typename Rule, int VECTORS>
struct BothWays {
  using State = typename Rule::State;
  using Gradient = typename Rule::Gradient;

  const Rule (&rules)[VECTORS];
  int64_t seq, begin, end;
  float* kept;

  float* place(int64_t t, int v) const {
    return kept + ((t - begin) * VECTORS + v) * Rule::STATES * LANES;
  }

  TH_NOINLINE void forward(State (&h)[VECTORS]) const {
    for (int v = 0; v < VECTORS; ++v) h[v] = rules[v].open(seq);
    for (int64_t t = begin; t < end; ++t)
      for (int v = 0; v < VECTORS; ++v) {
        h[v].keep(place(t, v));
        h[v] = rules[v].advance(t, t == begin, h[v]);
      }
  }

  // Tokens from `last` - 1 back to `first`.
  TH_NOINLINE void back(int64_t first, int64_t last, Gradient (&grads)[VECTORS],
                        f32x16 (&totals)[VECTORS][Rule::SUMS]) const {
    f32x16 sums[VECTORS][Rule::SUMS] = {};
    for (int64_t t = last - 1; t >= first; --t)
      for (int v = 0; v < VECTORS; ++v)
        rules[v].back(t, t == begin, State::kept(place(t, v)), grads[v], sums[v]);
    for (int v = 0; v < VECTORS; ++v)
      for (int i = 0; i < Rule::SUMS; ++i) totals[v][i] += sums[v][i];
  }
};

// VECTORS * LANES channels of a head from `first` on, or n of one vector, through all sequences.
template <typename Rule, int VECTORS, typename Call>
void walk_both_ways(const Call& call, int64_t head, int64_t first, int n, float* kept) {
  Rule rules[VECTORS];
  f32x16 totals[VECTORS][Rule::SUMS] = {};
  for (int v = 0; v < VECTORS; ++v) rules[v].prepare(call, head, first + v * LANES, n);
  for (int64_t seq = 0; seq < call.num_seqs; ++seq) {
    const int64_t begin = call.cu_seqlens[seq], end = call.cu_seqlens[seq + 1];
    const BothWays<Rule, VECTORS> walk{rules, seq, begin, end, kept};
    typename Rule::State h[VECTORS];
    typename Rule::Gradient grads[VECTORS];
    walk.forward(h);
    for (int v = 0; v < VECTORS; ++v) grads[v] = rules[v].close(seq, h[v]);
    for (int64_t last = end; last > begin; last -= std::min(SUMMED, last - begin))
      walk.back(std::max(begin, last - SUMMED), last, grads, totals);
    for (int v = 0; v < VECTORS; ++v) rules[v].leave(seq, rules[v].open(seq), grads[v]);
  }
  for (int v = 0; v < VECTORS; ++v) rules[v].finish(totals[v]);
}

// All channels, those of heads of head_dim.
template <typename Rule, int VECTORS, typename Call>
void walk_channels(const Call& call, int64_t num_heads, int64_t head_dim) {
  constexpr int64_t WHOLE = VECTORS * LANES;
  const int64_t blocks = (head_dim + WHOLE - 1) / WHOLE, longest = longest_sequence(call);
#pragma omp parallel num_threads(call.num_threads)
  {
    const DenormalsAreZero denormals;
    AlignedFloats kept(longest * Rule::STATES * WHOLE);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < num_heads * blocks; ++item) {
      const int64_t head = item / blocks, first = item % blocks * WHOLE;
      const int64_t size = std::min(WHOLE, head_dim - first);
      if (size == WHOLE) {
        walk_both_ways<Rule, VECTORS>(call, head, first, LANES, kept.data());
        continue;
      }
      for (int64_t c = 0; c < size; c += LANES)
        walk_both_ways<Rule, 1>(call, head, first + c, int(std::min<int64_t>(LANES, size - c)),
                                kept.data());
    }
  }
}

// Clears the rows of the tokens past the last sequence.
template <typename T, typename Call>
void clear_padding(const Call& call, T* rows, int64_t size) {
  const int64_t end = call.cu_seqlens[call.num_seqs];
  std::fill_n(rows + end * size, (call.num_tokens - end) * size, T());
}

}  // namespace th
