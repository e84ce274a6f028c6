// Tokens of sequences through a lightning mixer: norms and rotation of q and k, recurrence, norm and
// gate. One token of each sequence; or stretches of tokens that are all certain; or certain ones and
// drafts after them.
//
// A thread takes a head of a sequence at a time, with all of its tokens. A norm may span all heads:
// the threads wait for one another, and then share tokens.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "aligned_floats.h"
#include "call.h"
#include "recurrent_call.h"
#include "scalar_decay.h"
#include "simd.h"
#include "verify.h"

namespace lightning {

using th::LANES;
using th::f32x16;

TH_CALL(Call,
  const void *qkv, *gate;                     // [T, 3 H D], [T, H D] or null
  const void *q_norm_weight, *k_norm_weight;  // wide: in float32; or null
  const float *cos, *sin, *slopes;            // [T, R / 2] or null, [H]
  const void* norm_weight;                    // wide: in float32; or null
  float* state;                               // [S, H, D, D]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  float* records;  // [S, M, 2 H D]; null, as accepted, where no drafts are verified
  const int32_t* accepted;
  void* out;  // [T, H D] in the op's dtype; in float32 where there is no gate
  int64_t num_tokens, num_seqs, num_slots, num_v_heads, v_dim, k_dim, num_records;  // H, D, D, M
  int64_t qkv_stride, gate_stride, cos_stride, sin_stride;  // from token to token
  int64_t half, silu, norm_groups, is_bf16;                 // R / 2
  int64_t wide_q_norm, wide_k_norm, wide_norm, state_streams, num_threads;
  double scale, norm_eps;
);

template <typename T>
struct Sequence : th::RecurrentSequence<T, Call> {
  using Type = T;
  int64_t token;

  Sequence(const Call& call, int64_t n)
      : th::RecurrentSequence<T, Call>(call, n), token(this->start) {}
};

template <typename T>
struct Tokens : th::verify::Drafted<Sequence<T>> {
  using th::verify::Drafted<Sequence<T>>::Drafted;

  // q, k or v of a new token on head h.
  const T* input(int64_t i, int64_t part, int64_t h) const {
    const Call& call = this->call;
    const int64_t channel = (part * call.num_v_heads + h) * call.k_dim;
    return (const T*)call.qkv + this->place(i) * call.qkv_stride + channel;
  }
  // k (0) or v (1) of head h in a record.
  float* record(int64_t at, int64_t i, int64_t part, int64_t h) const {
    const Call& call = this->call;
    return call.records +
           (((at * call.num_records + i) * 2 + part) * call.num_v_heads + h) * call.k_dim;
  }
};

// Memory of a thread: q, k and v of a head's tokens as the recurrence takes them, rows of a state that
// are not left, and what replayed tokens read.
struct Scratch {
  float *q, *k, *v, *ahead, *unread;

  static int64_t num_floats(const Call& call) {
    return (3 * th::verify::most_tokens(call) + LANES + 1) * call.k_dim;
  }
  Scratch(const Call& call, float* memory) {
    const int64_t size = th::verify::most_tokens(call) * call.k_dim;
    q = memory, k = q + size, v = k + size, ahead = v + size, unread = ahead + LANES * call.k_dim;
  }
};

// ---- what the recurrence takes ----------------------------------------------------------------

template <typename T>
f32x16 rounded(f32x16 x) {
  T lanes[LANES];
  th::store(lanes, x);
  return th::load(lanes);
}

template <typename T>
void activate(const Call& call, const T* x, float* y) {
  th::for_lanes(call.k_dim, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 x_i = th::load(x + i, n);
    th::store(y + i, call.silu ? rounded<T>(th::silu(x_i)) : x_i, n);
  });
}

template <typename Weight>
void norm(const Call& call, const Weight* weight, float* x) {
  const float mean = th::squared_norm(x, call.k_dim) / float(call.k_dim);
  const f32x16 factor = th::splat(1.0f / std::sqrt(mean + float(call.norm_eps)));
  th::for_lanes(call.k_dim, [&](int64_t i, int n) TH_LAMBDA {
    th::store(x + i, th::load(weight + i, n) * (th::load(x + i, n) * factor), n);
  });
}

void rotate(const Call& call, int64_t token, float* x) {
  const float *cos = call.cos + token * call.cos_stride, *sin = call.sin + token * call.sin_stride;
  float* other = x + call.half;
  th::for_lanes(call.half, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 a = th::load(x + i, n), b = th::load(other + i, n);
    const f32x16 c = th::load(cos + i, n), s = th::load(sin + i, n);
    th::store(x + i, th::fma(a, c, -(b * s)), n);
    th::store(other + i, th::fma(b, c, a * s), n);
  });
}

// A new token's q or k on a head.
template <typename T>
void prepare(const Call& call, const T* x, const void* weight, bool wide, int64_t token, float* y) {
  activate(call, x, y);
  if (weight) wide ? norm(call, (const float*)weight, y) : norm(call, (const T*)weight, y);
  if (call.half) rotate(call, token, y);
}

// Token i on head h.
template <typename T>
void prepare(const Tokens<T>& seq, int64_t i, int64_t h, const Scratch& s) {
  const Call& call = seq.call;
  const int64_t D = call.k_dim;
  if (seq.is_replayed(i)) {
    std::copy_n(seq.record(seq.initial, i, 0, h), D, s.k + i * D);
    std::copy_n(seq.record(seq.initial, i, 1, h), D, s.v + i * D);
    std::fill_n(s.q + i * D, D, 0.0f);
    return;
  }
  const int64_t token = seq.place(i);
  prepare(call, seq.input(i, 0, h), call.q_norm_weight, call.wide_q_norm, token, s.q + i * D);
  prepare(call, seq.input(i, 1, h), call.k_norm_weight, call.wide_k_norm, token, s.k + i * D);
  activate(call, seq.input(i, 2, h), s.v + i * D);
}

// ---- recurrence -------------------------------------------------------------------------------

// All tokens of a sequence on head h. A few rows of its state go through all of them, and stay in L1;
// those of tokens that are not certain are a copy.
template <typename T>
void run_head(const Tokens<T>& seq, int64_t h, float* o, const Scratch& s, th::Spare& spare) {
  const Call& call = seq.call;
  const int64_t D = call.k_dim, row = call.num_v_heads * D;
  const float decay = std::exp(-call.slopes[h]), scale = float(call.scale);
  const auto step = th::scalar_decay::choose_step<float>(D);
  float* state = seq.open_state(h, spare);
  const auto read = [&](int64_t i) {
    return seq.is_replayed(i) ? s.unread : o + seq.place(i) * row + h * D;
  };
  for (int64_t i = 0; i < seq.num_tokens; ++i) prepare(seq, i, h, s);
  const bool is_alone = seq.num_tokens == 1;
  const int64_t block = is_alone ? th::scalar_decay::MAX_ROWS : LANES;
  for (int64_t r = 0; r < D; r += block) {
    const int64_t num_rows = std::min(block, D - r);
    float* rows = state + r * D;
    for (int64_t i = 0; i < seq.num_tokens; ++i) {
      if (i == seq.num_certain) {
        std::copy_n(rows, num_rows * D, s.ahead);
        rows = s.ahead;
      }
      const th::scalar_decay::Token<float> token{
          s.q + i * D, s.k + i * D, s.v + i * D + r, decay, 1.0f, 0.0f, scale, read(i) + r};
      step(token, D, num_rows, is_alone ? call.state_streams : 1, rows);
    }
  }
  if (!call.q_norm_weight)
    for (int64_t i = seq.num_replayed; i < seq.num_tokens; ++i)
      th::for_lanes(D, [&](int64_t c, int n) TH_LAMBDA {
        th::store(read(i) + c, rounded<T>(th::load(read(i) + c, n)), n);
      });
  if (!seq.slot) return;
  for (int64_t i = seq.num_certain; i < seq.num_tokens; ++i) {
    std::copy_n(s.k + i * D, D, seq.record(seq.slot, i - seq.num_certain, 0, h));
    std::copy_n(s.v + i * D, D, seq.record(seq.slot, i - seq.num_certain, 1, h));
  }
}

// ---- norm and gate ----------------------------------------------------------------------------

// One group of a token's channels.
template <typename T, typename Weight>
void finish(const Call& call, int64_t token, int64_t group, const float* o, const Weight* weight) {
  const int64_t width = call.num_v_heads * call.v_dim, size = width / call.norm_groups;
  const int64_t channel = group * size;
  const T* gate = (const T*)call.gate + token * call.gate_stride + channel;
  T* out = (T*)call.out + token * width + channel;
  o += token * width + channel, weight += channel;
  const float mean = th::squared_norm(o, size) / float(size);
  const f32x16 factor = th::splat(1.0f / std::sqrt(mean + float(call.norm_eps)));
  th::for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    const f32x16 normed = th::load(weight + i, n) * (th::load(o + i, n) * factor);
    th::store(out + i, normed * th::sigmoid(th::load(gate + i, n)), n);
  });
}

template <typename T>
void run(const Call& call) {
  const int64_t width = call.num_v_heads * call.v_dim, num_held = call.cu_seqlens[call.num_seqs];
  th::AlignedFloats read(call.gate ? num_held * width : 0);
  float* o = call.gate ? read.data() : (float*)call.out;
#pragma omp parallel num_threads(call.num_threads)
  {
    th::AlignedFloats memory(Scratch::num_floats(call));
    const Scratch scratch(call, memory.data());
    th::Spare spare;
    call.gate ? th::clear_padding<T>(call) : th::clear_padding<float>(call);
    th::verify::each_stretch(call, [&](auto stretch) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t item = 0; item < call.num_seqs * call.num_v_heads; ++item) {
        const Tokens<T> seq(call, item / call.num_v_heads, stretch);
        if (seq.num_tokens > 0) run_head(seq, item % call.num_v_heads, o, scratch, spare);
      }
    });
#pragma omp for schedule(static)
    for (int64_t item = 0; item < (call.gate ? num_held * call.norm_groups : 0); ++item) {
      const int64_t token = item / call.norm_groups, group = item % call.norm_groups;
      call.wide_norm ? finish<T>(call, token, group, o, (const float*)call.norm_weight)
                     : finish<T>(call, token, group, o, (const T*)call.norm_weight);
    }
  }
}

}  // namespace lightning

TH_EXPORT_CALL(lightning_step, lightning::Call) {
  if (!th::indices_are_valid(*call)) return false;
  if (!(call->accepted ? th::verify::records_are_valid(*call) : th::verify::slots_are_valid(*call)))
    return false;
  call->is_bf16 ? lightning::run<th::bf16>(*call) : lightning::run<float>(*call);
  return true;
}
