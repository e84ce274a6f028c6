// The experts of a mixture whose weights are stored in some way, which whoever includes this names:
// each way is a library of its own, so that nobody waits for the compiler with those of others.
//
//   Experts<T, W>(call).run()      for x of T, and weights as W of rows.h says
#pragma once

#include <atomic>
#include <vector>

#include "call.h"
#include "rows.h"
#include "softmax.h"

namespace experts {

TH_CALL(Call,
  // Weights of experts are 1 where there are none; without gate_up, tokens are [T, width] hidden ones.
  const void *x, *expert_ids, *expert_weights, *gate_up, *down;
  const void *gate_up_scales, *down_scales;  // null where weights have none
  void *hidden, *out;
  int64_t num_tokens, top_k, num_experts, dim, width, ldx;  // width: rows of gate, and of up
  int64_t ids_are_int64, weights_are_float, has_gate, streams, by_hardware, is_bf16, is_invariant;
  int64_t num_threads;
  int64_t format;
  // Of integers: how many elements of a row share a scale, and whether zero points stand beside these.
  int64_t gate_up_group, down_group, gate_up_has_zeros, down_has_zeros;
  double limit;  // of gate, and of up in both directions; infinity where there is none
  double gate_softcap, up_softcap;  // 0 where there are none
);

constexpr int ROWS = 96;  // of one expert's tokens, multiplied at a time
// Weight rows that a thread takes at a time: few leave no thread without, and of many the same
// tokens are packed less often.
constexpr int64_t MIN_CHUNK = 128, MAX_WIDTH_CHUNK = 384, CHUNKS_PER_THREAD = 3;
constexpr int64_t MAX_SUMS = 128 << 10;  // of all tokens, which stay in L2

// The (token, choice) pairs in the order of their experts: those of expert e are
// pairs[first[e]] to pairs[first[e + 1] - 1]. A token's own pairs keep their order.
struct Routing {
  std::vector<int64_t> first, pairs, experts;

  explicit Routing(const Call& call) : first(call.num_experts + 1, 0) {
    const int64_t count = call.num_tokens * call.top_k;
    for (int64_t p = 0; p < count; ++p)
      if (chosen(call, p)) ++first[expert(call, p) + 1];
    for (int64_t e = 0; e < call.num_experts; ++e) {
      if (first[e + 1]) experts.push_back(e);
      first[e + 1] += first[e];
    }
    pairs.resize(first.back());
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t p = 0; p < count; ++p)
      if (chosen(call, p)) pairs[next[expert(call, p)]++] = p;
  }

  static int64_t expert(const Call& call, int64_t pair) {
    return call.ids_are_int64 ? static_cast<const int64_t*>(call.expert_ids)[pair]
                              : static_cast<const int32_t*>(call.expert_ids)[pair];
  }
  static bool chosen(const Call& call, int64_t pair) {
    return expert(call, pair) < call.num_experts;
  }
};

// Whether each choice is an expert, or the number of experts, which means none.
inline bool ids_are_valid(const Call& call) {
  for (int64_t p = 0; p < call.num_tokens * call.top_k; ++p) {
    const int64_t e = Routing::expert(call, p);
    if (e < 0 || e > call.num_experts) return false;
  }
  return true;
}

// Tokens of T, whose experts a call asks for, and what does not depend on how weights are stored.
template <typename T>
class Tokens {
 protected:
  explicit Tokens(const Call& call) : call_(call), routing_(call) {}

  // hidden[pair, i ...] = silu(gate) * up, both within the limit, or sigmoid(gate) and both capped,
  // or relu(up)^2, of the pairs from p on.
  TH_NOINLINE void write_hidden(int64_t p, int rows, int64_t i, int64_t count, const float* gate,
                                const float* up) const {
    for (int r = 0; r < rows; ++r)
      for (int64_t j = 0; j < count; j += th::LANES) {
        const int left = int(std::min<int64_t>(th::LANES, count - j));
        th::f32x16 u = th::load(up + r * count + j, left), a = th::max(u, th::f32x16{});
        if (call_.has_gate) {
          const th::f32x16 g = th::load(gate + r * count + j, left);
          if (call_.gate_softcap != 0) {
            a = capped(g, call_.gate_softcap) * th::sigmoid(g);
            u = capped(u, call_.up_softcap);
          } else {
            a = th::silu(at_most(g));
            u = -at_most(-at_most(u));
          }
        }
        th::store(typed(call_.hidden) + (p + r) * call_.width + i + j, a * u, left);
      }
  }

  // Adds y of the pairs from p on, times their weights, to the sums of their tokens.
  TH_NOINLINE void add(int64_t p, int rows, int64_t count, const float* y, float* sums) const {
    for (int r = 0; r < rows; ++r, y += count) {
      const int64_t pair = routing_.pairs[p + r];
      float* its = sums + pair / call_.top_k * count;
      const float weight = !call_.expert_weights ? 1.0f
                           : call_.weights_are_float
                               ? static_cast<const float*>(call_.expert_weights)[pair]
                               : th::to_float(typed(call_.expert_weights)[pair]);
      for (int64_t j = 0; j < count; ++j) its[j] = th::fma(weight, y[j], its[j]);
    }
  }

  // out[:, d ...] = sums, of all tokens.
  TH_NOINLINE void write_out(int64_t d, int64_t count, const float* sums) const {
    for (int64_t t = 0; t < call_.num_tokens; ++t)
      for (int64_t j = 0; j < count; j += th::LANES) {
        const int left = int(std::min<int64_t>(th::LANES, count - j));
        th::store(typed(call_.out) + t * call_.dim + d + j, th::load(sums + t * count + j, left),
                  left);
      }
  }

  template <typename Block>
  void for_blocks(int64_t expert, const Block& block) const {
    const int64_t last = routing_.first[expert + 1];
    for (int64_t p = routing_.first[expert]; p < last; p += ROWS)
      block(p, int(std::min<int64_t>(ROWS, last - p)));
  }

  // Hidden activations of a pair; without a first product, they are the tokens.
  const T* hidden_row(int64_t p) const {
    return call_.gate_up ? typed(call_.hidden) + p * call_.width : token_row(p);
  }
  const T* token_row(int64_t p) const {
    return typed(call_.x) + routing_.pairs[p] / call_.top_k * call_.ldx;
  }

  static T* typed(void* data) { return static_cast<T*>(data); }
  static const T* typed(const void* data) { return static_cast<const T*>(data); }

  const Call& call_;
  const th::Reading reading_{call_.streams, call_.by_hardware != 0};
  const Routing routing_;

 private:
  // A NaN stays one.
  th::f32x16 at_most(th::f32x16 x) const {
    const th::f32x16 limit = th::splat(float(call_.limit));
    return th::select(x > limit, limit, x);
  }

  static th::f32x16 capped(th::f32x16 x, double softcap) {
    return float(softcap) * th::tanh(x * float(1.0 / softcap));
  }
};

template <typename T, typename W>
struct Scratch {
  th::Rows<T, W> rows;
  std::vector<float> gate, up, sums;
};

template <typename T, typename W>
class Experts : Tokens<T> {
  using Base = Tokens<T>;

 public:
  explicit Experts(const Call& call) : Base(call) {}

  void run() {
    std::atomic<int64_t> hidden_taken{0}, out_taken{0};
#pragma omp parallel num_threads(int(call_.num_threads))
    {
      static thread_local Scratch<T, W> scratch;
      const int64_t num_experts = int64_t(routing_.experts.size());
      const int64_t rows = chunk(num_experts * call_.width, MAX_WIDTH_CHUNK);
      const int64_t chunks = (call_.width + rows - 1) / rows;
      for (int64_t i; call_.gate_up && (i = hidden_taken++) < num_experts * chunks;) {
        const int64_t first = i % chunks * rows;
        hidden_chunk(scratch, routing_.experts[i / chunks], first,
                     std::min(rows, call_.width - first));
      }
#pragma omp barrier
      const int64_t columns = chunk(call_.dim, MAX_SUMS / call_.num_tokens);
      for (int64_t d; (d = out_taken++ * columns) < call_.dim;)
        out_chunk(scratch, d, std::min(columns, call_.dim - d));
    }
  }

 private:
  using Base::add, Base::write_hidden, Base::write_out;
  using Base::call_, Base::reading_, Base::routing_;
  using Base::for_blocks, Base::hidden_row, Base::token_row, Base::typed;

  // Of the weight rows that all threads share, up to `most` at a time.
  int64_t chunk(int64_t rows, int64_t most) const {
    const int64_t share = std::min(rows / (call_.num_threads * CHUNKS_PER_THREAD), most);
    return std::max<int64_t>(share / MIN_CHUNK, 1) * MIN_CHUNK;
  }

  // Hidden activations [i, i + count) of all tokens of an expert.
  void hidden_chunk(Scratch<T, W>& s, int64_t expert, int64_t i, int64_t count) {
    const int64_t gate = expert * (1 + call_.has_gate), up = gate + call_.has_gate;
    s.gate.resize(ROWS * count), s.up.resize(ROWS * count);
    for_blocks(expert, [&](int64_t p, int rows) {
      s.rows.pack(rows, call_.dim, [&](int r) { return token_row(p + r); },
                  call_.is_invariant);
      if (call_.has_gate)
        s.rows.multiply(gate_up(gate), i, count, s.gate.data(), count, reading_);
      s.rows.multiply(gate_up(up), i, count, s.up.data(), count, reading_);
      write_hidden(p, rows, i, count, s.gate.data(), s.up.data());
    });
  }

  // out[:, d ...] of all tokens: one thread owns the columns, so nothing is added concurrently,
  // and each token's experts are added in the order of their numbers.
  void out_chunk(Scratch<T, W>& s, int64_t d, int64_t count) {
    s.sums.assign(call_.num_tokens * count, 0.0f);
    s.up.resize(ROWS * count);
    for (int64_t expert : routing_.experts)
      for_blocks(expert, [&](int64_t p, int rows) {
        s.rows.pack(rows, call_.width, [&](int r) { return hidden_row(p + r); },
                    call_.is_invariant);
        s.rows.multiply(down(expert), d, count, s.up.data(), count, reading_);
        add(p, rows, count, s.up.data(), s.sums.data());
      });
    write_out(d, count, s.sums.data());
  }

  W gate_up(int64_t n) const {
    return weights(W{}, call_.gate_up, call_.gate_up_scales, n, call_.width, call_.dim,
                   call_.gate_up_group, call_.gate_up_has_zeros);
  }
  W down(int64_t n) const {
    return weights(W{}, call_.down, call_.down_scales, n, call_.dim, call_.width, call_.down_group,
                   call_.down_has_zeros);
  }

  // The n-th of weights [rows, depth] that lie one after the other.
  static W weights(th::Weights<T>, const void* data, const void* scales, int64_t n, int64_t rows,
                   int64_t depth, int64_t, int64_t) {
    const auto blocks = [](int64_t size) { return (size + th::FP8_BLOCK - 1) / th::FP8_BLOCK; };
    if (!scales) return {typed(data) + n * rows * depth, nullptr, depth};
    return {static_cast<const uint8_t*>(data) + n * rows * depth,
            static_cast<const float*>(scales) + n * blocks(rows) * blocks(depth), depth};
  }
  template <typename Q>
  static W weights(th::Integers<Q>, const void* data, const void* scales, int64_t n, int64_t rows,
                   int64_t depth, int64_t group, int64_t has_zeros) {
    th::Integers<Q> all{data, static_cast<const float*>(scales), depth, group, has_zeros != 0};
    all.data = all.row(n * rows), all.scales = all.scales_of(n * rows);
    return all;
  }
};

}  // namespace experts
