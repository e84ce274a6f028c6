// Keys of complete blocks, on a CPU: a thread takes tokens, and pools where one ends a block. The
// states are written after all outputs, since a thread may still read what another would overwrite.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "recurrent_call.h"
#include "simd.h"

namespace pooling {

using th::f32x16;

TH_CALL(Call,
  const void *keys, *gates;  // [T, D]
  const void* bias;          // [B, D]
  void* state;               // [S, B - 1, 2, D]
  const int32_t *cu_seqlens, *seq_lens, *initial_indices, *state_indices;
  void* out;  // [T, D], contiguous
  int64_t num_tokens, num_seqs, num_slots, dim, block_size, keys_stride, gates_stride;
  int64_t is_bf16, num_threads;
);

template <typename T>
struct Sequence {
  const Call& call;
  int64_t start, num_new, length, initial, slot;

  Sequence(const Call& call, int64_t n)
      : call(call),
        start(call.cu_seqlens[n]),
        num_new(call.cu_seqlens[n + 1] - start),
        length(call.seq_lens[n]),
        initial(call.initial_indices[n]),
        slot(call.state_indices[n]) {}

  int64_t first() const { return length - num_new; }  // position of the first new token
  T* held(int64_t at, int64_t place) const {
    return (T*)call.state + (at * (call.block_size - 1) + place) * 2 * call.dim;
  }
  // Key and gate of the token at a position, from the block of the first new one on; null: zeros.
  const T* key(int64_t position) const {
    if (position >= first())
      return (const T*)call.keys + (start + position - first()) * call.keys_stride;
    return initial ? held(initial, position % call.block_size) : nullptr;
  }
  const T* gate(int64_t position) const {
    if (position >= first())
      return (const T*)call.gates + (start + position - first()) * call.gates_stride;
    return initial ? held(initial, position % call.block_size) + call.dim : nullptr;
  }
};

template <typename T>
TH_INLINE f32x16 load(const T* row, int64_t d, int n) {
  return row ? th::load(row + d, n) : f32x16{};
}

template <typename T>
void pool(const Sequence<T>& seq, int64_t first, T* out) {
  const Call& call = seq.call;
  const T* bias = (const T*)call.bias;
  th::for_lanes(call.dim, [&](int64_t d, int n) TH_LAMBDA {
    const auto logit = [&](int64_t i) TH_LAMBDA {
      return load(seq.gate(first + i), d, n) + th::load(bias + i * call.dim + d, n);
    };
    f32x16 largest = logit(0), total{}, sum{};
    for (int64_t i = 1; i < call.block_size; ++i) largest = th::max(largest, logit(i));
    for (int64_t i = 0; i < call.block_size; ++i) {
      const f32x16 weight = th::exp(logit(i) - largest);
      total += weight;
      sum = th::fma(weight, load(seq.key(first + i), d, n), sum);
    }
    th::store(out + d, sum / total, n);
  });
}

template <typename T>
void write_state(const Sequence<T>& seq) {
  const int64_t left = seq.length % seq.call.block_size, bytes = seq.call.dim * sizeof(T);
  for (int64_t i = 0; i < left; ++i) {
    T* to = seq.held(seq.slot, i);
    const int64_t position = seq.length - left + i;
    if (position < seq.first() && seq.initial == seq.slot) continue;
    for (const T* from : {seq.key(position), seq.gate(position)}) {
      from ? (void)std::memcpy(to, from, bytes) : (void)std::memset(to, 0, bytes);
      to += seq.call.dim;
    }
  }
}

template <typename T>
void run(const Call& call) {
  const int32_t* ends = call.cu_seqlens + 1;
#pragma omp parallel num_threads(int(call.num_threads))
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < call.num_tokens; ++t) {
      T* out = (T*)call.out + t * call.dim;
      const int64_t n = std::upper_bound(ends, ends + call.num_seqs, int32_t(t)) - ends;
      if (n < call.num_seqs) {
        const Sequence<T> seq(call, n);
        const int64_t first = seq.first() + t - seq.start - (call.block_size - 1);
        if (first >= 0 && first % call.block_size == 0) {
          pool(seq, first, out);
          continue;
        }
      }
      std::memset(out, 0, call.dim * sizeof(T));
    }
#pragma omp for schedule(static)
    for (int64_t n = 0; n < call.num_seqs; ++n) {
      const Sequence<T> seq(call, n);
      if (seq.slot != 0 && seq.num_new > 0) write_state(seq);
    }
  }
}

bool lengths_are_valid(const Call& call) {
  for (int64_t n = 0; n < call.num_seqs; ++n)
    if (call.seq_lens[n] < call.cu_seqlens[n + 1] - call.cu_seqlens[n]) return false;
  return true;
}

}  // namespace pooling

TH_EXPORT_CALL(gated_pooling, pooling::Call) {
  if (!th::indices_are_valid(*call) || !pooling::lengths_are_valid(*call)) return false;
  call->is_bf16 ? pooling::run<th::bf16>(*call) : pooling::run<float>(*call);
  return true;
}
