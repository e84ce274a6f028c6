// A delta rule on a CPU, for any rule of decay: which thread does what, and the exported functions.
//
// A rule is a struct of static functions:
//
//   decay(seq, t, j, decay)          e^g of token t for each channel of value head j
//   num_work(C, K)                   floats of Scratch::work that it wants
//   prepare_keys(seq, chunk, s)      what the value heads of a key head share, from s.keys
//   prepare_head(seq, j, chunk, s)   reads, writes, carry, system and attend for value head j
//
// and TH_EXPORT_DELTA_RULE(Rule, name) exports it: token by token where chunk_size is 0.
#pragma once

#include <algorithm>
#include <vector>

#include "aligned_floats.h"
#include "delta_rule_call.h"
#include "delta_rule_chunk.h"
#include "delta_rule_recurrent.h"

namespace th::delta {

// Up to this length, walking token by token costs less than bringing a state to scratch and back.
constexpr int64_t RECURRENT_LENGTH = 16;

// What the next item of a thread starts with: it lies far from what the thread is at.
template <typename T>
void fetch_item(const Call& call, int64_t item) {
  const Sequence<T> seq(call, item / call.num_v_heads);
  const int64_t j = item % call.num_v_heads, h = seq.key_head(j);
  prefetch(seq.q(0, h), call.k_dim);
  prefetch(seq.k(0, h), call.k_dim);
  prefetch(seq.v(0, j), call.v_dim);
  if (const float* state = seq.initial_state(j)) prefetch(state, AHEAD);
}

template <typename Rule, typename T>
void recurrent(const Call& call) {
  const int64_t num_items = call.num_seqs * call.num_v_heads;
  // Long enough stretches to keep neighbours together, short enough to level out lengths.
  const int64_t stretch = std::max<int64_t>(1, num_items / (8 * call.num_threads));
#pragma omp parallel num_threads(call.num_threads)
  {
    std::vector<float> scratch(token_floats(call.k_dim));
    Spare spare;
    clear_padding<T>(call);
#pragma omp for schedule(dynamic, stretch)
    for (int64_t item = 0; item < num_items; ++item) {
      const Sequence<T> seq(call, item / call.num_v_heads);
      const int64_t j = item % call.num_v_heads;
      if (item + 1 < num_items) fetch_item<T>(call, item + 1);
      if (seq.length > 0) run_recurrent<Rule>(seq, j, seq.open_state(j, spare), scratch.data());
    }
  }
}

// Value heads that a thread takes at once. Those of one key head share its products, but not when
// that would leave threads without work.
inline int64_t heads_per_item(const Call& call) {
  const bool enough = call.num_seqs * call.num_k_heads >= 4 * call.num_threads;
  return enough ? call.num_v_heads / call.num_k_heads : 1;
}

template <typename Rule, typename T>
void chunk(const Call& call) {
  const int64_t heads = heads_per_item(call), parts = call.num_v_heads / heads;
  const int64_t C = call.chunk_size, K = call.k_dim, num_work = Rule::num_work(C, K);
#pragma omp parallel num_threads(call.num_threads)
  {
    AlignedFloats memory(Scratch::num_floats(C, K, call.v_dim, heads, num_work));
    const Scratch scratch(memory.data(), C, K, num_work);
    Spare spare;
    clear_padding<T>(call);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < call.num_seqs * parts; ++item) {
      const Sequence<T> seq(call, item / parts);
      const int64_t begin = item % parts * heads, end = begin + heads;
      if (seq.length > RECURRENT_LENGTH)
        run_chunks<Rule>(seq, begin, end, scratch);
      else if (seq.length > 0)
        for (int64_t j = begin; j < end; ++j)
          run_recurrent<Rule>(seq, j, seq.open_state(j, spare), scratch.keys);
    }
  }
}

template <typename Rule, typename T>
void run(const Call& call) {
  call.chunk_size ? chunk<Rule, T>(call) : recurrent<Rule, T>(call);
}

}  // namespace th::delta

#define TH_EXPORT_DELTA_RULE(Rule, name)                                                        \
  TH_EXPORT_CALL(name, th::delta::Call) {                                                       \
    if (!th::indices_are_valid(*call)) return false;                                            \
    call->is_bf16 ? th::delta::run<Rule, th::bf16>(*call) : th::delta::run<Rule, float>(*call); \
    return true;                                                                                \
  }
