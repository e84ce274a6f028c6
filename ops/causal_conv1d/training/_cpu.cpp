// Gradients of the depthwise causal convolution on a CPU. A thread takes a block of channels, and
// walks the tokens of each sequence in tiles. A tile convolves again for the gradients dy before
// the activation, adds to the sums of the filters, and convolves dy the other way for dx.
//
// Gradients of an input lag W - 1 tokens behind dy. So W - 1 rows of dy are kept from tile to tile,
// and a last tile of zeros follows each sequence. What lies before its first token is its state.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "simd.h"

namespace {

using namespace th;

constexpr int BLOCK_CHANNELS = 256, TILE_TOKENS = 64, MAX_PAST = 15;
constexpr int MAX_ROWS = TILE_TOKENS + MAX_PAST;

TH_CALL(Call,
  const void *x, *weight, *bias;  // [T, C], [C, W], [C] or null
  const int32_t* cu_seqlens;
  const void *initial_state, *dout, *dfinal_state;  // [N, W - 1, C] or null; [T, C]
  void *dx, *dweight, *dbias, *dinitial_state;      // contiguous; null where those are
  int64_t num_tokens, num_seqs, channels, width, x_stride, dout_stride;
  int64_t silu, is_bf16, num_threads;
);

// What a thread has of a block of channels in float32: filters tap by tap, and sums over tokens.
struct Block {
  int64_t channel, size;
  alignas(64) float taps[MAX_PAST + 1][BLOCK_CHANNELS], bias[BLOCK_CHANNELS];
  alignas(64) float dtaps[MAX_PAST + 1][BLOCK_CHANNELS], dbias[BLOCK_CHANNELS];
  alignas(64) float dy[MAX_ROWS][BLOCK_CHANNELS];  // W - 1 rows of the tile before, then its own

  template <typename T>
  void open(const Call& call, int64_t first) {
    channel = first, size = std::min<int64_t>(BLOCK_CHANNELS, call.channels - first);
    const T *weight = (const T*)call.weight + first * call.width, *of_bias = (const T*)call.bias;
    for (int64_t c = 0; c < size; ++c) {
      for (int64_t w = 0; w < call.width; ++w) taps[w][c] = to_float(weight[c * call.width + w]);
      bias[c] = of_bias ? to_float(of_bias[first + c]) : 0.0f;
    }
    std::memset(dtaps, 0, sizeof dtaps);
    std::memset(dbias, 0, sizeof dbias);
  }

  template <typename T>
  void close(const Call& call) const {
    T *weight = (T*)call.dweight + channel * call.width, *of_bias = (T*)call.dbias;
    for (int64_t c = 0; c < size; ++c) {
      for (int64_t w = 0; w < call.width; ++w)
        weight[c * call.width + w] = from_float<T>(dtaps[w][c]);
      if (of_bias) of_bias[channel + c] = from_float<T>(dbias[c]);
    }
  }
};

template <typename T>
struct Sequence {
  const Call& call;
  int64_t n, start, length, past;

  Sequence(const Call& call, int64_t n)
      : call(call),
        n(n),
        start(call.cu_seqlens[n]),
        length(call.cu_seqlens[n + 1] - start),
        past(call.width - 1) {}

  // Row i of one of the states, or null where there are none.
  T* state(const void* states, int64_t i, int64_t channel) const {
    return states ? (T*)states + (n * past + i) * call.channels + channel : nullptr;
  }
  // The input at position t; from -(W - 1) to -1 these are the state.
  const T* input(int64_t t, int64_t channel) const {
    static const T zeros[BLOCK_CHANNELS] = {};
    if (t >= 0) return (const T*)call.x + (start + t) * call.x_stride + channel;
    const T* kept = state(call.initial_state, t + past, channel);
    return kept ? kept : zeros;
  }
  const T* dout(int64_t t, int64_t channel) const {
    return (const T*)call.dout + (start + t) * call.dout_stride + channel;
  }
  // Where the gradient of that input is left, or null: nowhere.
  T* dinput(int64_t t, int64_t channel) const {
    if (t >= 0) return (T*)call.dx + (start + t) * call.channels + channel;
    return state(call.dinitial_state, t + past, channel);
  }
  // What the final state adds to it, or null: nothing.
  const T* dfinal(int64_t t, int64_t channel) const {
    const int64_t i = t - (length - past);
    return i >= 0 ? state(call.dfinal_state, i, channel) : nullptr;
  }
};

// Rows of dy for `rows` tokens whose inputs begin at inputs[0], the first tap's of the first one.
template <typename T>
void before_activation(const Sequence<T>& seq, Block& b, int64_t first, int64_t rows,
                       const T* const* inputs) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* dout = seq.dout(first + i, b.channel);
    float* dy = b.dy[seq.past + i];
    for_lanes(b.size, [&](int64_t c, int n) TH_LAMBDA {
      f32x16 grad = load(dout + c, n);
      if (seq.call.silu) {
        f32x16 y = load(b.bias + c);
        for (int64_t w = 0; w <= seq.past; ++w)
          y = fma(load(b.taps[w] + c), load(inputs[i + w] + c, n), y);
        const f32x16 gate = sigmoid(y);
        grad *= gate * (1.0f + y * (1.0f - gate));
      }
      store(dy + c, grad);
    });
  }
}

// Adds the sums over a tile: those of a tile are short, so that rounding of long ones is small.
template <typename T>
void add_to_filters(const Sequence<T>& seq, Block& b, int64_t rows, const T* const* inputs) {
  for_lanes(b.size, [&](int64_t c, int n) TH_LAMBDA {
    f32x16 total{};
    for (int64_t i = 0; i < rows; ++i) total += load(b.dy[seq.past + i] + c);
    store(b.dbias + c, load(b.dbias + c) + total);
    for (int64_t w = 0; w <= seq.past; ++w) {
      f32x16 sums{};
      for (int64_t i = 0; i < rows; ++i)
        sums = fma(load(b.dy[seq.past + i] + c), load(inputs[i + w] + c, n), sums);
      store(b.dtaps[w] + c, load(b.dtaps[w] + c) + sums);
    }
  });
}

// Gradients of `rows` inputs, W - 1 before the tokens of the tile.
template <typename T>
void to_inputs(const Sequence<T>& seq, const Block& b, int64_t first, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t t = first - seq.past + i;
    T* dinput = seq.dinput(t, b.channel);
    if (!dinput) continue;
    const T* dfinal = seq.dfinal(t, b.channel);
    for_lanes(b.size, [&](int64_t c, int n) TH_LAMBDA {
      f32x16 grad = dfinal ? load(dfinal + c, n) : f32x16{};
      for (int64_t w = 0; w <= seq.past; ++w)
        grad = fma(load(b.taps[w] + c), load(b.dy[i + seq.past - w] + c), grad);
      store(dinput + c, grad, n);
    });
  }
}

template <typename T>
void backward(const Sequence<T>& seq, Block& b) {
  const T* inputs[MAX_ROWS];
  std::memset(b.dy, 0, seq.past * sizeof b.dy[0]);
  for (int64_t first = 0; first < seq.length; first += TILE_TOKENS) {
    const int64_t rows = std::min<int64_t>(TILE_TOKENS, seq.length - first);
    for (int64_t i = 0; i < rows + seq.past; ++i)
      inputs[i] = seq.input(first - seq.past + i, b.channel);
    before_activation(seq, b, first, rows, inputs);
    add_to_filters(seq, b, rows, inputs);
    to_inputs(seq, b, first, rows);
    std::memmove(b.dy, b.dy[rows], seq.past * sizeof b.dy[0]);
  }
  std::memset(b.dy[seq.past], 0, seq.past * sizeof b.dy[0]);
  to_inputs(seq, b, seq.length, seq.past);
}

template <typename T>
void backward(const Call& call) {
  const int64_t end = call.cu_seqlens[call.num_seqs];
  std::fill_n((T*)call.dx + end * call.channels, (call.num_tokens - end) * call.channels, T());
#pragma omp parallel num_threads(call.num_threads)
  {
    Block block;
#pragma omp for schedule(static)
    for (int64_t first = 0; first < call.channels; first += BLOCK_CHANNELS) {
      block.open<T>(call, first);
      for (int64_t n = 0; n < call.num_seqs; ++n) backward(Sequence<T>(call, n), block);
      block.close<T>(call);
    }
  }
}

}  // namespace

TH_EXPORT_CALL(causal_conv1d_backward, Call) {
  call->is_bf16 ? backward<bf16>(*call) : backward<float>(*call);
  return true;
}
