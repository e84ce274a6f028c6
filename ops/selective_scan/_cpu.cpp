// The selective scan on a CPU: a thread takes some channels of a sequence and walks its tokens.
//
// The channels' states lie one after the other, N floats each, as in the pool, so that a step reads
// and writes them in address order; they and their rates stay in L1 from token to token. Lanes are
// states of one channel; the products of sixteen channels with C are then summed together.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "aligned_floats.h"
#include "call.h"
#include "power_of_2.h"
#include "recurrent_call.h"
#include "simd.h"

namespace selective {

using th::LANES;
using th::f32x16;

TH_CALL(Call,
  const void *x, *dt, *B, *C, *z;  // [T, C], [T, C], [T, G, N], [T, G, N], [T, C] or null
  const void *A_log, *D;           // [C, N], [C]; wide: in float32
  float* state;                    // [S, C, N]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  const void* dt_bias;  // [C] or null; wide: in float32
  void* out;  // [T, C], contiguous
  int64_t num_tokens, num_seqs, num_slots, channels, num_groups, state_dim;  // C, G, N
  int64_t x_stride, dt_stride, B_stride, C_stride, z_stride;  // from token to token
  int64_t is_bf16, wide_A_log, wide_D, wide_dt_bias, num_threads;
);

// Channels that a thread takes at once: of 16 states each, they and their rates are 8 KiB.
constexpr int64_t BLOCK_CHANNELS = 64;
constexpr int64_t STRETCH = 8;  // tokens whose steps and gates are worked out together

// Some channels of one sequence.
template <typename T>
struct Block {
  const Call& call;
  int64_t start, length;
  int64_t channel, size;
  int64_t initial, slot;  // where the state is read and where it is left; 0: nowhere

  Block(const Call& call, int64_t n, int64_t channel, int64_t size)
      : call(call),
        start(call.cu_seqlens[n]),
        length(call.cu_seqlens[n + 1] - start),
        channel(channel),
        size(size),
        initial(call.initial_indices[n]),
        slot(call.state_indices[n]) {}

  const T* row(const void* rows, int64_t stride, int64_t t) const {
    return (const T*)rows + (start + t) * stride;
  }
  T* out(int64_t t) const { return (T*)call.out + (start + t) * call.channels + channel; }
  float* state(int64_t at) const {
    return call.state + (at * call.channels + channel) * call.state_dim;
  }
  // The states where they may be advanced in place: in their slot, or in `spare`.
  float* open_states(th::Spare& spare) const {
    const int64_t floats = size * call.state_dim;
    float* opened = slot ? state(slot) : spare.take(floats);
    if (!initial)
      std::fill(opened, opened + floats, 0.0f);
    else if (initial != slot)
      std::memcpy(opened, state(initial), floats * sizeof(float));
    return opened;
  }
};

// A parameter, which may be float32 whatever the op's dtype is.
template <typename T>
TH_INLINE f32x16 parameter(const void* values, bool wide, int64_t i, int n) {
  return wide ? th::load((const float*)values + i, n) : th::load((const T*)values + i, n);
}

// By what powers of 2 the states of some channels decay in a step of 1.
template <typename T>
void take_rates(const Call& call, int64_t channel, int64_t size, float* rates) {
  const int64_t first = channel * call.state_dim;
  th::for_lanes(size * call.state_dim, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 A_log = parameter<T>(call.A_log, call.wide_A_log, first + i, n);
    th::store(rates + i, th::exp(A_log) * -1.44269504f, n);
  });
}

// One token on `count` <= 16 channels: their states take u B and are read by C. N is the number of
// states where it is one vector, else 0.
template <int N, typename T>
TH_INLINE f32x16 advance(const float* step, const float* u, const float* rates, const T* B,
                         const T* C, int64_t state_dim, int count, float* state) {
  f32x16 products[LANES];
  if constexpr (N == LANES) {
    const f32x16 b = th::load(B), c = th::load(C);
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
      float* s = state + i * LANES;
      const f32x16 decay = th::power_of_2(th::load(rates + i * LANES) * step[i]);
      const f32x16 advanced = th::fma(th::load(s), decay, b * u[i]);
      th::store(s, advanced);
      products[i] = advanced * c;
    }
  } else {
    for (int i = 0; i < count; ++i) {
      f32x16 sum{};
      th::for_lanes(state_dim, [&](int64_t k, int n) TH_LAMBDA {
        float* s = state + i * state_dim + k;
        const f32x16 decay = th::power_of_2(th::load(rates + i * state_dim + k, n) * step[i]);
        const f32x16 advanced = th::fma(th::load(s, n), decay, th::load(B + k, n) * u[i]);
        th::store(s, advanced, n);
        sum = th::fma(advanced, th::load(C + k, n), sum);
      });
      products[i] = sum;
    }
  }
  for (int i = count; i < LANES; ++i) products[i] = f32x16{};
  return th::sum16(products);
}

// Rows of tokens lie too far apart for a processor to foresee the next one.
template <typename T>
TH_INLINE void prefetch(const T* row, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
}

// What a stretch of tokens gives some channels.
struct Stretch {
  typedef float Rows[STRETCH][BLOCK_CHANNELS];
  alignas(64) Rows steps, added, gates;  // added: inputs times steps
};

// Takes the stretch of tokens from `first` on, before their states: a step and a gate are each a long
// chain of instructions. Those of several vectors overlap here, where the states of sixteen channels
// fill all that a processor looks ahead. Asks for the rows of the next stretch.
template <typename T>
void prepare(const Block<T>& block, int64_t first, Stretch& s) {
  const Call& call = block.call;
  const int64_t last = std::min(first + STRETCH, block.length);
  for (int64_t t = first; t < last; ++t) {
    const T* x = block.row(call.x, call.x_stride, t) + block.channel;
    const T* dt = block.row(call.dt, call.dt_stride, t) + block.channel;
    const T* z = call.z ? block.row(call.z, call.z_stride, t) + block.channel : nullptr;
    const int64_t row = t - first, next = std::min(t + STRETCH, block.length - 1);
    prefetch(block.row(call.x, call.x_stride, next) + block.channel, block.size);
    prefetch(block.row(call.dt, call.dt_stride, next) + block.channel, block.size);
    if (z) prefetch(block.row(call.z, call.z_stride, next) + block.channel, block.size);
    prefetch(block.out(next), block.size);
    th::for_lanes(block.size, [&](int64_t c, int n) TH_LAMBDA {
      f32x16 before = th::load(dt + c, n);
      if (call.dt_bias)
        before += parameter<T>(call.dt_bias, call.wide_dt_bias, block.channel + c, n);
      const f32x16 step = th::softplus(before);
      th::store(s.steps[row] + c, step);
      th::store(s.added[row] + c, step * th::load(x + c, n));
      if (z) th::store(s.gates[row] + c, th::silu(th::load(z + c, n)));
    });
  }
}

// All tokens of a block, whose channels are all of one group.
template <int N, typename T>
void walk(const Block<T>& block, const float* rates, float* state) {
  const Call& call = block.call;
  const int64_t state_dim = call.state_dim;
  const int64_t group = block.channel / (call.channels / call.num_groups) * state_dim;
  Stretch s;
  for (int64_t t = 0; t < block.length; ++t) {
    const int64_t row = t % STRETCH;
    if (row == 0) prepare(block, t, s);
    const T* x = block.row(call.x, call.x_stride, t) + block.channel;
    const T* B = block.row(call.B, call.B_stride, t) + group;
    const T* C = block.row(call.C, call.C_stride, t) + group;
    T* out = block.out(t);
    th::for_lanes(block.size, [&](int64_t c, int n) TH_LAMBDA {
      const f32x16 D = parameter<T>(call.D, call.wide_D, block.channel + c, n);
      f32x16 y = advance<N>(s.steps[row] + c, s.added[row] + c, rates + c * state_dim, B, C,
                            state_dim, n, state + c * state_dim);
      y = th::fma(D, th::load(x + c, n), y);
      if (call.z) y *= th::load(s.gates[row] + c);
      th::store(out + c, y, n);
    });
  }
}

template <int N, typename T>
void scan(const Call& call) {
  // No block has channels of two groups.
  const int64_t of_group = call.channels / call.num_groups;
  const int64_t blocks_of_group = (of_group + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
  const int64_t num_blocks = call.num_groups * blocks_of_group;
#pragma omp parallel num_threads(call.num_threads)
  {
    th::AlignedFloats rates(BLOCK_CHANNELS * call.state_dim);
    th::Spare spare;
    int64_t rates_of = -1;
#pragma omp for schedule(static) nowait
    for (int64_t t = call.cu_seqlens[call.num_seqs]; t < call.num_tokens; ++t)
      std::memset((T*)call.out + t * call.channels, 0, call.channels * sizeof(T));
    // The sequences of a block one after the other, which share its rates.
#pragma omp for schedule(static)
    for (int64_t item = 0; item < num_blocks * call.num_seqs; ++item) {
      const int64_t b = item / call.num_seqs, within = b % blocks_of_group * BLOCK_CHANNELS;
      const Block<T> block(call, item % call.num_seqs, b / blocks_of_group * of_group + within,
                           std::min(BLOCK_CHANNELS, of_group - within));
      if (block.length == 0) continue;
      if (b != rates_of) take_rates<T>(call, block.channel, block.size, rates.data());
      rates_of = b;
      walk<N>(block, rates.data(), block.open_states(spare));
    }
  }
}

template <typename T>
void dispatch(const Call& call) {
  call.state_dim == LANES ? scan<LANES, T>(call) : scan<0, T>(call);
}

}  // namespace selective

TH_EXPORT_CALL(selective_scan, selective::Call) {
  if (!th::indices_are_valid(*call)) return false;
  call->is_bf16 ? selective::dispatch<th::bf16>(*call) : selective::dispatch<float>(*call);
  return true;
}
