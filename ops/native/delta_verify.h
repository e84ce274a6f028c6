// Several tokens of a sequence through the mixer of a delta rule, in stretches; or tokens of which
// some are not certain: a sequence's records are replayed, its first new token runs, and its state is
// left; further tokens run on a copy of a few rows of it, and leave their inputs as records.
//
// A record is a row [qkv | b | a] of a token's inputs. Each token is convolved, gated and advanced by
// the functions of delta_step.h, and rows of a state do not depend on each other, so that a state
// has the bits that as many decode steps leave.
//
//   TH_EXPORT_DELTA_STEP(Mixer, name)       one token of each sequence by delta_step.h, else these
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "delta_step.h"
#include "verify.h"

namespace th::verify {

using step::Call;

// Rows of a head's state that go through all tokens at once: they stay in L1, and are whole blocks
// of the rows that a step takes.
constexpr int64_t BLOCK_ROWS = LANES;

// Memory of a thread, for all tokens that a sequence may have: keys of a key head, and what a value
// head makes of them.
template <typename T>
struct Scratch {
  T *q, *k, *v, *o;
  float *unit_q, *unit_k, *decay, *read, *ahead;  // ahead: rows of a state that are not left
  std::vector<const T*> rows;                     // of the convolution
  std::vector<delta::Token> tokens;

  static int64_t num_floats(const Call& call) {
    const int64_t K = call.k_dim, V = call.v_dim;
    return most_tokens(call) * (6 * K + 2 * V) + BLOCK_ROWS * K;
  }

  Scratch(const Call& call, float* memory)
      : rows(most_tokens(call) + call.width - 1), tokens(most_tokens(call)) {
    const int64_t K = most_tokens(call) * call.k_dim, V = most_tokens(call) * call.v_dim;
    unit_q = memory, unit_k = unit_q + K, decay = unit_k + K, read = decay + K, ahead = read + K;
    float* rounded = ahead + BLOCK_ROWS * call.k_dim;
    q = (T*)rounded, k = (T*)(rounded + K), v = (T*)(rounded + 2 * K), o = (T*)(rounded + 2 * K + V);
  }
};

template <typename T>
struct Sequence : Drafted<step::Sequence<T>> {
  using Drafted<step::Sequence<T>>::Drafted;

  const T* inputs(int64_t i) const {
    return this->part(i, 0, this->call.qkv, this->call.qkv_stride);
  }
  const T* b(int64_t i) const {
    return this->part(i, this->call.channels, this->call.b, this->call.b_stride);
  }
  const T* a(int64_t i) const {
    const int64_t first = this->call.channels + this->call.num_v_heads;
    return this->part(i, first, this->call.a, this->call.a_stride);
  }
  const T* z(int64_t i, int64_t j) const {
    return (const T*)this->call.z + this->place(i) * this->call.z_stride + j * this->call.v_dim;
  }
  T* out(int64_t i, int64_t j) const {
    return (T*)this->call.out + (this->place(i) * this->call.num_v_heads + j) * this->call.v_dim;
  }
};

// Runs all tokens on value head j, whose inputs of the convolution are s.rows.
template <typename Mixer, int W, typename T>
void run_head(const Sequence<T>& seq, int64_t j, int64_t channel, Scratch<T>& s, Spare& spare) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim;
  const auto step = delta::choose_step<T>(K);
  float* state = seq.open_state(j, spare);
  convolve_tokens<W>(call, s.rows.data(), seq.num_tokens, channel, V, s.v, V);
  for (int64_t i = 0; i < seq.num_tokens; ++i)
    s.tokens[i] = step::gated_token<Mixer>(call, seq.a(i), seq.b(i), j, s.unit_q + i * K,
                                           s.unit_k + i * K, s.decay + i * K, s.read + i * K);
  for (int64_t r = 0; r < V; r += BLOCK_ROWS) {
    const int64_t num_rows = std::min(BLOCK_ROWS, V - r);
    float* rows = state + r * K;
    for (int64_t i = 0; i < seq.num_tokens; ++i) {
      if (i == seq.num_certain) {
        std::memcpy(s.ahead, rows, num_rows * K * sizeof(float));
        rows = s.ahead;
      }
      step(K, num_rows, 1, s.tokens[i], s.v + i * V + r, rows, s.o + i * V + r);
    }
  }
  for (int64_t i = seq.num_replayed; i < seq.num_tokens; ++i)
    Mixer::gated_norm(call, s.o + i * V, seq.z(i, j), seq.out(i, j));
}

// Leaves records of the gates of value heads from j on.
template <typename T>
void leave_gates(const Sequence<T>& seq, int64_t j, int64_t num_heads) {
  const Call& call = seq.call;
  const int64_t decays = (call.record_width - call.channels) / call.num_v_heads - 1;  // of a head
  for (int64_t i = seq.num_certain; i < seq.num_tokens; ++i) {
    T* gates = seq.record(seq.slot, i - seq.num_certain) + call.channels;
    std::memcpy(gates + j, seq.b(i) + j, num_heads * sizeof(T));
    std::memcpy(gates + call.num_v_heads + j * decays, seq.a(i) + j * decays,
                num_heads * decays * sizeof(T));
  }
}

// A key head of a sequence and its value heads.
template <typename Mixer, int W, typename T>
void run_item(const Sequence<T>& seq, int64_t h, int64_t group, Scratch<T>& s, Spare& spare) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim, k_size = call.num_v_heads / group * K;
  const int64_t of_k = k_size + h * K, of_v = 2 * k_size + h * group * V;
  if (seq.initial) prefetch(seq.state(seq.initial, h * group), delta::AHEAD);
  for (int64_t w = 0; w < W - 1; ++w) s.rows[w] = seq.initial ? seq.past(seq.initial, w) : nullptr;
  for (int64_t i = 0; i < seq.num_tokens; ++i) s.rows[W - 1 + i] = seq.inputs(i);
  convolve_tokens<W>(call, s.rows.data(), seq.num_tokens, h * K, K, s.q, K);
  convolve_tokens<W>(call, s.rows.data(), seq.num_tokens, of_k, K, s.k, K);
  for (int64_t i = 0; i < seq.num_tokens; ++i) {
    delta::load_key(s.q + i * K, K, true, float(call.scale), s.unit_q + i * K);
    delta::load_key(s.k + i * K, K, true, 1.0f, s.unit_k + i * K);
  }
  for (int64_t j = h * group; j < (h + 1) * group; ++j)
    run_head<Mixer, W>(seq, j, 2 * k_size + j * V, s, spare);
  if (!seq.slot) return;
  leave_channels(seq, s.rows.data(), h * K, K);
  leave_channels(seq, s.rows.data(), of_k, K);
  leave_channels(seq, s.rows.data(), of_v, group * V);
  leave_gates(seq, h * group, group);
}

template <typename Mixer, int W, typename T>
void run(const Call& call) {
  const int64_t k_size = (call.channels - call.num_v_heads * call.v_dim) / 2;
  const int64_t num_k_heads = k_size / call.k_dim, group = call.num_v_heads / num_k_heads;
#pragma omp parallel num_threads(step::num_threads_for(call, 2 * call.num_tokens))
  {
    AlignedFloats memory(Scratch<T>::num_floats(call));
    Scratch<T> scratch(call, memory.data());
    Spare spare;
    clear_padding<T>(call);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < call.num_seqs * num_k_heads; ++item)
      each_stretch(call, [&](auto stretch) {
        const Sequence<T> seq(call, item / num_k_heads, stretch);
        if (seq.num_tokens > 0)
          verify::run_item<Mixer, W>(seq, item % num_k_heads, group, scratch, spare);
      });
  }
}

template <typename Mixer, typename T>
void dispatch(const Call& call) {
  with_width(call.width, [&](auto width) { verify::run<Mixer, decltype(width)::value, T>(call); });
}

}  // namespace th::verify

#define TH_EXPORT_DELTA_STEP(Mixer, name)                                                     \
  TH_EXPORT_CALL(name, th::step::Call) {                                                       \
    if (!th::indices_are_valid(*call)) return false;                                           \
    const bool verifies = call->accepted;                                                      \
    if (!(verifies ? th::verify::records_are_valid(*call) : th::verify::slots_are_valid(*call))) \
      return false;                                                                            \
    const auto run = [&](auto type) {                                                          \
      using T = decltype(type);                                                                \
      verifies || !th::step::one_token_each(*call) ? th::verify::dispatch<Mixer, T>(*call)     \
                                                   : th::step::dispatch<Mixer, T>(*call);      \
    };                                                                                         \
    call->is_bf16 ? run(th::bf16{}) : run(0.0f);                                               \
    return true;                                                                               \
  }
