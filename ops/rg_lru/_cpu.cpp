// Real-gated linear recurrent units on a CPU: a thread takes blocks of channels of a sequence and
// walks its tokens, the states in registers.
//
// Channels know nothing of one another, so nothing is exchanged, and a state may be left in its slot
// as soon as its own block is done: no other sequence starts from there.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "recurrent_call.h"
#include "simd.h"

namespace lru {

using th::LANES;
using th::f32x16;

constexpr int BLOCK = 4;  // vectors of channels that walk together: their steps overlap

TH_CALL(Call,
  const void *x, *gates;  // [T, C], [T, H, 2 D]
  const float* log_a;     // [C]
  float* state;           // [S, C]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  void* out;  // [T, C], contiguous
  int64_t num_tokens, num_seqs, num_slots, num_heads, head_dim;
  int64_t x_stride, gates_stride, gates_head_stride;
  int64_t is_bf16, num_threads;
);

TH_INLINE f32x16 sqrt(f32x16 x) {
  alignas(64) float lanes[LANES];
  th::store(lanes, x);
  for (float& lane : lanes) lane = __builtin_sqrtf(lane);
  return th::load(lanes);
}

// 1 - a^2 of a = e^(x / 2) for x <= 0. Near 0, where the difference has no digits left, by the series
// of e^x.
TH_INLINE f32x16 one_minus_square(f32x16 a, f32x16 x) {
  f32x16 series = th::splat(1.0f);
#pragma GCC unroll 7
  for (int divisor = 8; divisor > 1; --divisor)
    series = th::fma(x * (1.0f / float(divisor)), series, th::splat(1.0f));
  return x > -0.5f ? -x * series : 1.0f - a * a;
}

// VECTORS * LANES channels of a head, or n of one vector, through the tokens of a sequence.
template <int VECTORS, typename T>
void walk(const Call& call, int64_t seq, int64_t head, int64_t first, int n) {
  const int64_t begin = call.cu_seqlens[seq], end = call.cu_seqlens[seq + 1];
  const int64_t initial = call.initial_indices[seq], slot = call.state_indices[seq];
  const int64_t channels = call.num_heads * call.head_dim;
  const int64_t channel = head * call.head_dim + first;
  f32x16 h[VECTORS], log_a[VECTORS];
  for (int v = 0; v < VECTORS; ++v) {
    const int64_t c = channel + v * LANES;
    log_a[v] = th::load(call.log_a + c, n);
    h[v] = initial ? th::load(call.state + initial * channels + c, n) : f32x16{};
  }
  for (int64_t t = begin; t < end; ++t) {
    const T* x = (const T*)call.x + t * call.x_stride + channel;
    const T* gates = (const T*)call.gates + t * call.gates_stride + head * call.gates_head_stride;
    T* out = (T*)call.out + t * channels + channel;
    const bool is_first = t == begin && !initial;
    for (int v = 0; v < VECTORS; ++v) {
      const T* gate = gates + first + v * LANES;
      const f32x16 input_gate = th::sigmoid(th::load(gate, n));
      const f32x16 log_decay = th::sigmoid(th::load(gate + call.head_dim, n)) * log_a[v];
      const f32x16 decay = th::exp(log_decay);
      const f32x16 scale = sqrt(one_minus_square(decay, 2.0f * log_decay));
      const f32x16 added = input_gate * th::load(x + v * LANES, n);
      h[v] = th::fma(decay, h[v], is_first ? added : scale * added);
      th::store(out + v * LANES, h[v], n);
    }
  }
  if (slot)
    for (int v = 0; v < VECTORS; ++v)
      th::store(call.state + slot * channels + channel + v * LANES, h[v], n);
}

template <typename T>
void run(const Call& call) {
  constexpr int64_t WHOLE = BLOCK * LANES;
  const int64_t blocks = (call.head_dim + WHOLE - 1) / WHOLE;
  const int64_t row = call.num_heads * call.head_dim;
#pragma omp parallel num_threads(call.num_threads)
  {
#pragma omp for schedule(dynamic) nowait
    for (int64_t item = 0; item < call.num_seqs * call.num_heads * blocks; ++item) {
      const int64_t seq = item / (call.num_heads * blocks);
      const int64_t head = item / blocks % call.num_heads, first = item % blocks * WHOLE;
      const int64_t size = std::min(WHOLE, call.head_dim - first);
      if (call.cu_seqlens[seq] == call.cu_seqlens[seq + 1]) continue;
      if (size == WHOLE) {
        walk<BLOCK, T>(call, seq, head, first, LANES);
        continue;
      }
      for (int64_t c = 0; c < size; c += LANES)
        walk<1, T>(call, seq, head, first + c, int(std::min<int64_t>(LANES, size - c)));
    }
#pragma omp for schedule(static)
    for (int64_t t = call.cu_seqlens[call.num_seqs]; t < call.num_tokens; ++t)
      std::memset((T*)call.out + t * row, 0, row * sizeof(T));
  }
}

}  // namespace lru

TH_EXPORT_CALL(rg_lru, lru::Call) {
  if (!th::indices_are_valid(*call)) return false;
  call->is_bf16 ? lru::run<th::bf16>(*call) : lru::run<float>(*call);
  return true;
}
