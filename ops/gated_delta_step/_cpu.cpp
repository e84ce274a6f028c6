// One token of each sequence through a gated-delta-rule mixer: convolution, gates, recurrence and
// gated norm of a key head and its value heads, in one thread.
//
// An item is a sequence and a key head. It alone reads and writes the channels and states of these
// heads, so that nothing is shared between threads and the state of the convolution may move at
// once. What passes from part to part is rounded to the op's dtype, as when each part is an op.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "aligned_floats.h"
#include "call.h"
#include "delta_rule_recurrent.h"
#include "recurrent_call.h"
#include "simd.h"
#include "state_panels.h"

namespace step {

using th::LANES;
using th::f32x16;

constexpr int MAX_WIDTH = 8;

TH_CALL(Call,
  const void *qkv, *z, *b, *a;  // [T, C], [T, HV V], [T, HV], [T, HV] in the op's dtype
  const void *conv_weight, *conv_bias, *A_log, *dt_bias, *norm_weight;  // wide: in float32
  void* conv_state;  // [S, W - 1, C]
  float* state;      // [S, HV, V, K]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  void* out;  // [T, HV V], contiguous
  int64_t num_tokens, num_seqs, num_slots, channels, width, num_v_heads, v_dim, k_dim;
  int64_t qkv_stride, z_stride, b_stride, a_stride;  // from token to token
  int64_t silu, is_bf16, wide_A_log, wide_dt_bias, wide_norm, num_threads;
  double scale, beta_scale, norm_eps;
);

// Memory of a thread: a head's q, k, v and o in the op's dtype, and what the recurrence reads.
template <typename T>
struct Scratch {
  T *q, *k, *v, *o;
  float *decay, *unit_q, *unit_k, *read;

  static int64_t num_floats(const Call& call) { return 6 * padded(call.k_dim) + 2 * padded(call.v_dim); }

  Scratch(const Call& call, float* memory) {
    const int64_t K = padded(call.k_dim), V = padded(call.v_dim);
    decay = memory, unit_q = decay + K, unit_k = unit_q + K, read = unit_k + K;
    q = (T*)(read + K), k = (T*)(read + 2 * K), v = (T*)(read + 3 * K), o = (T*)(read + 3 * K + V);
  }

 private:
  static int64_t padded(int64_t size) { return th::round_up(size, LANES); }
};

// One sequence's token.
template <typename T>
struct Sequence {
  const Call& call;
  int64_t token;
  bool is_live;
  int64_t initial, slot;  // where the states are read and where they are left; 0: nowhere

  Sequence(const Call& call, int64_t n)
      : call(call),
        token(call.cu_seqlens[n]),
        is_live(call.cu_seqlens[n + 1] > token),
        initial(call.initial_indices[n]),
        slot(call.state_indices[n]) {}

  const T* qkv() const { return (const T*)call.qkv + token * call.qkv_stride; }
  const T* z(int64_t j) const { return (const T*)call.z + token * call.z_stride + j * call.v_dim; }
  float b(int64_t j) const { return th::to_float(((const T*)call.b)[token * call.b_stride + j]); }
  float a(int64_t j) const { return th::to_float(((const T*)call.a)[token * call.a_stride + j]); }
  T* out(int64_t j) const {
    return (T*)call.out + (token * call.num_v_heads + j) * call.v_dim;
  }
  T* past(int64_t at, int64_t i) const {
    return (T*)call.conv_state + (at * (call.width - 1) + i) * call.channels;
  }
  float* state(int64_t at, int64_t j) const {
    return call.state + (at * call.num_v_heads + j) * call.v_dim * call.k_dim;
  }
  // The state of a head where it may be advanced in place: in its slot, or in `spare`.
  float* open_state(int64_t j, th::Spare& spare) const {
    const int64_t size = call.v_dim * call.k_dim;
    float* opened = slot ? state(slot, j) : spare.take(size);
    if (!initial)
      std::fill(opened, opened + size, 0.0f);
    else if (initial != slot)
      std::memcpy(opened, state(initial, j), size * sizeof(float));
    return opened;
  }
};

// ---- convolution ------------------------------------------------------------------------------

// taps[w] = the w-th of each of LANES filters that lie one after the other.
template <int W, typename T>
TH_INLINE void load_taps(const T* weight, int n, f32x16 (&taps)[W]) {
  alignas(64) float columns[W][LANES] = {};
  for (int c = 0; c < n; ++c)
    for (int w = 0; w < W; ++w) columns[w][c] = th::to_float(weight[c * W + w]);
  for (int w = 0; w < W; ++w) taps[w] = th::load(columns[w]);
}

// Every other lane of a and then of b, from lane FIRST on.
template <int FIRST, int... LANE>
TH_INLINE f32x16 pick(f32x16 a, f32x16 b, std::integer_sequence<int, LANE...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (2 * LANE + FIRST)...);
#else
  return __builtin_shuffle(a, b, th::i32x16{(2 * LANE + FIRST)...});
#endif
}
template <int FIRST>
TH_INLINE f32x16 every_other(f32x16 a, f32x16 b) {
  return pick<FIRST>(a, b, std::make_integer_sequence<int, LANES>{});
}

// The same of whole vectors of four taps, by shuffles.
template <typename T>
TH_INLINE void load_four_taps(const T* weight, f32x16 (&taps)[4]) {
  f32x16 x[4];
  for (int i = 0; i < 4; ++i) x[i] = th::load(weight + i * LANES);
  const f32x16 even[2] = {every_other<0>(x[0], x[1]), every_other<0>(x[2], x[3])};
  const f32x16 odd[2] = {every_other<1>(x[0], x[1]), every_other<1>(x[2], x[3])};
  taps[0] = every_other<0>(even[0], even[1]);
  taps[1] = every_other<0>(odd[0], odd[1]);
  taps[2] = every_other<1>(even[0], even[1]);
  taps[3] = every_other<1>(odd[0], odd[1]);
}

// The convolution of n <= LANES channels from `channel` on, and their inputs moved up by one.
template <int W, typename T>
TH_INLINE void convolve_lanes(const Sequence<T>& seq, int64_t channel, int n, T* out) {
  const Call& call = seq.call;
  f32x16 taps[W], x[W];
  const T* weight = (const T*)call.conv_weight + channel * W;
  if constexpr (W == 4) {
    n == LANES ? load_four_taps(weight, taps) : load_taps<W>(weight, n, taps);
  } else {
    load_taps<W>(weight, n, taps);
  }
#pragma GCC unroll 8
  for (int w = 0; w < W - 1; ++w)
    x[w] = seq.initial ? th::load(seq.past(seq.initial, w) + channel, n) : f32x16{};
  x[W - 1] = th::load(seq.qkv() + channel, n);
  f32x16 y{};
  if (call.conv_bias) y = th::load((const T*)call.conv_bias + channel, n);
#pragma GCC unroll 8
  for (int w = 0; w < W; ++w) y = th::fma(taps[w], x[w], y);
  th::store(out, call.silu ? th::silu(y) : y, n);
  if (seq.slot)
#pragma GCC unroll 8
    for (int w = 0; w < W - 1; ++w) th::store(seq.past(seq.slot, w) + channel, x[w + 1], n);
}

template <int W, typename T>
TH_NOINLINE void convolve(const Sequence<T>& seq, int64_t channel, int64_t size, T* out) {
  th::for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    convolve_lanes<W>(seq, channel + i, n, out + i);
  });
}

// ---- gates and norm ---------------------------------------------------------------------------

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// A parameter of a head, which may be float32 whatever the op's dtype is.
template <typename T>
float gate_parameter(const void* parameter, bool wide, int64_t j) {
  return wide ? ((const float*)parameter)[j] : th::to_float(((const T*)parameter)[j]);
}

template <typename T>
float decay(const Sequence<T>& seq, int64_t j) {
  const Call& call = seq.call;
  const float rate = std::exp(gate_parameter<T>(call.A_log, call.wide_A_log, j));
  const float bias = gate_parameter<T>(call.dt_bias, call.wide_dt_bias, j);
  return std::exp(-rate * softplus(seq.a(j) + bias));
}

template <typename T>
float step_size(const Sequence<T>& seq, int64_t j) {
  return float(seq.call.beta_scale) / (1.0f + std::exp(-seq.b(j)));
}

template <typename T>
TH_INLINE f32x16 rounded(f32x16 x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  else return th::widen(th::narrow(x));
}

// out = weight * (o / rms(o)) * silu(z): the weight is applied to what is rounded, and the product
// rounded where both are in the op's dtype.
template <bool WIDE, typename T>
void gated_norm(const Call& call, const T* o, const T* z, T* out) {
  const float mean = th::squared_norm(o, call.v_dim) / float(call.v_dim);
  const f32x16 factor = th::splat(1.0f / std::sqrt(mean + float(call.norm_eps)));
  const auto weight = (const std::conditional_t<WIDE, float, T>*)call.norm_weight;
  th::for_lanes(call.v_dim, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 normed = rounded<T>(th::load(o + i, n) * factor);
    const f32x16 product = th::load(weight + i, n) * normed;
    const f32x16 weighted = WIDE ? product : rounded<T>(product);
    th::store(out + i, weighted * th::silu(th::load(z + i, n)), n);
  });
}

// ---- items ------------------------------------------------------------------------------------

template <int W, typename T>
void run_item(const Sequence<T>& seq, int64_t h, int64_t group, const Scratch<T>& s,
              th::Spare& spare) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim, k_size = call.num_v_heads / group * K;
  const auto step = th::delta::choose_step<T>(K);
  if (seq.initial) th::prefetch(seq.state(seq.initial, h * group), th::delta::AHEAD);
  convolve<W>(seq, h * K, K, s.q);
  convolve<W>(seq, k_size + h * K, K, s.k);
  th::delta::load_key(s.q, K, true, float(call.scale), s.unit_q);
  th::delta::load_key(s.k, K, true, 1.0f, s.unit_k);
  for (int64_t j = h * group; j < (h + 1) * group; ++j) {
    float* state = seq.open_state(j, spare);
    convolve<W>(seq, 2 * k_size + j * V, V, s.v);
    std::fill(s.decay, s.decay + K, decay(seq, j));
    th::for_lanes(K, [&](int64_t i, int n) TH_LAMBDA {
      th::store(s.read + i, th::load(s.unit_k + i, n) * th::load(s.decay + i, n), n);
    });
    const th::delta::Token token{s.decay, s.unit_q, s.unit_k, s.read, step_size(seq, j)};
    step(K, V, token, s.v, state, s.o);
    call.wide_norm ? gated_norm<true>(call, s.o, seq.z(j), seq.out(j))
                   : gated_norm<false>(call, s.o, seq.z(j), seq.out(j));
  }
}

template <int W, typename T>
void run(const Call& call) {
  const int64_t k_size = (call.channels - call.num_v_heads * call.v_dim) / 2;
  const int64_t num_k_heads = k_size / call.k_dim, group = call.num_v_heads / num_k_heads;
  const int64_t num_items = call.num_seqs * num_k_heads;
  const int64_t stretch = std::max<int64_t>(1, num_items / (8 * call.num_threads));
  const int64_t row = call.num_v_heads * call.v_dim;
#pragma omp parallel num_threads(call.num_threads)
  {
    th::AlignedFloats memory(Scratch<T>::num_floats(call));
    const Scratch<T> scratch(call, memory.data());
    th::Spare spare;
#pragma omp for schedule(static) nowait
    for (int64_t t = call.cu_seqlens[call.num_seqs]; t < call.num_tokens; ++t)
      std::memset((T*)call.out + t * row, 0, row * sizeof(T));
#pragma omp for schedule(dynamic, stretch)
    for (int64_t item = 0; item < num_items; ++item) {
      const Sequence<T> seq(call, item / num_k_heads);
      if (seq.is_live) run_item<W>(seq, item % num_k_heads, group, scratch, spare);
    }
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

}  // namespace step

TH_EXPORT_CALL(gated_delta_step, step::Call) {
  if (!th::indices_are_valid(*call) || !step::one_token_each(*call)) return false;
  call->is_bf16 ? step::dispatch<th::bf16>(*call) : step::dispatch<float>(*call);
  return true;
}
