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

template <int VECTORS, typename T>
struct Walk {
  const Call& call;
  int64_t head, first, channel, channels;
  int n;
  float* kept;
  f32x16 log_a[VECTORS], total[VECTORS];

  Walk(const Call& call, int64_t head, int64_t first, int n, float* kept)
      : call(call), head(head), first(first), channel(head * call.head_dim + first),
        channels(call.num_heads * call.head_dim), n(n), kept(kept) {
    for (int v = 0; v < VECTORS; ++v) {
      log_a[v] = load(call.log_a + channel + v * LANES, n);
      total[v] = f32x16{};
    }
  }

  static void run(const Call& call, int64_t head, int64_t first, int n, float* kept) {
    Walk walk(call, head, first, n, kept);
    for (int64_t seq = 0; seq < call.num_seqs; ++seq) {
      walk.forward(seq);
      walk.back(seq);
    }
    for (int v = 0; v < VECTORS; ++v)
      store(call.dlog_a + walk.channel + v * LANES, walk.total[v], n);
  }

  Gated gated(int64_t t, int v) const {
    const T* gates = (const T*)call.gates + t * call.gates_stride + head * call.gates_head_stride;
    return Gated::of(gates + first + v * LANES, call.head_dim, log_a[v], n);
  }
  f32x16 input(int64_t t, int v) const {
    return load((const T*)call.x + t * call.x_stride + channel + v * LANES, n);
  }
  // A state of a sequence among those of all, or zeros.
  f32x16 state(const float* states, int64_t seq, int v) const {
    return states ? load(states + seq * channels + channel + v * LANES, n) : f32x16{};
  }
  bool is_new(int64_t seq, int64_t t) const {
    return t == call.cu_seqlens[seq] && !call.initial_state;
  }

  // Keeps the states before each token of a sequence.
  void forward(int64_t seq) const {
    const int64_t begin = call.cu_seqlens[seq], end = call.cu_seqlens[seq + 1];
    f32x16 h[VECTORS];
    for (int v = 0; v < VECTORS; ++v) h[v] = state(call.initial_state, seq, v);
    for (int64_t t = begin; t < end; ++t)
      for (int v = 0; v < VECTORS; ++v) {
        store(kept + ((t - begin) * VECTORS + v) * LANES, h[v]);
        const Gated g = gated(t, v);
        const f32x16 scale = is_new(seq, t) ? splat(1.0f) : g.scale;
        h[v] = fma(scale, g.input * input(t, v), g.decay * h[v]);
      }
  }

  // The gradient of the state after a token, and the token's decay: what is before it has both.
  struct Later {
    f32x16 dh, decay;
  };

  void back(int64_t seq) {
    const int64_t begin = call.cu_seqlens[seq], end = call.cu_seqlens[seq + 1];
    Later later[VECTORS];
    for (int v = 0; v < VECTORS; ++v) later[v] = {state(call.dfinal_state, seq, v), splat(1.0f)};
    for (int64_t last = end; last > begin; last -= std::min(SUMMED, last - begin)) {
      f32x16 sums[VECTORS] = {};
      for (int64_t t = last - 1; t >= std::max(begin, last - SUMMED); --t)
        for (int v = 0; v < VECTORS; ++v) token(seq, t, v, later[v], sums[v]);
      for (int v = 0; v < VECTORS; ++v) total[v] += sums[v];
    }
    if (call.dinitial_state)
      for (int v = 0; v < VECTORS; ++v)
        store(call.dinitial_state + seq * channels + channel + v * LANES,
              later[v].dh * later[v].decay, n);
  }

  // Finds the gradient of the state after a token, and adds to that of log_a.
  TH_INLINE void token(int64_t seq, int64_t t, int v, Later& later, f32x16& sum) const {
    const f32x16 x = input(t, v), h = load(kept + ((t - call.cu_seqlens[seq]) * VECTORS + v) * LANES);
    const Gated g = gated(t, v);
    const T* dout = (const T*)call.dout + t * call.dout_stride + channel + v * LANES;
    const f32x16 dh = fma(later.dh, later.decay, load(dout, n));
    f32x16 scale = splat(1.0f), dlog_decay = g.decay * h;
    if (!is_new(seq, t)) {
      const f32x16 root = max(g.scale, splat(float(0.5 / call.max_sqrt_gradient)));
      scale = g.scale, dlog_decay -= g.decay * g.decay * g.input * x / root;
    }
    dlog_decay *= dh;
    const f32x16 dgated = scale * dh;
    T* dgates = (T*)call.dgates + 2 * (t * channels + head * call.head_dim) + first + v * LANES;
    store((T*)call.dx + t * channels + channel + v * LANES, dgated * g.input, n);
    store(dgates, dgated * x * g.input * (1.0f - g.input), n);
    store(dgates + call.head_dim, dlog_decay * log_a[v] * g.recurrent * (1.0f - g.recurrent), n);
    sum = fma(dlog_decay, g.recurrent, sum);
    later = {dh, g.decay};
  }
};

template <typename T>
struct Of {
  template <int VECTORS>
  using Walks = Walk<VECTORS, T>;
};

template <typename T>
void backward(const Call& call) {
  walk_channels<Of<T>::template Walks, 4, 1>(call, call.num_heads, call.head_dim);
  const int64_t channels = call.num_heads * call.head_dim;
  clear_padding(call, (T*)call.dx, channels), clear_padding(call, (T*)call.dgates, 2 * channels);
}

}  // namespace th::lru

TH_EXPORT_CALL(rg_lru_backward, th::lru::Call) {
  if (!th::offsets_are_valid(*call)) return false;
  call->is_bf16 ? th::lru::backward<th::bf16>(*call) : th::lru::backward<float>(*call);
  return true;
}
