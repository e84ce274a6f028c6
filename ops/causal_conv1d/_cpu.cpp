// Depthwise causal convolution on a CPU: a thread takes blocks of tokens and channels, and within
// one a few tokens at a time, so that each input is loaded into registers once for all its taps.
//
// A block of a sequence reads the inputs before its first token from the sequence itself, or from
// the state at the sequence's start. The states are written after all outputs, since a thread may
// still read what another would overwrite.
//
// With gates, an input is the product of two loaded numbers, rounded as the state keeps it. Inputs
// that are in the state are products already: their gates are ones, as those that are not given.
//
// With taps of each token, what is loaded of the filters is added to what a head has of them.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "call.h"
#include "recurrent_call.h"
#include "simd.h"

namespace conv {

using th::LANES;
using th::f32x16;

constexpr int64_t MIN_BLOCK_CHANNELS = 256, MAX_BLOCK_CHANNELS = 2048;
constexpr int64_t BLOCK_TOKENS = 64;
constexpr int TILE_TOKENS = th::SUMS >= 16 ? 4 : 1;  // whose inputs registers hold beside the filters
constexpr int MAX_WIDTH = 16;  // filters of fewer taps may stand at its end

TH_CALL(Call,
  const void *x, *weight, *bias;  // [T, C], [C, W], [C] or null
  void* conv_state;               // [S, W - 1, C]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  const void *input_gate, *output_gate, *token_taps;  // [T, C], [T, C], [T, H, W] or null
  void* out;                                          // [T, C], contiguous
  int64_t num_tokens, num_seqs, num_slots, channels, width, x_stride;
  int64_t input_gate_stride, output_gate_stride, num_heads;
  int64_t silu, is_bf16, num_threads;
);

// What is between the inputs and the filters, or beside these.
enum class Form { PLAIN, GATED, TOKEN_TAPS };

// As many numbers of one value as a block has channels.
template <typename T>
struct Block {
  T values[MAX_BLOCK_CHANNELS];
  explicit Block(float value) {
    std::fill(values, values + MAX_BLOCK_CHANNELS, th::from_float<T>(value));
  }
};

// A product as it is kept.
template <typename T>
TH_INLINE f32x16 rounded(f32x16 x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else return th::widen(th::narrow(x));
}

template <typename T>
struct Sequence {
  const Call& call;
  int64_t start, length;
  int64_t initial, slot;  // where the state is read and where it is left; 0: nowhere

  Sequence(const Call& call, int64_t n)
      : call(call),
        start(call.cu_seqlens[n]),
        length(call.cu_seqlens[n + 1] - start),
        initial(call.initial_indices[n]),
        slot(call.state_indices[n]) {}

  T* state(int64_t at, int64_t i) const {
    return (T*)call.conv_state + (at * (call.width - 1) + i) * call.channels;
  }
  // A block of the inputs at position t of the sequence, which from -(W - 1) to -1 are its state.
  const T* input(int64_t t, int64_t channel) const {
    static const Block<T> zeros(0.0f);
    if (t >= 0) return (const T*)call.x + (start + t) * call.x_stride + channel;
    const int64_t kept = t + call.width - 1;
    return initial && kept >= 0 ? state(initial, kept) + channel : zeros.values;
  }
  // What that is multiplied by, and the output there.
  const T* input_gate(int64_t t, int64_t channel) const {
    return gate(t < 0 ? nullptr : call.input_gate, t, call.input_gate_stride, channel);
  }
  const T* output_gate(int64_t t, int64_t channel) const {
    return gate(call.output_gate, t, call.output_gate_stride, channel);
  }
  const T* token_taps(int64_t t) const {
    return (const T*)call.token_taps + (start + t) * call.num_heads * call.width;
  }

 private:
  const T* gate(const void* gates, int64_t t, int64_t stride, int64_t channel) const {
    static const Block<T> ones(1.0f);
    return gates ? (const T*)gates + (start + t) * stride + channel : ones.values;
  }
};

// The filters of a block of channels in float32, tap by tap from `first` on, and their biases.
struct Filters {
  alignas(64) float taps[MAX_WIDTH][MAX_BLOCK_CHANNELS];
  alignas(64) float bias[MAX_BLOCK_CHANNELS];
  int first;

  template <int W, typename T>
  void load(const Call& call, int64_t channel, int64_t size) {
    const int width = int(call.width);
    const T* weight = (const T*)call.weight + channel * width;
    first = W - width;
    for (int64_t c = 0; c < size; ++c)
      for (int w = 0; w < width; ++w) taps[first + w][c] = th::to_float(weight[c * width + w]);
    for (int64_t c = 0; c < size; ++c)
      bias[c] = call.bias ? th::to_float(((const T*)call.bias)[channel + c]) : 0.0f;
  }
};

// What N tokens in a row read: rows[i] is for the first tap of token i, so rows[i + W - 1] are the
// inputs of the tokens themselves.
template <int W, int N, typename T>
struct Rows {
  const T *inputs[N + W - 1], *input_gates[N + W - 1], *output_gates[N], *token_taps[N];
};

// N tokens on n <= LANES channels of one head, each input loaded once.
template <int W, int N, Form FORM, typename T>
TH_INLINE void convolve_lanes(const Filters& filters, const Rows<W, N, T>& rows, int64_t c, int n,
                              int64_t head, bool silu, T* out, int64_t out_stride) {
  const int first = W < MAX_WIDTH ? 0 : filters.first;
  const auto filter = [&](int w) TH_LAMBDA { return th::load(filters.taps[w] + c); };
  const auto input = [&](int i) TH_LAMBDA {
    const f32x16 x = th::load(rows.inputs[i] + c, n);
    if constexpr (FORM == Form::GATED) return rounded<T>(x * th::load(rows.input_gates[i] + c, n));
    return x;
  };
  constexpr bool IS_ALONE = N == 1;  // nothing is read twice then
  f32x16 taps[W], x[N + W - 1];
  if constexpr (!IS_ALONE) {
#pragma GCC unroll 8
    for (int w = first; w < W; ++w) taps[w] = filter(w);
#pragma GCC unroll 16
    for (int i = 0; i < N + W - 1; ++i) x[i] = input(i);
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    f32x16 y = th::load(filters.bias + c);
#pragma GCC unroll 8
    for (int w = first; w < W; ++w) {
      f32x16 tap = IS_ALONE ? filter(w) : taps[w];
      if constexpr (FORM == Form::TOKEN_TAPS)
        tap += th::splat(th::to_float(rows.token_taps[i][head * (W - first) + w - first]));
      y = th::fma(tap, IS_ALONE ? input(i + w) : x[i + w], y);
    }
    if (silu) y = th::silu(y);
    if constexpr (FORM == Form::GATED) y *= th::load(rows.output_gates[i] + c, n);
    th::store(out + i * out_stride + c, y, n);
  }
}

template <int W, int N, Form FORM, typename T>
void convolve_rows(const Call& call, const Sequence<T>& seq, int64_t t, int64_t channel,
                   int64_t size, const Filters& filters) {
  Rows<W, N, T> rows;
  for (int i = 0; i < N + W - 1; ++i) {
    rows.inputs[i] = seq.input(t + i - (W - 1), channel);
    if constexpr (FORM == Form::GATED) rows.input_gates[i] = seq.input_gate(t + i - (W - 1), channel);
  }
  if constexpr (FORM == Form::GATED)
    for (int i = 0; i < N; ++i) rows.output_gates[i] = seq.output_gate(t + i, channel);
  if constexpr (FORM == Form::TOKEN_TAPS)
    for (int i = 0; i < N; ++i) rows.token_taps[i] = seq.token_taps(t + i);
  T* out = (T*)call.out + (seq.start + t) * call.channels + channel;
  const auto lanes = [&](int64_t c, int n, int64_t head) {
    convolve_lanes<W, N, FORM>(filters, rows, c, n, head, call.silu, out, call.channels);
  };
  const int64_t per_head = call.channels / call.num_heads;
  for (int64_t c = 0; c < size;) {  // up to the end of a head, where that matters
    const int64_t head = FORM == Form::TOKEN_TAPS ? (channel + c) / per_head : 0;
    const int64_t end =
        FORM == Form::TOKEN_TAPS ? std::min((head + 1) * per_head - channel, size) : size;
    for (; c + LANES <= end; c += LANES) lanes(c, LANES, head);
    if (c < end) lanes(c, int(end - c), head);
    c = end;
  }
}

template <int W, Form FORM, typename T>
void convolve(const Call& call, const Sequence<T>& seq, int64_t first, int64_t last,
              int64_t channel, int64_t size, const Filters& filters) {
  int64_t t = first;
  for (; t + TILE_TOKENS <= last; t += TILE_TOKENS)
    convolve_rows<W, TILE_TOKENS, FORM>(call, seq, t, channel, size, filters);
  for (; t < last; ++t) convolve_rows<W, 1, FORM>(call, seq, t, channel, size, filters);
}

// Tokens [first, last) of the packed batch on a block of channels, sequence by sequence.
template <int W, Form FORM, typename T>
void convolve_tokens(const Call& call, int64_t first, int64_t last, int64_t channel, int64_t size,
                     const Filters& filters) {
  const int32_t* ends = call.cu_seqlens + 1;
  int64_t n = std::upper_bound(ends, ends + call.num_seqs, int32_t(first)) - ends;
  for (int64_t t = first; t < last;) {
    const bool is_padding = n == call.num_seqs;
    const int64_t end = is_padding ? last : std::min<int64_t>(ends[n], last);
    if (is_padding)
      for (int64_t i = t; i < end; ++i)
        std::memset((T*)call.out + i * call.channels + channel, 0, size * sizeof(T));
    else {
      const Sequence<T> seq(call, n);
      convolve<W, FORM>(call, seq, t - seq.start, end - seq.start, channel, size, filters);
    }
    t = end, ++n;
  }
}

// Moves the last W - 1 inputs of a sequence into its slot. Going up, a short sequence shifts the
// state that is there: entry i is read from i + length before that one is overwritten.
template <Form FORM, typename T>
void write_state(const Sequence<T>& seq, int64_t channel, int64_t size) {
  const int64_t past = seq.call.width - 1;
  for (int64_t i = 0; i < past; ++i) {
    const int64_t t = seq.length - past + i;
    T* kept = seq.state(seq.slot, i) + channel;
    const T* input = seq.input(t, channel);
    if constexpr (FORM == Form::GATED) {
      const T* gate = seq.input_gate(t, channel);
      th::for_lanes(size, [&](int64_t c, int n) TH_LAMBDA {
        th::store(kept + c, th::load(input + c, n) * th::load(gate + c, n), n);
      });
    } else {
      std::memcpy(kept, input, size * sizeof(T));
    }
  }
}

// Long stretches of a row suit the memory; still, every thread should get two blocks.
int64_t block_channels(const Call& call, int64_t token_blocks) {
  const int64_t fair = call.channels * token_blocks / (2 * call.num_threads);
  const int64_t whole = fair / MIN_BLOCK_CHANNELS * MIN_BLOCK_CHANNELS;
  return std::clamp(whole, MIN_BLOCK_CHANNELS, MAX_BLOCK_CHANNELS);
}

template <int W, Form FORM, typename T>
void run(const Call& call) {
  const int64_t token_blocks = (call.num_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  const int64_t block_size = block_channels(call, token_blocks);
  const int64_t channel_blocks = (call.channels + block_size - 1) / block_size;
#pragma omp parallel num_threads(call.num_threads)
  {
    Filters filters;
    int64_t loaded = -1;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < channel_blocks * token_blocks; ++item) {
      const int64_t block = item / token_blocks, first = item % token_blocks * BLOCK_TOKENS;
      const int64_t channel = block * block_size;
      const int64_t size = std::min(block_size, call.channels - channel);
      if (block != loaded) filters.load<W, T>(call, channel, size), loaded = block;
      const int64_t last = std::min(first + BLOCK_TOKENS, call.num_tokens);
      convolve_tokens<W, FORM, T>(call, first, last, channel, size, filters);
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < channel_blocks * call.num_seqs; ++item) {
      const Sequence<T> seq(call, item % call.num_seqs);
      const int64_t channel = item / call.num_seqs * block_size;
      if (seq.slot != 0 && seq.length > 0)
        write_state<FORM>(seq, channel, std::min(block_size, call.channels - channel));
    }
  }
}

// Widths that models have are compiled by themselves.
template <typename T>
void dispatch(const Call& call) {
  if (call.input_gate || call.output_gate) {
    switch (call.width) {
      case 3: return run<3, Form::GATED, T>(call);
      case 7: return run<7, Form::GATED, T>(call);
      default: return run<MAX_WIDTH, Form::GATED, T>(call);
    }
  }
  if (call.token_taps) {
    switch (call.width) {
      case 4: return run<4, Form::TOKEN_TAPS, T>(call);
      default: return run<MAX_WIDTH, Form::TOKEN_TAPS, T>(call);
    }
  }
  switch (call.width) {
    case 2: return run<2, Form::PLAIN, T>(call);
    case 3: return run<3, Form::PLAIN, T>(call);
    case 4: return run<4, Form::PLAIN, T>(call);
    default: return run<MAX_WIDTH, Form::PLAIN, T>(call);
  }
}

}  // namespace conv

TH_EXPORT_CALL(causal_conv1d, conv::Call) {
  if (!th::indices_are_valid(*call)) return false;
  call->is_bf16 ? conv::dispatch<th::bf16>(*call) : conv::dispatch<float>(*call);
  return true;
}
