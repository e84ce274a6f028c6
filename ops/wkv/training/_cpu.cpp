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

  struct State {
    Sums sums;

    TH_INLINE void keep(float* p) const {
      store(p, sums.numerator), store(p + LANES, sums.denominator);
      store(p + 2 * LANES, sums.exponent);
    }
    static TH_INLINE State kept(const float* p) {
      return {{load(p), load(p + LANES), load(p + 2 * LANES)}};
    }
  };

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

  TH_INLINE State open(int64_t seq) const {
    if (!call->initial_state) return {{f32x16{}, f32x16{}, splat(NOTHING)}};
    const float* first = part(call->initial_state, seq, 0);
    return {{load(first, n), load(first + channels, n), load(first + 2 * channels, n)}};
  }

  TH_INLINE State advance(int64_t t, bool, State before) const {
    before.sums.exponent += log_decay;
    return {before.sums.with(row(call->k, call->k_stride, t), row(call->v, call->v_stride, t))};
  }

  TH_INLINE Gradient close(int64_t seq, State last) const {
    const Sums& h = last.sums;
    if (!call->dfinal_state) return {{f32x16{}, f32x16{}, splat(NOTHING)}, f32x16{}};
    const f32x16 above = load(part(call->dfinal_state, seq, 0), n);
    const f32x16 below = load(part(call->dfinal_state, seq, 1), n);
    const f32x16 own = load(part(call->dfinal_state, seq, 2), n);
    return {{above, below, -h.exponent}, own - above * h.numerator - below * h.denominator};
  }

  TH_INLINE void back(int64_t t, bool, State before, Gradient& grad,
                      f32x16 (&sums)[SUMS]) const {
    const Sums& h = before.sums;
    const f32x16 k = row(call->k, call->k_stride, t), v = row(call->v, call->v_stride, t);
    const Sums all = h.with(k + bonus, v);
    const f32x16 out = all.numerator / all.denominator;
    const f32x16 dall = row(call->dout, call->dout_stride, t) / all.denominator;
    const f32x16 own = exp(k + bonus - all.exponent) * dall, down = own * (v - out);
    sums[1] += down;

    const Sums& after = grad.sums;
    const f32x16 seen = exp(k + after.exponent);  // what the token is to all later ones
    const f32x16 dv = seen * after.numerator, dk = fma(dv, v, seen * after.denominator);
    // The exponent of the state after the token is that before it or the token's own.
    const auto is_kept = h.exponent + log_decay > k;
    const f32x16 dexponent = select(is_kept, f32x16{}, grad.exponent);
    store((T*)call->dv + t * channels + channel, dv + own, n);
    store((T*)call->dk + t * channels + channel, dk + dexponent + down, n);

    const f32x16 decayed = exp(log_decay + h.exponent + after.exponent);
    grad.exponent = select(is_kept, grad.exponent, f32x16{});
    sums[0] += decayed * fma(after.numerator, h.numerator, after.denominator * h.denominator);
    sums[0] += grad.exponent;
    grad.sums.exponent += log_decay;
    grad.sums = grad.sums.with(-all.exponent, dall, -dall * out);
  }

  TH_INLINE void leave(int64_t seq, State first, const Gradient& grad) const {
    const Sums& h = first.sums;
    if (!call->dinitial_state) return;
    const f32x16 weight = exp(h.exponent + grad.sums.exponent);
    const f32x16 above = weight * grad.sums.numerator, below = weight * grad.sums.denominator;
    store(part(call->dinitial_state, seq, 0), above, n);
    store(part(call->dinitial_state, seq, 1), below, n);
    const f32x16 both = fma(above, h.numerator, fma(below, h.denominator, grad.exponent));
    store(part(call->dinitial_state, seq, 2), both, n);
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
