// Depthwise causal convolution on a CPU: a thread takes blocks of tokens and channels, and within
// one a few tokens at a time, so that each input is loaded into registers once for all its taps.
//
// A block of a sequence reads the inputs before its first token from the sequence itself, or from
// the state at the sequence's start. The states are written after all outputs, since a thread may
// still read what another would overwrite.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "recurrent_call.h"
#include "simd.h"

namespace conv {

using th::LANES;
using th::f32x16;

constexpr int64_t MIN_BLOCK_CHANNELS = 256, MAX_BLOCK_CHANNELS = 2048;
constexpr int64_t BLOCK_TOKENS = 64;
constexpr int TILE_TOKENS = 4;
constexpr int MAX_WIDTH = 16;

TH_CALL(Call,
  const void *x, *weight, *bias;  // [T, C], [C, W], [C] or null
  void* conv_state;               // [S, W - 1, C]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  void* out;  // [T, C], contiguous
  int64_t num_tokens, num_seqs, num_slots, channels, width, x_stride;
  int64_t silu, is_bf16, num_threads;
);

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
    static const T zeros[MAX_BLOCK_CHANNELS] = {};
    if (t >= 0) return (const T*)call.x + (start + t) * call.x_stride + channel;
    return initial ? state(initial, t + call.width - 1) + channel : zeros;
  }
};

// The filters of a block of channels in float32, tap by tap, and their biases.
struct Filters {
  alignas(64) float taps[MAX_WIDTH][MAX_BLOCK_CHANNELS];
  alignas(64) float bias[MAX_BLOCK_CHANNELS];

  template <int W, typename T>
  void load(const Call& call, int64_t channel, int64_t size) {
    const T* weight = (const T*)call.weight + channel * W;
    for (int64_t c = 0; c < size; ++c)
      for (int w = 0; w < W; ++w) taps[w][c] = th::to_float(weight[c * W + w]);
    for (int64_t c = 0; c < size; ++c)
      bias[c] = call.bias ? th::to_float(((const T*)call.bias)[channel + c]) : 0.0f;
  }
};

// N tokens in a row on n <= LANES channels, each input loaded once. rows[i] is what the first tap
// of token i reads, so rows[i + W - 1] are the inputs of the tokens themselves.
template <int W, int N, typename T>
TH_INLINE void convolve_lanes(const Filters& filters, const T* const* rows, int64_t c, int n,
                              bool silu, T* out, int64_t out_stride) {
  f32x16 taps[W], x[N + W - 1];
#pragma GCC unroll 16
  for (int w = 0; w < W; ++w) taps[w] = th::load(filters.taps[w] + c);
#pragma GCC unroll 32
  for (int i = 0; i < N + W - 1; ++i) x[i] = th::load(rows[i] + c, n);
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    f32x16 y = th::load(filters.bias + c);
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) y = th::fma(taps[w], x[i + w], y);
    th::store(out + i * out_stride + c, silu ? th::silu(y) : y, n);
  }
}

template <int W, int N, typename T>
void convolve_rows(const Call& call, const Sequence<T>& seq, int64_t t, int64_t channel,
                   int64_t size, const Filters& filters) {
  const T* rows[N + W - 1];
  for (int i = 0; i < N + W - 1; ++i) rows[i] = seq.input(t + i - (W - 1), channel);
  T* out = (T*)call.out + (seq.start + t) * call.channels + channel;
  int64_t c = 0;
  for (; c + LANES <= size; c += LANES)
    convolve_lanes<W, N>(filters, rows, c, LANES, call.silu, out, call.channels);
  if (c < size)
    convolve_lanes<W, N>(filters, rows, c, int(size - c), call.silu, out, call.channels);
}

template <int W, typename T>
void convolve(const Call& call, const Sequence<T>& seq, int64_t first, int64_t last,
              int64_t channel, int64_t size, const Filters& filters) {
  int64_t t = first;
  for (; t + TILE_TOKENS <= last; t += TILE_TOKENS)
    convolve_rows<W, TILE_TOKENS>(call, seq, t, channel, size, filters);
  for (; t < last; ++t) convolve_rows<W, 1>(call, seq, t, channel, size, filters);
}

// Tokens [first, last) of the packed batch on a block of channels, sequence by sequence.
template <int W, typename T>
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
      convolve<W>(call, seq, t - seq.start, end - seq.start, channel, size, filters);
    }
    t = end, ++n;
  }
}

// Moves the last W - 1 inputs of a sequence into its slot. Going up, a short sequence shifts the
// state that is there: entry i is read from i + length before that one is overwritten.
template <typename T>
void write_state(const Sequence<T>& seq, int64_t channel, int64_t size) {
  const int64_t past = seq.call.width - 1;
  for (int64_t i = 0; i < past; ++i) {
    std::memcpy(seq.state(seq.slot, i) + channel, seq.input(seq.length - past + i, channel),
                size * sizeof(T));
  }
}

// Long stretches of a row suit the memory; still, every thread should get two blocks.
int64_t block_channels(const Call& call, int64_t token_blocks) {
  const int64_t fair = call.channels * token_blocks / (2 * call.num_threads);
  const int64_t whole = fair / MIN_BLOCK_CHANNELS * MIN_BLOCK_CHANNELS;
  return std::clamp(whole, MIN_BLOCK_CHANNELS, MAX_BLOCK_CHANNELS);
}

template <int W, typename T>
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
      convolve_tokens<W, T>(call, first, std::min(first + BLOCK_TOKENS, call.num_tokens), channel,
                            size, filters);
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < channel_blocks * call.num_seqs; ++item) {
      const Sequence<T> seq(call, item % call.num_seqs);
      const int64_t channel = item / call.num_seqs * block_size;
      if (seq.slot != 0 && seq.length > 0)
        write_state(seq, channel, std::min(block_size, call.channels - channel));
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
    case 9: return run<9, T>(call);
    case 10: return run<10, T>(call);
    case 11: return run<11, T>(call);
    case 12: return run<12, T>(call);
    case 13: return run<13, T>(call);
    case 14: return run<14, T>(call);
    case 15: return run<15, T>(call);
    case 16: return run<16, T>(call);
  }
}

}  // namespace conv

TH_EXPORT_CALL(causal_conv1d, conv::Call) {
  if (!th::indices_are_valid(*call)) return false;
  call->is_bf16 ? conv::dispatch<th::bf16>(*call) : conv::dispatch<float>(*call);
  return true;
}
