// One token of each sequence through the mixer of a delta rule: convolution, gates, recurrence and
// gated norm of a key head and its value heads, in one thread.
//
// An item is a sequence and a key head. It alone reads and writes the channels and states of these
// heads, so that nothing is shared between threads and the state of the convolution may move at
// once. What passes from part to part is rounded to the op's dtype, as when each part is an op.
//
// A mixer says how it decays and how it norms:
//
//   struct Mixer {
//     template <typename T> static void decay(const Call&, const T* a, int64_t j, float* decay);
//         the decays [K] of value head j
//     template <typename T> static void gated_norm(const Call&, const T* o, const T* z, T* out);
//         what the op returns of the rule's output and its gate, all [V]
//   };
//
// which delta_verify.h exports.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "aligned_floats.h"
#include "call.h"
#include "conv_step.h"
#include "delta_rule_recurrent.h"
#include "recurrent_call.h"
#include "simd.h"
#include "state_panels.h"
#include "threads.h"

namespace th::step {

TH_CALL(Call,
  const void *qkv, *z, *b, *a;  // [T, C], [T, HV V], [T, HV], [T, HV or HV K] in the op's dtype
  const void *conv_weight, *conv_bias, *A_log, *dt_bias, *norm_weight;  // wide: in float32
  void* conv_state;  // [S, W - 1, C]
  float* state;      // [S, HV, V, K]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  void* records;            // [S, D, R]
  const int32_t* accepted;  // [N]; both null where no drafts are verified
  void* out;  // [T, HV V], contiguous
  int64_t num_tokens, num_seqs, num_slots, channels, width, num_v_heads, v_dim, k_dim;
  int64_t num_records, record_width;  // D, R
  int64_t qkv_stride, z_stride, b_stride, a_stride;  // from token to token
  int64_t silu, is_bf16, wide_A_log, wide_dt_bias, wide_norm, is_bounded;
  int64_t sigmoid_gate, state_streams, num_threads;
  double scale, beta_scale, gate_lower_bound, norm_eps;
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
  static int64_t padded(int64_t size) { return round_up(size, LANES); }
};

// One sequence's token.
template <typename T>
struct Sequence {
  using Type = T;
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

  const T* inputs() const { return (const T*)call.qkv + token * call.qkv_stride; }
  const T* z(int64_t j) const { return (const T*)call.z + token * call.z_stride + j * call.v_dim; }
  const T* a() const { return (const T*)call.a + token * call.a_stride; }
  const T* b() const { return (const T*)call.b + token * call.b_stride; }
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
  float* open_state(int64_t j, Spare& spare) const {
    const int64_t size = call.v_dim * call.k_dim;
    float* opened = slot ? state(slot, j) : spare.take(size);
    if (!initial)
      std::fill(opened, opened + size, 0.0f);
    else if (initial != slot)
      std::memcpy(opened, state(initial, j), size * sizeof(float));
    return opened;
  }
};

// n <= LANES elements of a parameter, from i on, which may be float32 whatever the op's dtype is.
template <typename T>
TH_INLINE f32x16 parameter(const void* values, bool wide, int64_t i, int n) {
  return wide ? load((const float*)values + i, n) : load((const T*)values + i, n);
}
template <typename T>
float parameter(const void* values, bool wide, int64_t i) {
  return wide ? ((const float*)values)[i] : to_float(((const T*)values)[i]);
}

// 1 / rms(o), for a gated norm.
template <typename T>
TH_INLINE f32x16 norm_factor(const Call& call, const T* o) {
  const float mean = squared_norm(o, call.v_dim) / float(call.v_dim);
  return splat(1.0f / std::sqrt(mean + float(call.norm_eps)));
}

// What a token does to the state of value head j: its gates are made of its inputs a and b, and its
// decay and what it reads are left in `decay` and `read`.
template <typename Mixer, typename T>
delta::Token gated_token(const Call& call, const T* a, const T* b, int64_t j, const float* unit_q,
                         const float* unit_k, float* decay, float* read) {
  Mixer::decay(call, a, j, decay);
  for_lanes(call.k_dim, [&](int64_t i, int n) TH_LAMBDA {
    store(read + i, load(unit_k + i, n) * load(decay + i, n), n);
  });
  const float beta = float(call.beta_scale) / (1.0f + std::exp(-to_float(b[j])));
  return {decay, unit_q, unit_k, read, beta};
}

// Asks for what the next item convolves: short pieces of many rows, which the hardware does not see
// coming, while this one waits for its states.
template <typename T>
void fetch_item(const Sequence<T>& seq, int64_t h, int64_t group) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = group * call.v_dim, k_size = call.num_v_heads / group * K;
  const auto fetch = [&](const T* row) {
    prefetch(row + h * K, K);
    prefetch(row + k_size + h * K, K);
    prefetch(row + 2 * k_size + h * V, V);
  };
  fetch(seq.inputs());
  if (seq.initial)
    for (int64_t w = 0; w < call.width - 1; ++w) fetch(seq.past(seq.initial, w));
  prefetch(seq.z(h * group), V);
}

template <typename Mixer, int W, typename T>
void run_item(const Sequence<T>& seq, int64_t h, int64_t group, const Scratch<T>& s, Spare& spare) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim, k_size = call.num_v_heads / group * K;
  const auto step = delta::choose_step<T>(K);
  if (seq.initial) prefetch(seq.state(seq.initial, h * group), delta::AHEAD);
  convolve<W>(seq, h * K, K, s.q);
  convolve<W>(seq, k_size + h * K, K, s.k);
  delta::load_key(s.q, K, true, float(call.scale), s.unit_q);
  delta::load_key(s.k, K, true, 1.0f, s.unit_k);
  for (int64_t j = h * group; j < (h + 1) * group; ++j) {
    float* state = seq.open_state(j, spare);
    convolve<W>(seq, 2 * k_size + j * V, V, s.v);
    const auto token =
        gated_token<Mixer>(call, seq.a(), seq.b(), j, s.unit_q, s.unit_k, s.decay, s.read);
    step(K, V, call.state_streams, token, s.v, state, s.o);
    Mixer::gated_norm(call, s.o, seq.z(j), seq.out(j));
  }
}

// Threads for so many tokens, each of which reads the states of its sequence.
inline int num_threads_for(const Call& call, int64_t num_tokens) {
  const int64_t state_bytes = call.num_v_heads * call.v_dim * call.k_dim * int64_t(sizeof(float));
  return threads_for(num_tokens * state_bytes, call.num_threads);
}

template <typename Mixer, int W, typename T>
void run(const Call& call) {
  const int64_t k_size = (call.channels - call.num_v_heads * call.v_dim) / 2;
  const int64_t num_k_heads = k_size / call.k_dim, group = call.num_v_heads / num_k_heads;
  const int64_t num_items = call.num_seqs * num_k_heads;
  const int64_t stretch = std::max<int64_t>(1, num_items / (8 * call.num_threads));
#pragma omp parallel num_threads(num_threads_for(call, call.num_seqs))
  {
    AlignedFloats memory(Scratch<T>::num_floats(call));
    const Scratch<T> scratch(call, memory.data());
    Spare spare;
    clear_padding<T>(call);
#pragma omp for schedule(dynamic, stretch)
    for (int64_t item = 0; item < num_items; ++item) {
      const Sequence<T> seq(call, item / num_k_heads);
      if (item + 1 < num_items)
        fetch_item(Sequence<T>(call, (item + 1) / num_k_heads), (item + 1) % num_k_heads, group);
      if (seq.is_live) run_item<Mixer, W>(seq, item % num_k_heads, group, scratch, spare);
    }
  }
}

template <typename Mixer, typename T>
void dispatch(const Call& call) {
  with_width(call.width, [&](auto width) { step::run<Mixer, decltype(width)::value, T>(call); });
}

inline bool one_token_each(const Call& call) {
  for (int64_t n = 0; n < call.num_seqs; ++n)
    if (call.cu_seqlens[n + 1] - call.cu_seqlens[n] > 1) return false;
  return true;
}

}  // namespace th::step
