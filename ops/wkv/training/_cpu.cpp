// Backward of RWKV's weighted average of past values on a CPU (channel_backward.h).
//
// The gradient of a state is kept as the state is: numerator and denominator divided by e^exponent,
// of the largest exponent in them. Those of a token are the negative ones of its own sums, so that
// products of a state and its gradient do not overflow.
#include "channel_backward.h"

#include "call.h"
#include "wkv.h"

namespace th::wkv {

TH_CALL(Call,
  const void *k, *v;               // [T, C]
  const float *log_decay, *bonus;  // [C]
  const int32_t* cu_seqlens;
  const float* initial_state;  // [N, 3, C], or null: sequences start from nothing
  const void* dout;            // [T, C]
  const float* dfinal_state;   // as initial_state
  void *dk, *dv;               // like k and v; these and the others are contiguous
  float *dlog_decay, *dbonus, *dinitial_state;  // the last is null where initial_state is
  int64_t num_tokens, num_seqs, num_channels, k_stride, v_stride, dout_stride;
  int64_t is_bf16, num_threads;
);

template <typename T>
struct Rule {
  static constexpr int STATES = 3, SUMS = 2;
  using State = f32x16[STATES];

  struct Gradient {
    Sums sums;
    f32x16 exponent;  // gradient of the state's exponent, beyond what its sums are multiplied by
  };

  const Call* call;
  int64_t channel, channels;
  int n;
  f32x16 log_decay, bonus;

  void prepare(const Call& of, int64_t, int64_t first, int lanes) {
    call = &of, n = lanes, channel = first, channels = of.num_channels;
    log_decay = load(of.log_decay + channel, n), bonus = load(of.bonus + channel, n);
  }

  TH_INLINE f32x16 row(const void* rows, int64_t stride, int64_t t) const {
    return load((const T*)rows + t * stride + channel, n);
  }
  template <typename F>
  F* part(F* states, int64_t seq, int i) const {
    return states + (seq * STATES + i) * channels + channel;
  }

  TH_INLINE void open(int64_t seq, State& h) const {
    h[0] = h[1] = f32x16{}, h[2] = splat(NOTHING);
    if (call->initial_state)
      for (int i = 0; i < STATES; ++i) h[i] = load(part(call->initial_state, seq, i), n);
  }

  TH_INLINE void advance(int64_t t, bool, State& h) const {
    const Sums sums = Sums{h[0], h[1], h[2] + log_decay}.with(row(call->k, call->k_stride, t),
                                                              row(call->v, call->v_stride, t));
    h[0] = sums.numerator, h[1] = sums.denominator, h[2] = sums.exponent;
  }

  TH_INLINE Gradient close(int64_t seq, const State& h) const {
    if (!call->dfinal_state) return {{f32x16{}, f32x16{}, splat(NOTHING)}, f32x16{}};
    const f32x16 above = load(part(call->dfinal_state, seq, 0), n);
    const f32x16 below = load(part(call->dfinal_state, seq, 1), n);
    const f32x16 own = load(part(call->dfinal_state, seq, 2), n);
    return {{above, below, -h[2]}, own - above * h[0] - below * h[1]};
  }

  TH_INLINE void back(int64_t t, bool, const State& h, Gradient& grad, f32x16 (&sums)[SUMS]) const {
    const f32x16 k = row(call->k, call->k_stride, t), v = row(call->v, call->v_stride, t);
    const Sums& after = grad.sums;
    const f32x16 seen = exp(k + after.exponent);  // what the token is to all later ones
    f32x16 dv = seen * after.numerator, dk = fma(dv, v, seen * after.denominator);
    const f32x16 decayed = exp(log_decay + h[2] + after.exponent);
    sums[0] += decayed * fma(after.numerator, h[0], after.denominator * h[1]);
    // The exponent of the state after the token is that before it or the token's own.
    const auto is_kept = h[2] + log_decay > k;
    dk += select(is_kept, f32x16{}, grad.exponent);
    grad.exponent = select(is_kept, grad.exponent, f32x16{});
    sums[0] += grad.exponent;

    const Sums all = Sums{h[0], h[1], h[2]}.with(k + bonus, v);
    const f32x16 out = all.numerator / all.denominator;
    const f32x16 dall = row(call->dout, call->dout_stride, t) / all.denominator;
    const f32x16 own = exp(k + bonus - all.exponent) * dall, down = own * (v - out);
    store((T*)call->dv + t * channels + channel, dv + own, n);
    store((T*)call->dk + t * channels + channel, dk + down, n);
    sums[1] += down;
    grad.sums.exponent += log_decay;
    grad.sums = grad.sums.with(-all.exponent, dall, -dall * out);
  }

  TH_INLINE void leave(int64_t seq, const State& h, const Gradient& grad) const {
    if (!call->dinitial_state) return;
    const f32x16 weight = exp(h[2] + grad.sums.exponent);
    const f32x16 above = weight * grad.sums.numerator, below = weight * grad.sums.denominator;
    store(part(call->dinitial_state, seq, 0), above, n);
    store(part(call->dinitial_state, seq, 1), below, n);
    store(part(call->dinitial_state, seq, 2), fma(above, h[0], fma(below, h[1], grad.exponent)), n);
  }

  void finish(const f32x16 (&sums)[SUMS]) const {
    store(call->dlog_decay + channel, sums[0], n), store(call->dbonus + channel, sums[1], n);
  }
};

template <typename T>
void backward(const Call& call) {
  walk_channels<Rule<T>, 2>(call, 1, call.num_channels);
  clear_padding(call, (T*)call.dk, call.num_channels);
  clear_padding(call, (T*)call.dv, call.num_channels);
}

}  // namespace th::wkv

TH_EXPORT_CALL(wkv_backward, th::wkv::Call) {
  if (!th::offsets_are_valid(*call)) return false;
  call->is_bf16 ? th::wkv::backward<th::bf16>(*call) : th::wkv::backward<float>(*call);
  return true;
}
