// Backward of real-gated linear recurrent units on a CPU (channel_backward.h). Gates and decays are
// computed both ways, which costs less than to keep them.
#include "channel_backward.h"

#include "call.h"
#include "rg_lru.h"

namespace th::lru {

TH_CALL(Call,
  const void *x, *gates;  // [T, C], [T, H, 2 D]
  const float* log_a;     // [C]
  const int32_t* cu_seqlens;
  const float* initial_state;  // [N, C], or null: sequences start from nothing
  const void* dout;            // [T, C]
  const float* dfinal_state;   // as initial_state
  void *dx, *dgates;           // like x and gates; these and the others are contiguous
  float *dlog_a, *dinitial_state;  // the latter is null where initial_state is
  int64_t num_tokens, num_seqs, num_heads, head_dim;
  int64_t x_stride, gates_stride, gates_head_stride, dout_stride, is_bf16, num_threads;
  double max_sqrt_gradient;
);

template <typename T>
struct Rule {
  static constexpr int STATES = 1, SUMS = 1;

  struct State {
    f32x16 h;

    TH_INLINE void keep(float* p) const { store(p, h); }
    static TH_INLINE State kept(const float* p) { return {load(p)}; }
  };

  // Of the state after a token, whose decay takes it to before the token.
  struct Gradient {
    f32x16 dh, decay;
  };

  const Call* call;
  int64_t channels, channel, gate;  // places in rows of x and of dgates
  const T* gates;                   // of the first token
  int n;
  f32x16 log_a;

  void prepare(const Call& of, int64_t head, int64_t first, int lanes) {
    call = &of, n = lanes;
    channels = of.num_heads * of.head_dim, channel = head * of.head_dim + first;
    gate = channel + head * of.head_dim;
    gates = (const T*)of.gates + head * of.gates_head_stride + first;
    log_a = load(of.log_a + channel, n);
  }

  TH_INLINE Gated gated(int64_t t) const {
    return Gated::of(gates + t * call->gates_stride, call->head_dim, log_a, n);
  }
  TH_INLINE f32x16 input(int64_t t) const {
    return load((const T*)call->x + t * call->x_stride + channel, n);
  }
  // A state of a sequence among those of all, or zeros.
  TH_INLINE f32x16 state(const float* states, int64_t seq) const {
    return states ? load(states + seq * channels + channel, n) : f32x16{};
  }

  TH_INLINE State open(int64_t seq) const { return {state(call->initial_state, seq)}; }

  TH_INLINE State advance(int64_t t, bool is_first, State before) const {
    const Gated g = gated(t);
    const f32x16 scale = is_first && !call->initial_state ? splat(1.0f) : g.scale;
    return {fma(scale, g.input * input(t), g.decay * before.h)};
  }

  TH_INLINE Gradient close(int64_t seq, State) const {
    return {state(call->dfinal_state, seq), splat(1.0f)};
  }

  TH_INLINE void back(int64_t t, bool is_first, State before, Gradient& grad,
                      f32x16 (&sums)[SUMS]) const {
    const f32x16 x = input(t);
    const Gated g = gated(t);
    const T* dout = (const T*)call->dout + t * call->dout_stride + channel;
    const f32x16 dh = fma(grad.dh, grad.decay, load(dout, n));
    f32x16 scale = splat(1.0f), dlog_decay = g.decay * before.h;
    if (!is_first || call->initial_state) {
      const f32x16 root = max(g.scale, splat(float(0.5 / call->max_sqrt_gradient)));
      scale = g.scale, dlog_decay -= g.decay * g.decay * g.input * x / root;
    }
    dlog_decay *= dh;
    const f32x16 dgated = scale * dh;
    T* dgates = (T*)call->dgates + 2 * t * channels + gate;
    store((T*)call->dx + t * channels + channel, dgated * g.input, n);
    store(dgates, dgated * x * g.input * (1.0f - g.input), n);
    store(dgates + call->head_dim, dlog_decay * log_a * g.recurrent * (1.0f - g.recurrent), n);
    sums[0] = fma(dlog_decay, g.recurrent, sums[0]);
    grad = {dh, g.decay};
  }

  TH_INLINE void leave(int64_t seq, State, const Gradient& grad) const {
    if (call->dinitial_state)
      store(call->dinitial_state + seq * channels + channel, grad.dh * grad.decay, n);
  }

  void finish(const f32x16 (&sums)[SUMS]) const { store(call->dlog_a + channel, sums[0], n); }
};

template <typename T>
void backward(const Call& call) {
  walk_channels<Rule<T>, 4>(call, call.num_heads, call.head_dim);
  const int64_t channels = call.num_heads * call.head_dim;
  clear_padding(call, (T*)call.dx, channels), clear_padding(call, (T*)call.dgates, 2 * channels);
}

}  // namespace th::lru

TH_EXPORT_CALL(rg_lru_backward, th::lru::Call) {
  if (!th::offsets_are_valid(*call)) return false;
  call->is_bf16 ? th::lru::backward<th::bf16>(*call) : th::lru::backward<float>(*call);
  return true;
}
