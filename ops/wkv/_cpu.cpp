// RWKV's weighted average of past values on a CPU: a thread takes blocks of channels of a sequence
// and walks its tokens, the states in registers.
//
// Channels know nothing of one another, so nothing is exchanged, and a state may be left in its slot
// as soon as its own block is done: no other sequence starts from there.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "recurrent_call.h"
#include "simd.h"
#include "wkv.h"

namespace rwkv {

using th::LANES;
using th::f32x16;
using th::wkv::NOTHING;
using th::wkv::Sums;

constexpr int BLOCK = 4;  // vectors of channels that walk together: their steps overlap
// Tokens whose rows are asked for before their turn: they lie too far apart for a processor to
// foresee the next one.
constexpr int64_t AHEAD = 2;

TH_CALL(Call,
  const void *k, *v;               // [T, C]
  const float *log_decay, *bonus;  // [C]
  float* state;                    // [S, 3, C]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  void* out;  // [T, C], contiguous
  int64_t num_tokens, num_seqs, num_slots, num_channels, k_stride, v_stride;
  int64_t is_bf16, num_threads;
);

// VECTORS * LANES channels, or n of one vector, through the tokens of a sequence.
template <int VECTORS, typename T>
void walk(const Call& call, int64_t seq, int64_t channel, int n) {
  const int64_t begin = call.cu_seqlens[seq], end = call.cu_seqlens[seq + 1];
  const int64_t initial = call.initial_indices[seq], slot = call.state_indices[seq];
  const int64_t channels = call.num_channels;
  const auto kept = [&](int64_t slot, int place, int v) {
    return call.state + (slot * 3 + place) * channels + channel + v * LANES;
  };
  Sums sums[VECTORS];
  f32x16 log_decay[VECTORS], bonus[VECTORS];
  for (int v = 0; v < VECTORS; ++v) {
    log_decay[v] = th::load(call.log_decay + channel + v * LANES, n);
    bonus[v] = th::load(call.bonus + channel + v * LANES, n);
    sums[v] = {f32x16{}, f32x16{}, th::splat(NOTHING)};
    if (initial)
      sums[v] = {th::load(kept(initial, 0, v), n), th::load(kept(initial, 1, v), n),
                 th::load(kept(initial, 2, v), n)};
  }
  const T *k = (const T*)call.k + channel, *value = (const T*)call.v + channel;
  T* out = (T*)call.out + channel;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t next = std::min(t + AHEAD, end - 1);
    for (int v = 0; v < VECTORS; ++v) {
      const int c = v * LANES;
      __builtin_prefetch(k + next * call.k_stride + c);
      __builtin_prefetch(value + next * call.v_stride + c);
      __builtin_prefetch(out + next * channels + c, 1);
      const f32x16 key = th::load(k + t * call.k_stride + c, n);
      const f32x16 own = th::load(value + t * call.v_stride + c, n);
      const Sums seen = sums[v].with(key + bonus[v], own);
      th::store(out + t * channels + c, seen.numerator / seen.denominator, n);
      sums[v].exponent += log_decay[v];
      sums[v] = sums[v].with(key, own);
    }
  }
  if (slot)
    for (int v = 0; v < VECTORS; ++v) {
      th::store(kept(slot, 0, v), sums[v].numerator, n);
      th::store(kept(slot, 1, v), sums[v].denominator, n);
      th::store(kept(slot, 2, v), sums[v].exponent, n);
    }
}

template <typename T>
void run(const Call& call) {
  constexpr int64_t WHOLE = BLOCK * LANES;
  const int64_t channels = call.num_channels, blocks = (channels + WHOLE - 1) / WHOLE;
  const int64_t num_items = call.num_seqs * blocks;
  // Long enough stretches to cost little, short enough to level out lengths.
  const int64_t stretch = std::max<int64_t>(1, num_items / (8 * call.num_threads));
#pragma omp parallel num_threads(call.num_threads)
  {
#pragma omp for schedule(dynamic, stretch) nowait
    for (int64_t item = 0; item < num_items; ++item) {
      const int64_t seq = item / blocks, first = item % blocks * WHOLE;
      const int64_t size = std::min(WHOLE, channels - first);
      if (call.cu_seqlens[seq] == call.cu_seqlens[seq + 1]) continue;
      if (size == WHOLE) {
        walk<BLOCK, T>(call, seq, first, LANES);
        continue;
      }
      for (int64_t c = 0; c < size; c += LANES)
        walk<1, T>(call, seq, first + c, int(std::min<int64_t>(LANES, size - c)));
    }
#pragma omp for schedule(static)
    for (int64_t t = call.cu_seqlens[call.num_seqs]; t < call.num_tokens; ++t)
      std::memset((T*)call.out + t * channels, 0, channels * sizeof(T));
  }
}

}  // namespace rwkv

TH_EXPORT_CALL(wkv, rwkv::Call) {
  if (!th::indices_are_valid(*call)) return false;
  call->is_bf16 ? rwkv::run<th::bf16>(*call) : rwkv::run<float>(*call);
  return true;
}
