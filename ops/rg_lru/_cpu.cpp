// Real-gated linear recurrent units on a CPU: a thread takes blocks of channels of a sequence and
// walks its tokens, the states in registers.
//
// Channels know nothing of one another, so nothing is exchanged, and a state may be left in its slot
// as soon as its own block is done: no other sequence starts from there.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "recurrent_call.h"
#include "rg_lru.h"
#include "simd.h"

namespace lru {

using th::LANES;
using th::f32x16;

constexpr int BLOCK = 4;  // vectors of channels that walk together: their steps overlap
// Tokens whose rows are asked for before their turn: they lie too far apart for a processor to
// foresee the next one.
constexpr int64_t AHEAD = 2;

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

// What a token has of some channels: their inputs, their gates of both kinds head_dim apart, outputs.
template <typename T>
struct Row {
  const T *x, *gates;
  T* out;
};

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
  const auto row = [&](int64_t t) {
    return Row<T>{
        (const T*)call.x + t * call.x_stride + channel,
        (const T*)call.gates + t * call.gates_stride + head * call.gates_head_stride + first,
        (T*)call.out + t * channels + channel};
  };
  for (int64_t t = begin; t < end; ++t) {
    const auto [x, gates, out] = row(t);
    const auto [next_x, next_gates, next_out] = row(std::min(t + AHEAD, end - 1));
    const bool is_first = t == begin && !initial;
    for (int v = 0; v < VECTORS; ++v) {
      const int c = v * LANES;
      __builtin_prefetch(next_x + c);
      __builtin_prefetch(next_gates + c);
      __builtin_prefetch(next_gates + call.head_dim + c);
      __builtin_prefetch(next_out + c, 1);
      const auto gated = th::lru::Gated::of(gates + c, call.head_dim, log_a[v], n);
      const f32x16 added = gated.input * th::load(x + c, n);
      h[v] = th::fma(is_first ? th::splat(1.0f) : gated.scale, added, gated.decay * h[v]);
      th::store(out + c, h[v], n);
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
  const int64_t num_items = call.num_seqs * call.num_heads * blocks;
  // Long enough stretches to cost little, short enough to level out lengths.
  const int64_t stretch = std::max<int64_t>(1, num_items / (8 * call.num_threads));
#pragma omp parallel num_threads(call.num_threads)
  {
#pragma omp for schedule(dynamic, stretch) nowait
    for (int64_t item = 0; item < num_items; ++item) {
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
