// Depthwise causal convolution on a CPU: each thread takes blocks of tokens of BLOCK_CHANNELS
// channels, a few KB of inputs that are read from memory once and then found in L1 for every tap.
//
// A block of a sequence reads the inputs before its first token from the sequence itself, or from
// the state at the sequence's start. The states are written after all outputs, since a thread may
// still read what another would overwrite.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace conv {

using th::LANES;
using th::f32x16;

constexpr int64_t BLOCK_CHANNELS = 256;
constexpr int64_t BLOCK_TOKENS = 64;
constexpr int MAX_WIDTH = 8;

// The arguments of the op as the launcher passes them; _Call in _cpu.py mirrors it.
struct Call {
  const void *x, *weight, *bias;  // [T, C], [C, W], [C] or null
  void* conv_state;               // [S, W - 1, C]
  const int32_t* cu_seqlens;
  const int32_t* state_indices;
  const bool* has_initial_state;
  void* out;  // [T, C], contiguous
  int64_t num_tokens, num_seqs, channels, width, x_stride, num_threads;
  bool silu, is_bf16;
};

template <typename T>
struct Sequence {
  const Call& call;
  int64_t start, length, slot;
  bool has_initial_state;

  Sequence(const Call& call, int64_t n)
      : call(call),
        start(call.cu_seqlens[n]),
        length(call.cu_seqlens[n + 1] - start),
        slot(call.state_indices[n]),
        has_initial_state(call.has_initial_state[n]) {}

  T* state(int64_t i) const {
    return (T*)call.conv_state + (slot * (call.width - 1) + i) * call.channels;
  }
  // A block of the inputs at position t of the sequence, which from -(W - 1) to -1 are its state.
  const T* input(int64_t t, int64_t channel) const {
    static const T zeros[BLOCK_CHANNELS] = {};
    if (t >= 0) return (const T*)call.x + (start + t) * call.x_stride + channel;
    return has_initial_state ? state(t + call.width - 1) + channel : zeros;
  }
};

// The filters of a block of channels in float32, tap by tap, and their biases.
struct Filters {
  alignas(64) float taps[MAX_WIDTH][BLOCK_CHANNELS];
  alignas(64) float bias[BLOCK_CHANNELS];

  template <int W, typename T>
  void load(const Call& call, int64_t channel, int64_t size) {
    const T* weight = (const T*)call.weight + channel * W;
    for (int64_t c = 0; c < size; ++c)
      for (int w = 0; w < W; ++w) taps[w][c] = th::to_float(weight[c * W + w]);
    for (int64_t c = 0; c < size; ++c)
      bias[c] = call.bias ? th::to_float(((const T*)call.bias)[channel + c]) : 0.0f;
  }
};

// The outputs of one token on a block of channels; rows[w] is what tap w reads.
template <int W, typename T>
TH_INLINE void convolve_row(const Filters& filters, const T* const* rows, int64_t size, bool silu,
                            T* out) {
  for (int64_t c = 0; c < size; c += LANES) {
    const int n = int(size - c);
    f32x16 y = th::load(filters.bias + c);
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w)
      y = th::fma(th::load(filters.taps[w] + c), th::load(rows[w] + c, n), y);
    th::store(out + c, silu ? th::silu(y) : y, n);
  }
}

template <int W, typename T>
void convolve(const Call& call, const Sequence<T>& seq, int64_t first, int64_t last,
              int64_t channel, int64_t size, const Filters& filters) {
  const T* rows[W];
  for (int w = 1; w < W; ++w) rows[w] = seq.input(first - W + w, channel);
  for (int64_t t = first; t < last; ++t) {
    for (int w = 1; w < W; ++w) rows[w - 1] = rows[w];
    rows[W - 1] = seq.input(t, channel);
    convolve_row<W>(filters, rows, size, call.silu,
                    (T*)call.out + (seq.start + t) * call.channels + channel);
  }
}

// Tokens [first, last) of the packed batch on a block of channels, sequence by sequence.
template <int W, typename T>
void convolve_tokens(const Call& call, int64_t first, int64_t last, int64_t channel, int64_t size,
                     const Filters& filters) {
  const int32_t* ends = call.cu_seqlens + 1;
  int64_t n = std::upper_bound(ends, ends + call.num_seqs, int32_t(first)) - ends;
  for (int64_t t = first; t < last;) {
    const bool is_padding = n == call.num_seqs || call.state_indices[n] == 0;
    const int64_t end = n == call.num_seqs ? last : std::min<int64_t>(ends[n], last);
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

// Moves the last W - 1 inputs of a sequence into its state. Going up, a short sequence shifts the
// state: entry i is read from i + length before that one is overwritten.
template <typename T>
void write_state(const Sequence<T>& seq, int64_t channel, int64_t size) {
  const int64_t past = seq.call.width - 1;
  for (int64_t i = 0; i < past; ++i) {
    std::memcpy(seq.state(i) + channel, seq.input(seq.length - past + i, channel),
                size * sizeof(T));
  }
}

template <int W, typename T>
void run(const Call& call) {
  const int64_t token_blocks = (call.num_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  const int64_t channel_blocks = (call.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
#pragma omp parallel num_threads(call.num_threads)
  {
    Filters filters;
    int64_t loaded = -1;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < channel_blocks * token_blocks; ++item) {
      const int64_t block = item / token_blocks, first = item % token_blocks * BLOCK_TOKENS;
      const int64_t channel = block * BLOCK_CHANNELS;
      const int64_t size = std::min(BLOCK_CHANNELS, call.channels - channel);
      if (block != loaded) filters.load<W, T>(call, channel, size), loaded = block;
      convolve_tokens<W, T>(call, first, std::min(first + BLOCK_TOKENS, call.num_tokens), channel,
                            size, filters);
    }
#pragma omp for schedule(static)
    for (int64_t item = 0; item < channel_blocks * call.num_seqs; ++item) {
      const Sequence<T> seq(call, item % call.num_seqs);
      const int64_t channel = item / call.num_seqs * BLOCK_CHANNELS;
      if (seq.slot != 0 && seq.length > 0)
        write_state(seq, channel, std::min(BLOCK_CHANNELS, call.channels - channel));
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

}  // namespace conv

extern "C" TH_EXPORT void causal_conv1d(const conv::Call* call) {
  call->is_bf16 ? conv::dispatch<th::bf16>(*call) : conv::dispatch<float>(*call);
}
