// The causal convolution of one token: the inputs before it are a sequence's state, which moves up
// by one as it is read. Whoever convolves a channel must be the only one that does.
//
// A Call has at least these fields:
//
//   const void *conv_weight, *conv_bias;     [C, W], [C] or null, in the op's dtype
//   int64_t silu;                            whether that is the activation
//
// and a Sequence the call, `initial` and `slot` (where its state is read and left; 0: nowhere), and:
//
//   const T* inputs()                        those of its token
//   T* past(int64_t slot, int64_t i)         row i of the W - 1 of a slot, the oldest first
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace th {

constexpr int MAX_CONV_WIDTH = 8;

// run(std::integral_constant<int, width>), for a width that is known as a call is made.
template <typename Run>
void with_width(int64_t width, const Run& run) {
  switch (width) {
    case 2: return run(std::integral_constant<int, 2>{});
    case 3: return run(std::integral_constant<int, 3>{});
    case 4: return run(std::integral_constant<int, 4>{});
    case 5: return run(std::integral_constant<int, 5>{});
    case 6: return run(std::integral_constant<int, 6>{});
    case 7: return run(std::integral_constant<int, 7>{});
    case 8: return run(std::integral_constant<int, 8>{});
  }
}

// taps[w] = the w-th of each of LANES filters that lie one after the other.
template <int W, typename T>
TH_INLINE void load_taps(const T* weight, int n, f32x16 (&taps)[W]) {
  alignas(64) float columns[W][LANES] = {};
  for (int c = 0; c < n; ++c)
    for (int w = 0; w < W; ++w) columns[w][c] = to_float(weight[c * W + w]);
  for (int w = 0; w < W; ++w) taps[w] = load(columns[w]);
}

// taps[w * STEP] = every N-th number of x from the w-th on: of whole vectors, by shuffles in registers.
template <int N, int STEP = 1>
TH_INLINE void split_taps(const f32x16 (&x)[N], f32x16* taps) {
  if constexpr (N == 1) {
    taps[0] = x[0];
  } else {
    f32x16 even[N / 2], odd[N / 2];
    for (int i = 0; i < N / 2; ++i) {
      even[i] = every_second<false>(x[2 * i], x[2 * i + 1]);
      odd[i] = every_second<true>(x[2 * i], x[2 * i + 1]);
    }
    split_taps<N / 2, 2 * STEP>(even, taps);
    split_taps<N / 2, 2 * STEP>(odd, taps + STEP);
  }
}

// The filters of n <= LANES channels from `channel` on.
template <int W, typename T, typename Call>
TH_INLINE void load_filters(const Call& call, int64_t channel, int n, f32x16 (&taps)[W]) {
  const T* weight = (const T*)call.conv_weight + channel * W;
  if constexpr (W <= SUMS && (W & (W - 1)) == 0) {
    if (n == LANES) {
      f32x16 x[W];
      for (int i = 0; i < W; ++i) x[i] = load(weight + i * LANES);
      return split_taps(x, taps);
    }
  }
  load_taps<W>(weight, n, taps);
}

// What they make of the channels' inputs input(w), the oldest first.
template <int W, typename T, typename Call, typename Input>
TH_INLINE f32x16 filtered(const Call& call, int64_t channel, int n, const f32x16 (&taps)[W],
                          const Input& input) {
  f32x16 y{};
  if (call.conv_bias) y = load((const T*)call.conv_bias + channel, n);
#pragma GCC unroll 8
  for (int w = 0; w < W; ++w) y = fma(taps[w], input(w), y);
  return call.silu ? silu(y) : y;
}

// The convolution of n <= LANES channels from `channel` on, and their inputs moved up by one: each
// as soon as it is read, when the one before it has been.
template <int W, typename T, typename Sequence>
TH_INLINE void convolve_lanes(const Sequence& seq, int64_t channel, int n, T* out) {
  const auto& call = seq.call;
  f32x16 taps[W];
  load_filters<W, T>(call, channel, n, taps);
  const auto input = [&](int w) TH_LAMBDA {
    f32x16 x{};
    if (w == W - 1)
      x = load(seq.inputs() + channel, n);
    else if (seq.initial)
      x = load(seq.past(seq.initial, w) + channel, n);
    if (w && seq.slot) store(seq.past(seq.slot, w - 1) + channel, x, n);
    return x;
  };
  store(out, filtered<W, T>(call, channel, n, taps, input), n);
}

template <int W, typename T, typename Sequence>
TH_NOINLINE void convolve(const Sequence& seq, int64_t channel, int64_t size, T* out) {
  for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    convolve_lanes<W>(seq, channel + i, n, out + i);
  });
}

// The same of `count` tokens of one sequence, without moving its state: `rows` are the inputs of the
// W - 1 tokens before them (null: zeros), and their own. Outputs lie `stride` apart.
template <int W, typename T, typename Call>
TH_NOINLINE void convolve_tokens(const Call& call, const T* const* rows, int64_t count,
                                 int64_t channel, int64_t size, T* out, int64_t stride) {
  for_lanes(size, [&](int64_t i, int n) TH_LAMBDA {
    f32x16 taps[W];
    load_filters<W, T>(call, channel + i, n, taps);
    for (int64_t t = 0; t < count; ++t) {
      const auto input = [&](int w) TH_LAMBDA {
        return rows[t + w] ? load(rows[t + w] + channel + i, n) : f32x16{};
      };
      store(out + t * stride + i, filtered<W, T>(call, channel + i, n, taps, input), n);
    }
  });
}

}  // namespace th
