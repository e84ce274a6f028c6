// One token of each sequence through a Mamba2 mixer: convolution, step sizes, recurrence, gate and
// norm.
//
// All heads of a group read its B and C, and a norm may span all heads. So with sequences enough, a
// thread takes whole ones, and what passes from part to part stays in its cache. With few, the
// threads share each part of all sequences, and wait for one another in between. What passes from
// part to part is rounded to the op's dtype, as when each part is an op.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "aligned_floats.h"
#include "call.h"
#include "conv_step.h"
#include "recurrent_call.h"
#include "scalar_decay.h"
#include "simd.h"
#include "state_panels.h"
#include "verify.h"

namespace mamba2 {

using th::LANES;
using th::f32x16;

TH_CALL(Call,
  const void *xBC, *z, *dt;  // [T, C], [T, H V] or null, [T, H] in the op's dtype
  const void *conv_weight, *conv_bias, *A_log, *dt_bias, *D, *norm_weight;  // wide: in float32
  void* conv_state;  // [S, W - 1, C]
  float* state;      // [S, H, V, K]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  void* records;  // [S, D, R]; null, as accepted, where no drafts are verified
  const int32_t* accepted;
  void* out;  // [T, H V], contiguous
  int64_t num_tokens, num_seqs, num_slots, channels, width, num_v_heads, v_dim, k_dim;
  int64_t num_records, record_width;              // D, R
  int64_t xBC_stride, z_stride, dt_stride;  // from token to token
  int64_t silu, norm_before_gate, norm_groups, is_bf16;
  int64_t wide_A_log, wide_dt_bias, wide_D, wide_norm, state_streams, num_threads;
  double dt_min, dt_max, norm_eps;
);

// One sequence's token, and memory for its channels after their convolution.
template <typename T>
struct Sequence {
  using Type = T;
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
  const T* dt() const { return (const T*)call.dt + token * call.dt_stride; }
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
float step_size(const Call& call, T dt, int64_t h) {
  const float step =
      softplus(th::to_float(dt) + parameter<T>(call.dt_bias, call.wide_dt_bias, h));
  return std::min(std::max(step, float(call.dt_min)), float(call.dt_max));
}

template <typename T>
using Token = th::scalar_decay::Token<T>;

// Head h of a token: of its channels after their convolution, and its inputs of step sizes.
template <typename T>
Token<T> token_of(const Call& call, const T* mixed, const T* dt, int64_t h, T* out) {
  const int64_t K = call.k_dim, V = call.v_dim, inner = call.num_v_heads * V;
  const int64_t group_size = (call.channels - inner) / 2;
  const T* B = mixed + inner + h * (group_size / K) / call.num_v_heads * K;
  const float step = step_size(call, dt[h], h);
  const float decay = std::exp(step * -std::exp(parameter<T>(call.A_log, call.wide_A_log, h)));
  const float D = parameter<T>(call.D, call.wide_D, h);
  return {B + group_size, B, mixed + h * V, decay, step, D, 1.0f, out + h * V};
}

// The same as rows of the state from r on see it.
template <typename T>
Token<T> from_row(Token<T> token, int64_t r) {
  token.v += r, token.out += r;
  return token;
}

// Head h of a token, whose channels have been convolved.
template <typename T>
void advance(const Sequence<T>& seq, int64_t h, th::Spare& spare) {
  const int64_t K = seq.call.k_dim, V = seq.call.v_dim;
  const Token<T> token = token_of(seq.call, seq.mixed, seq.dt(), h, seq.out());
  const auto step = th::scalar_decay::choose_step<T>(K);
  float* state = seq.open_state(h, spare);
  for (int64_t r = 0; r < V; r += th::scalar_decay::MAX_ROWS)
    step(from_row(token, r), K, std::min(th::scalar_decay::MAX_ROWS, V - r),
         seq.call.state_streams, state + r * K);
}

// ---- gate and norm ----------------------------------------------------------------------------

// `size` outputs from `channel` on, gated where they are.
template <typename T>
void gate(const T* z, T* out, int64_t channel, int64_t size) {
  z += channel, out += channel;
  th::for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    th::store(out + i, th::load(out + i, n) * th::silu(th::load(z + i, n)), n);
  });
}

// The same, normed after the gate or before it; `gated` is memory for them.
template <bool BEFORE_GATE, typename T, typename Weight>
void gated_norm(const Call& call, const T* z, T* out, const Weight* weight, int64_t channel,
                int64_t size, float* gated) {
  z += channel, out += channel;
  f32x16 sum{};
  th::for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 o = th::load(out + i, n), gate = th::silu(th::load(z + i, n));
    const f32x16 y = BEFORE_GATE ? o : o * gate;
    th::store(gated + i, o * gate, n);
    sum = th::fma(y, y, sum);
  });
  const float mean = th::sum(sum) / float(size);
  const f32x16 factor = th::splat(1.0f / std::sqrt(mean + float(call.norm_eps)));
  th::for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    th::store(out + i, th::load(weight + channel + i, n) * (th::load(gated + i, n) * factor), n);
  });
}

// One group of a token's outputs, and its gate.
template <typename T>
void finish(const Call& call, const T* z, T* out, int64_t group, float* gated) {
  const int64_t size = call.num_v_heads * call.v_dim / call.norm_groups, channel = group * size;
  const auto norm = [&](auto* weight) {
    call.norm_before_gate ? gated_norm<true>(call, z, out, weight, channel, size, gated)
                          : gated_norm<false>(call, z, out, weight, channel, size, gated);
  };
  if (!call.norm_weight) return gate(z, out, channel, size);
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
      for (int64_t g = 0; g < call.norm_groups; ++g) finish(call, seq.z(), seq.out(), g, gated);
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
    if (seq.is_live)
      finish(call, seq.z(), seq.out(), item % call.norm_groups, gated);
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
  th::with_width(call.width, [&](auto width) { run<decltype(width)::value, T>(call); });
}

bool one_token_each(const Call& call) {
  for (int64_t n = 0; n < call.num_seqs; ++n)
    if (call.cu_seqlens[n + 1] - call.cu_seqlens[n] > 1) return false;
  return true;
}

// ---- several tokens, and drafts ---------------------------------------------------------------

// One sequence, and memory for the channels of its tokens and for the outputs of replayed ones.
template <typename T>
struct Drafted : th::verify::Drafted<Sequence<T>> {
  T* replayed_out;  // [H V], which nobody reads

  template <typename Stretch>
  Drafted(const Call& call, int64_t n, Stretch stretch, T* mixed, T* replayed_out)
      : th::verify::Drafted<Sequence<T>>(call, n, stretch, mixed), replayed_out(replayed_out) {}

  const T* inputs(int64_t i) const {
    return this->part(i, 0, this->call.xBC, this->call.xBC_stride);
  }
  const T* dt(int64_t i) const {
    return this->part(i, this->call.channels, this->call.dt, this->call.dt_stride);
  }
  const T* z(int64_t i) const {
    return (const T*)this->call.z + this->place(i) * this->call.z_stride;
  }
  T* out(int64_t i) const {
    return this->is_replayed(i) ? replayed_out : (T*)this->call.out + this->place(i) * this->inner();
  }
};

// Convolves some channels of all tokens, and leaves what the next ones need of them. `rows` is
// memory for where they lie.
template <int W, typename T>
void convolve_drafted(const Drafted<T>& seq, int64_t channel, int64_t size, const T** rows) {
  const Call& call = seq.call;
  for (int64_t w = 0; w < W - 1; ++w) rows[w] = seq.initial ? seq.past(seq.initial, w) : nullptr;
  for (int64_t i = 0; i < seq.num_tokens; ++i) rows[W - 1 + i] = seq.inputs(i);
  th::convolve_tokens<W>(call, rows, seq.num_tokens, channel, size, seq.mixed + channel,
                         call.channels);
  if (seq.slot) th::verify::leave_channels(seq, rows, channel, size);
}

// All tokens on head h. A few rows of its state go through all of them, and stay in L1; those of
// tokens that are not certain are a copy, `ahead`.
template <typename T>
void advance_drafted(const Drafted<T>& seq, int64_t h, th::Spare& spare, float* ahead) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim;
  const auto step = th::scalar_decay::choose_step<T>(K);
  float* state = seq.open_state(h, spare);
  for (int64_t r = 0; r < V; r += LANES) {
    const int num_rows = int(std::min<int64_t>(LANES, V - r));
    float* rows = state + r * K;
    for (int64_t i = 0; i < seq.num_tokens; ++i) {
      if (i == seq.num_certain) {
        std::copy_n(rows, num_rows * K, ahead);
        rows = ahead;
      }
      const T* mixed = seq.mixed + i * call.channels;
      step(from_row(token_of(call, mixed, seq.dt(i), h, seq.out(i)), r), K, num_rows, 1, rows);
    }
  }
}

// Leaves records of the inputs of step sizes, once all heads have read those that are there.
template <typename T>
void leave_steps(const Drafted<T>& seq) {
  if (!seq.slot) return;
  for (int64_t i = seq.num_certain; i < seq.num_tokens; ++i)
    std::copy_n(seq.dt(i), seq.call.num_v_heads,
                seq.record(seq.slot, i - seq.num_certain) + seq.call.channels);
}

template <int W, typename T>
void run_several(const Call& call) {
  const int64_t inner = call.num_v_heads * call.v_dim, most = th::verify::most_tokens(call);
  const int64_t row = th::round_up(inner, LANES), mixed = most * call.channels;
  const int64_t blocks = (call.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
  th::AlignedFloats shared(call.num_seqs * mixed);
#pragma omp parallel num_threads(call.num_threads)
  {
    th::AlignedFloats own(2 * row + LANES * call.k_dim);
    std::vector<const T*> rows(most + W - 1);
    th::Spare spare;
    float *gated = own.data(), *ahead = own.data() + 2 * row;
    th::clear_padding<T>(call);
    th::verify::each_stretch(call, [&](auto stretch) {
      const auto sequence = [&](int64_t n) {
        return Drafted<T>(call, n, stretch, (T*)shared.data() + n * mixed, (T*)(own.data() + row));
      };
#pragma omp for schedule(static)
      for (int64_t item = 0; item < call.num_seqs * blocks; ++item) {
        const Drafted<T> seq = sequence(item / blocks);
        const int64_t channel = item % blocks * BLOCK_CHANNELS;
        const int64_t size = std::min(BLOCK_CHANNELS, call.channels - channel);
        if (seq.num_tokens > 0) convolve_drafted<W>(seq, channel, size, rows.data());
      }
#pragma omp for schedule(dynamic, 1)
      for (int64_t item = 0; item < call.num_seqs * call.num_v_heads; ++item) {
        const Drafted<T> seq = sequence(item / call.num_v_heads);
        if (seq.num_tokens > 0) advance_drafted(seq, item % call.num_v_heads, spare, ahead);
      }
#pragma omp for schedule(static)
      for (int64_t item = 0; item < call.num_seqs * most; ++item) {
        const Drafted<T> seq = sequence(item / most);
        const int64_t i = item % most;
        if (i == 0) leave_steps(seq);
        if (!call.z || i < seq.num_replayed || i >= seq.num_tokens) continue;
        for (int64_t g = 0; g < call.norm_groups; ++g)
          finish(call, seq.z(i), seq.out(i), g, gated);
      }
    });
  }
}

void dispatch_several(const Call& call) {
  th::with_width(call.width, [&](auto width) {
    constexpr int W = decltype(width)::value;
    call.is_bf16 ? run_several<W, th::bf16>(call) : run_several<W, float>(call);
  });
}

}  // namespace mamba2

TH_EXPORT_CALL(ssd_step, mamba2::Call) {
  if (!th::indices_are_valid(*call)) return false;
  if (!(call->accepted ? th::verify::records_are_valid(*call) : th::verify::slots_are_valid(*call)))
    return false;
  if (call->accepted || !mamba2::one_token_each(*call))
    mamba2::dispatch_several(*call);
  else
    call->is_bf16 ? mamba2::dispatch<th::bf16>(*call) : mamba2::dispatch<float>(*call);
  return true;
}
