// One token of each sequence through a Mamba2 mixer: convolution, step sizes, recurrence, gate and
// norm.
//
// All heads of a group read its B and C, and a norm may span all heads. So with sequences enough, a
// thread takes whole ones, and what passes from part to part stays in its cache. With few, the
// threads share each part of all sequences, and wait for one another in between. What passes from
// part to part is rounded to the op's dtype, as when each part is an op.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "aligned_floats.h"
#include "call.h"
#include "conv_step.h"
#include "recurrent_call.h"
#include "scalar_decay.h"
#include "simd.h"
#include "state_panels.h"

namespace mamba2 {

using th::LANES;
using th::f32x16;

TH_CALL(Call,
  const void *xBC, *z, *dt;  // [T, C], [T, H V] or null, [T, H] in the op's dtype
  const void *conv_weight, *conv_bias, *A_log, *dt_bias, *D, *norm_weight;  // wide: in float32
  void* conv_state;  // [S, W - 1, C]
  float* state;      // [S, H, V, K]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  void* out;  // [T, H V], contiguous
  int64_t num_tokens, num_seqs, num_slots, channels, width, num_v_heads, v_dim, k_dim;
  int64_t xBC_stride, z_stride, dt_stride;  // from token to token
  int64_t silu, norm_before_gate, norm_groups, is_bf16;
  int64_t wide_A_log, wide_dt_bias, wide_D, wide_norm, state_streams, num_threads;
  double dt_min, dt_max, norm_eps;
);

// One sequence's token, and memory for its channels after their convolution.
template <typename T>
struct Sequence {
  const Call& call;
  int64_t token;
  bool is_live;
  int64_t initial, slot;  // where the states are read and where they are left; 0: nowhere
  T* mixed;               // [C]

  Sequence(const Call& call, int64_t n, T* mixed)
      : call(call),
        token(call.cu_seqlens[n]),
        is_live(call.cu_seqlens[n + 1] > token),
        initial(call.initial_indices[n]),
        slot(call.state_indices[n]),
        mixed(mixed) {}

  int64_t inner() const { return call.num_v_heads * call.v_dim; }
  const T* inputs() const { return (const T*)call.xBC + token * call.xBC_stride; }
  const T* z() const { return (const T*)call.z + token * call.z_stride; }
  float dt(int64_t h) const { return th::to_float(((const T*)call.dt)[token * call.dt_stride + h]); }
  T* out() const { return (T*)call.out + token * inner(); }
  T* past(int64_t at, int64_t i) const {
    return (T*)call.conv_state + (at * (call.width - 1) + i) * call.channels;
  }
  float* state(int64_t at, int64_t h) const {
    return call.state + (at * call.num_v_heads + h) * call.v_dim * call.k_dim;
  }
  // The state of a head where it may be advanced in place: in its slot, or in `spare`.
  float* open_state(int64_t h, th::Spare& spare) const {
    const int64_t size = call.v_dim * call.k_dim;
    float* opened = slot ? state(slot, h) : spare.take(size);
    if (!initial)
      std::fill(opened, opened + size, 0.0f);
    else if (initial != slot)
      std::copy_n(state(initial, h), size, opened);
    return opened;
  }
};

// ---- recurrence -------------------------------------------------------------------------------

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// A parameter of a head, which may be float32 whatever the op's dtype is.
template <typename T>
float parameter(const void* values, bool wide, int64_t h) {
  return wide ? ((const float*)values)[h] : th::to_float(((const T*)values)[h]);
}

// The step size of head h. A NaN stays one: bounds come second in both comparisons.
template <typename T>
float step_size(const Sequence<T>& seq, int64_t h) {
  const Call& call = seq.call;
  const float step = softplus(seq.dt(h) + parameter<T>(call.dt_bias, call.wide_dt_bias, h));
  return std::min(std::max(step, float(call.dt_min)), float(call.dt_max));
}

// Head h of a token, whose channels have been convolved.
template <typename T>
void advance(const Sequence<T>& seq, int64_t h, th::Spare& spare) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim, group_size = (call.channels - seq.inner()) / 2;
  const T* B = seq.mixed + seq.inner() + h * (group_size / K) / call.num_v_heads * K;
  const float dt = step_size(seq, h);
  const float decay = std::exp(dt * -std::exp(parameter<T>(call.A_log, call.wide_A_log, h)));
  const float D = parameter<T>(call.D, call.wide_D, h);
  const auto step = th::scalar_decay::choose_step<T>(K);
  float* state = seq.open_state(h, spare);
  for (int64_t r = 0; r < V; r += th::scalar_decay::MAX_ROWS) {
    const int64_t at = h * V + r;
    step({B + group_size, B, seq.mixed + at, decay, dt, D, 1.0f, seq.out() + at}, K,
         std::min(th::scalar_decay::MAX_ROWS, V - r), call.state_streams, state + r * K);
  }
}

// ---- gate and norm ----------------------------------------------------------------------------

// `size` outputs from `channel` on, gated where they are.
template <typename T>
void gate(const Sequence<T>& seq, int64_t channel, int64_t size) {
  T* out = seq.out() + channel;
  const T* z = seq.z() + channel;
  th::for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    th::store(out + i, th::load(out + i, n) * th::silu(th::load(z + i, n)), n);
  });
}

// The same, normed after the gate or before it; `gated` is memory for them.
template <bool BEFORE_GATE, typename T, typename Weight>
void gated_norm(const Sequence<T>& seq, const Weight* weight, int64_t channel, int64_t size,
                float* gated) {
  T* out = seq.out() + channel;
  const T* z = seq.z() + channel;
  f32x16 sum{};
  th::for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 o = th::load(out + i, n), gate = th::silu(th::load(z + i, n));
    const f32x16 y = BEFORE_GATE ? o : o * gate;
    th::store(gated + i, o * gate, n);
    sum = th::fma(y, y, sum);
  });
  const float mean = th::sum(sum) / float(size);
  const f32x16 factor = th::splat(1.0f / std::sqrt(mean + float(seq.call.norm_eps)));
  th::for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    th::store(out + i, th::load(weight + channel + i, n) * (th::load(gated + i, n) * factor), n);
  });
}

// One group of a token's outputs.
template <typename T>
void finish(const Sequence<T>& seq, int64_t group, float* gated) {
  const Call& call = seq.call;
  const int64_t size = seq.inner() / call.norm_groups, channel = group * size;
  const auto norm = [&](auto* weight) {
    call.norm_before_gate ? gated_norm<true>(seq, weight, channel, size, gated)
                          : gated_norm<false>(seq, weight, channel, size, gated);
  };
  if (!call.norm_weight) return gate(seq, channel, size);
  call.wide_norm ? norm((const float*)call.norm_weight) : norm((const T*)call.norm_weight);
}

// ---- items ------------------------------------------------------------------------------------

// Channels of a convolution that a thread takes at once, where several share it.
constexpr int64_t BLOCK_CHANNELS = 256;

template <int W, typename T>
void run_whole(const Call& call, T* mixed, float* gated) {
  th::Spare spare;
#pragma omp for schedule(dynamic, 1)
  for (int64_t n = 0; n < call.num_seqs; ++n) {
    const Sequence<T> seq(call, n, mixed);
    if (!seq.is_live) continue;
    th::convolve<W>(seq, 0, call.channels, mixed);
    for (int64_t h = 0; h < call.num_v_heads; ++h) advance(seq, h, spare);
    if (call.z)
      for (int64_t g = 0; g < call.norm_groups; ++g) finish(seq, g, gated);
  }
}

template <int W, typename T>
void run_shared(const Call& call, T* mixed, float* gated) {
  th::Spare spare;
  const int64_t blocks = (call.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
  const auto sequence = [&](int64_t n) { return Sequence<T>(call, n, mixed + n * call.channels); };
#pragma omp for schedule(static)
  for (int64_t item = 0; item < call.num_seqs * blocks; ++item) {
    const Sequence<T> seq = sequence(item / blocks);
    const int64_t channel = item % blocks * BLOCK_CHANNELS;
    if (seq.is_live)
      th::convolve<W>(seq, channel, std::min(BLOCK_CHANNELS, call.channels - channel),
                      seq.mixed + channel);
  }
  const int64_t heads = call.num_seqs * call.num_v_heads;
  const int64_t stretch = std::max<int64_t>(1, heads / (8 * call.num_threads));
#pragma omp for schedule(dynamic, stretch)
  for (int64_t item = 0; item < heads; ++item) {
    const Sequence<T> seq = sequence(item / call.num_v_heads);
    if (seq.is_live) advance(seq, item % call.num_v_heads, spare);
  }
  if (!call.z) return;
#pragma omp for schedule(static)
  for (int64_t item = 0; item < call.num_seqs * call.norm_groups; ++item) {
    const Sequence<T> seq = sequence(item / call.norm_groups);
    if (seq.is_live) finish(seq, item % call.norm_groups, gated);
  }
}

// Whether each thread gets so many sequences that none waits long for another's last.
bool are_whole(const Call& call) {
  return call.num_threads == 1 || call.num_seqs >= 4 * call.num_threads;
}

template <int W, typename T>
void run(const Call& call) {
  const int64_t row = th::round_up(call.channels, LANES), inner = call.num_v_heads * call.v_dim;
  const bool whole = are_whole(call);
  th::AlignedFloats shared(whole ? 0 : row * call.num_seqs);
#pragma omp parallel num_threads(call.num_threads)
  {
    th::AlignedFloats own(row + th::round_up(inner, LANES));
    th::clear_padding<T>(call);
    float* gated = own.data() + row;
    whole ? run_whole<W>(call, (T*)own.data(), gated)
          : run_shared<W>(call, (T*)shared.data(), gated);
  }
}

template <typename T>
void dispatch(const Call& call) {
  switch (call.width) {
    case 2: return run<2, T>(call);
    case 3: return run<3, T>(call);
    case 4: return run<4, T>(call);
    case 5: return run<5, T>(call);
    case 6: return run<6, T>(call);
    case 7: return run<7, T>(call);
    case 8: return run<8, T>(call);
  }
}

bool one_token_each(const Call& call) {
  for (int64_t n = 0; n < call.num_seqs; ++n)
    if (call.cu_seqlens[n + 1] - call.cu_seqlens[n] > 1) return false;
  return true;
}

}  // namespace mamba2

TH_EXPORT_CALL(ssd_step, mamba2::Call) {
  if (!th::indices_are_valid(*call) || !mamba2::one_token_each(*call)) return false;
  call->is_bf16 ? mamba2::dispatch<th::bf16>(*call) : mamba2::dispatch<float>(*call);
  return true;
}
