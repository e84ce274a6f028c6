// The backward of a delta rule on a CPU, for any rule of decay, derived from the chunk form.
//
// A thread takes one sequence and all value heads of one key head. It walks over the chunks once as
// the forward does, and keeps of each its state at the start, what its rows add to the state, and
// their errors (v less what the key reads). Then it walks back with the gradient of the state. All sums
// have a fixed order, whatever the number of threads.
//
// A rule has, beside what delta_rule.h asks for,
//
//   num_backward_work(C, K)                      floats of Gradients::work that it wants
//   backward_keys(seq, j, chunk, s, grads)       gradients of keys, g and beta by head j, from those
//                                                of reads, writes, carry, system and attend
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "aligned_floats.h"
#include "delta_rule_chunk.h"
#include "denormals.h"
#include "offsets.h"

namespace th::delta {

TH_CALL(BackwardCall,
  const void *q, *k, *v;  // as in Call
  const float *g, *beta;
  const int32_t* cu_seqlens;
  const float* initial_state;  // [N, HV, V, K], or null: from zeros
  const void* dout;            // [T, HV, V] in the op's dtype
  const float* dfinal_state;   // as initial_state
  void *dq, *dk, *dv;          // like q, k, v; these and the others are contiguous
  float *dg, *dbeta;
  float* dinitial_state;  // null where initial_state is
  int64_t num_tokens, num_seqs, num_k_heads, num_v_heads, k_dim, v_dim;
  int64_t q_stride, k_stride, v_stride, g_stride, beta_stride, dout_stride;
  int64_t g_dim;  // channels of a head that decay on their own: 1 or K
  int64_t qk_l2norm, chunk_size, is_bf16, num_threads;
  double scale;
);

// What the forward's functions ask a call for. Indices of slots are zeros: no state is in a pool.
inline Call forward_call(const BackwardCall& b, const int32_t* zeros) {
  return Call{.q = b.q, .k = b.k, .v = b.v, .g = b.g, .beta = b.beta, .state = nullptr,
              .cu_seqlens = b.cu_seqlens, .initial_indices = zeros, .state_indices = zeros,
              .out = nullptr, .num_tokens = b.num_tokens, .num_seqs = b.num_seqs, .num_slots = 1,
              .num_k_heads = b.num_k_heads, .num_v_heads = b.num_v_heads, .k_dim = b.k_dim,
              .v_dim = b.v_dim, .q_stride = b.q_stride, .k_stride = b.k_stride,
              .v_stride = b.v_stride, .g_stride = b.g_stride, .beta_stride = b.beta_stride,
              .qk_l2norm = b.qk_l2norm, .chunk_size = b.chunk_size, .is_bf16 = b.is_bf16,
              .num_threads = b.num_threads, .scale = b.scale};
}

template <typename T>
struct BackwardSequence : Sequence<T> {
  const BackwardCall& grads;
  int64_t n;

  BackwardSequence(const Call& call, const BackwardCall& grads, int64_t n)
      : Sequence<T>(call, n), grads(grads), n(n) {}

  const T* dout(int64_t t, int64_t j) const {
    return (const T*)grads.dout + (this->start + t) * grads.dout_stride + j * grads.v_dim;
  }
  T* dq(int64_t t, int64_t h) const { return (T*)grads.dq + key(t, h); }
  T* dk(int64_t t, int64_t h) const { return (T*)grads.dk + key(t, h); }
  T* dv(int64_t t, int64_t j) const {
    return (T*)grads.dv + ((this->start + t) * grads.num_v_heads + j) * grads.v_dim;
  }
  float* dg(int64_t t, int64_t j) const {
    return grads.dg + ((this->start + t) * grads.num_v_heads + j) * grads.g_dim;
  }
  float* dbeta(int64_t t, int64_t j) const {
    return grads.dbeta + (this->start + t) * grads.num_v_heads + j;
  }
  // A state of head j among those of all sequences, or null.
  template <typename F>
  F* state(F* states, int64_t j) const {
    return states ? states + (n * grads.num_v_heads + j) * grads.v_dim * grads.k_dim : nullptr;
  }

 private:
  int64_t key(int64_t t, int64_t h) const {
    return ((this->start + t) * grads.num_k_heads + h) * grads.k_dim;
  }
};

// The buffers of one thread, in the shapes of Scratch: gradients of what is there by these names.
struct Gradients {
  float* keys;              // [2 C, K], of all heads of the key head
  float *reads, *writes;    // [2 C, K], [C, K]
  float* carry;             // [K]
  float *system, *attend;   // [C, C]
  float* beta;              // [C]
  float *x, *added;         // [2 C, PANEL], [C, PANEL]
  float* work;              // the rule's own
  float* states;            // [heads, V / PANEL, K, PANEL]

  static int64_t num_floats(int64_t C, int64_t K, int64_t V, int64_t heads, int64_t work) {
    return 5 * C * K + round_up(K, LANES) + 2 * C * C + round_up(C, LANES) + 3 * C * PANEL +
           round_up(work, LANES) + heads * panels_size(V, K);
  }

  Gradients(float* p, int64_t C, int64_t K, int64_t num_work) {
    const auto take = [&p](int64_t n) { return (p += n) - n; };
    keys = take(2 * C * K), reads = take(2 * C * K), writes = take(C * K);
    carry = take(round_up(K, LANES)), system = take(C * C), attend = take(C * C);
    beta = take(round_up(C, LANES)), x = take(2 * C * PANEL), added = take(C * PANEL);
    work = take(round_up(num_work, LANES));
    states = p;
  }
};

// What is kept of a chunk and head, panel by panel of V.
struct Kept {
  float *state, *added, *error;  // [V / PANEL, K, PANEL], [V / PANEL, C, PANEL], likewise

  static int64_t num_floats(int64_t C, int64_t K, int64_t V) {
    return panels_size(V, K) + 2 * panels_size(V, C);
  }
  Kept(float* p, int64_t C, int64_t K, int64_t V)
      : state(p), added(p + panels_size(V, K)), error(added + panels_size(V, C)) {}
};

// Takes PANEL columns of a head through a chunk, as advance_panel does, but for outputs.
template <typename T>
void keep_panel(const Sequence<T>& seq, int64_t j, int64_t column, const Chunk& chunk,
                const Scratch& s, const Kept& kept, float* state) {
  const int64_t K = seq.call.k_dim, C = seq.call.chunk_size, rows = chunk.rows;
  const int64_t width = std::min<int64_t>(PANEL, seq.call.v_dim - column);
  float *added = kept.added + column * C, *error = kept.error + column * C;
  std::memcpy(kept.state + column * K, state, K * PANEL * sizeof(float));
  gemm_nn(int(rows), PANEL, int(K), s.reads, K, state, PANEL, added, PANEL);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < PANEL; c += LANES) {
      const int64_t at = i * PANEL + c;
      f32x16 v{};
      if (i < chunk.size && c < width)
        v = load(seq.v(chunk.first + i, j) + column + c, int(width - c));
      const f32x16 error_i = v - load(added + at);
      store(error + at, error_i);
      store(added + at, error_i * s.beta[i]);
    }
  for (int64_t i = 0; i < rows; i += BLOCK) {
    gemm_nn(BLOCK, PANEL, int(i), s.system + i * C, C, added, PANEL, added + i * PANEL, PANEL,
            1.0f);
    solve_block(s.system + i * C + i, C, added + i * PANEL);
  }
  for (int64_t k = 0; k < K; ++k)
    for (int64_t c = 0; c < PANEL; c += LANES)
      store(state + k * PANEL + c, load(state + k * PANEL + c) * s.carry[k]);
  gemm_tn(int(K), PANEL, int(rows), s.writes, K, added, PANEL, state, PANEL, 1.0f);
}

// Solves (I - A^T) x = x in place for BLOCK rows of x, A strictly lower triangular.
TH_INLINE void solve_block_transposed(const float* A, int64_t lda, float* x) {
  for (int c = 0; c < PANEL; c += REGISTER_LANES) {
    Register rows[BLOCK];
#pragma GCC unroll 8
    for (int i = BLOCK - 1; i >= 0; --i) {
      rows[i] = load_register(x + i * PANEL + c);
#pragma GCC unroll 8
      for (int j = i + 1; j < BLOCK; ++j)
        rows[i] = fma(A[j * lda + i] - Register{}, rows[j], rows[i]);
      store_register(x + i * PANEL + c, rows[i]);
    }
  }
}

// carry[k] += state[k] . dstate[k], of panels.
inline void add_carry(const float* state, const float* dstate, int64_t K, float* carry) {
  for (int64_t k = 0; k < K; k += LANES) {
    f32x16 sums[LANES] = {};
    for (int64_t i = 0; i < std::min<int64_t>(LANES, K - k); ++i)
      for (int64_t c = 0; c < PANEL; c += LANES)
        sums[i] = fma(load(state + (k + i) * PANEL + c), load(dstate + (k + i) * PANEL + c), sums[i]);
    store(carry + k, load(carry + k) + sum16(sums));  // room for whole vectors
  }
}

// Takes PANEL columns of the gradient of a state back through a chunk. `keep` is 0 for the first.
template <typename T>
void return_panel(const BackwardSequence<T>& seq, int64_t j, int64_t column, const Chunk& chunk,
                  const Scratch& s, const Kept& kept, const Gradients& d, float* dstate,
                  float keep) {
  const int64_t K = seq.call.k_dim, C = seq.call.chunk_size, rows = chunk.rows;
  const int64_t width = std::min<int64_t>(PANEL, seq.call.v_dim - column);
  const int R = int(rows);
  const float *state = kept.state + column * K, *added = kept.added + column * C;
  const float* error = kept.error + column * C;
  float *derror = d.x, *dout = d.x + rows * PANEL;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < PANEL; c += LANES) {
      f32x16 x{};
      if (i < chunk.size && c < width)
        x = load(seq.dout(chunk.first + i, j) + column + c, int(width - c));
      store(dout + i * PANEL + c, x);
    }
  gemm_tn(R, PANEL, R, s.attend, C, dout, PANEL, d.added, PANEL);
  gemm_nn(R, PANEL, int(K), s.writes, K, dstate, PANEL, d.added, PANEL, 1.0f);
  gemm_nt(R, int(K), PANEL, added, PANEL, dstate, PANEL, d.writes, K, keep);
  add_carry(state, dstate, K, d.carry);
  for (int64_t i = rows - BLOCK; i >= 0; i -= BLOCK) {
    const int64_t below = i + BLOCK;
    float* x_i = d.added + i * PANEL;
    gemm_tn(BLOCK, PANEL, int(rows - below), s.system + below * C + i, C, d.added + below * PANEL,
            PANEL, x_i, PANEL, 1.0f);
    solve_block_transposed(s.system + i * C + i, C, x_i);
  }
  gemm_nt(R, R, PANEL, d.added, PANEL, added, PANEL, d.system, C, keep);
  gemm_nt(R, R, PANEL, dout, PANEL, added, PANEL, d.attend, C, keep);
  for (int64_t i = 0; i < rows; ++i) {
    float* x_i = d.added + i * PANEL;
    d.beta[i] = dot(x_i, error + i * PANEL, PANEL) + keep * d.beta[i];
    for (int64_t c = 0; c < PANEL; c += LANES) {
      const f32x16 dv = load(x_i + c) * s.beta[i];
      store(derror + i * PANEL + c, -dv);
      if (i < chunk.size && c < width)
        store(seq.dv(chunk.first + i, j) + column + c, dv, int(width - c));
    }
  }
  gemm_nt(2 * R, int(K), PANEL, d.x, PANEL, state, PANEL, d.reads, K, keep);
  for (int64_t k = 0; k < K; ++k)
    for (int64_t c = 0; c < PANEL; c += LANES)
      store(dstate + k * PANEL + c, load(dstate + k * PANEL + c) * s.carry[k]);
  gemm_tn(int(K), PANEL, 2 * R, s.reads, K, d.x, PANEL, dstate, PANEL, 1.0f);
}

// The gradient of a row as it came, by that of the row in s.keys: x f, f = scale / length.
template <typename T>
void store_key_gradient(const T* from, const float* key, const float* grad, int64_t K,
                        bool normalize, float scale, T* to) {
  const float norm = normalize ? std::sqrt(squared_norm(from, K) + 1e-6f) : 1.0f;
  const float factor = scale / norm;
  const float along = normalize ? dot(key, grad, K) / (scale * scale) : 0.0f;
  for_lanes(K, [&](int64_t c, int n) TH_LAMBDA {
    store(to + c, (load(grad + c, n) - load(key + c, n) * along) * factor, n);
  });
}

template <typename T>
void store_key_gradients(const BackwardSequence<T>& seq, int64_t h, const Chunk& chunk,
                         const Scratch& s, const Gradients& d) {
  const int64_t K = seq.call.k_dim, q_rows = chunk.rows * K;
  for (int64_t i = 0; i < chunk.size; ++i) {
    const int64_t t = chunk.first + i, at = i * K;
    store_key_gradient(seq.k(t, h), s.keys + at, d.keys + at, K, seq.call.qk_l2norm, 1.0f,
                       seq.dk(t, h));
    store_key_gradient(seq.q(t, h), s.keys + q_rows + at, d.keys + q_rows + at, K,
                       seq.call.qk_l2norm, float(seq.call.scale), seq.dq(t, h));
  }
}

template <typename Rule, typename T>
void prepare(const Sequence<T>& seq, int64_t j, const Chunk& chunk, const Scratch& s) {
  for (int64_t i = 0; i < chunk.rows; ++i)
    s.beta[i] = i < chunk.size ? seq.beta(chunk.first + i, j) : 0.0f;
  Rule::prepare_head(seq, j, chunk, s);
}

template <typename Rule, typename T>
void return_chunks(const BackwardSequence<T>& seq, int64_t h, const Scratch& s, const Gradients& d) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim, C = call.chunk_size;
  const int64_t heads = call.num_v_heads / call.num_k_heads, begin = h * heads;
  const int64_t num_chunks = (seq.length + C - 1) / C, kept_size = Kept::num_floats(C, K, V);
  AlignedFloats memory(num_chunks * heads * kept_size);
  const auto kept = [&](int64_t x, int64_t j) {
    return Kept(memory.data() + (x * heads + j - begin) * kept_size, C, K, V);
  };
  const auto panels = [&](float* states, int64_t j) {
    return states + (j - begin) * panels_size(V, K);
  };
  const auto open = [&](int64_t x) {
    const int64_t first = x * C, size = std::min(C, seq.length - first);
    const Chunk chunk{first, size, round_up(size, BLOCK)};
    load_keys(seq, h, chunk, s);
    Rule::prepare_keys(seq, chunk, s);
    return chunk;
  };
  for (int64_t j = begin; j < begin + heads; ++j) {
    load_panels(seq.state(seq.grads.initial_state, j), V, K, panels(s.states, j));
    load_panels(seq.state(seq.grads.dfinal_state, j), V, K, panels(d.states, j));
  }
  for (int64_t x = 0; x < num_chunks; ++x) {
    const Chunk chunk = open(x);
    for (int64_t j = begin; j < begin + heads; ++j) {
      prepare<Rule>(seq, j, chunk, s);
      for (int64_t c = 0; c < V; c += PANEL)
        keep_panel(seq, j, c, chunk, s, kept(x, j), panels(s.states, j) + c * K);
    }
  }
  for (int64_t x = num_chunks - 1; x >= 0; --x) {
    const Chunk chunk = open(x);
    std::fill(d.keys, d.keys + 2 * chunk.rows * K, 0.0f);
    for (int64_t j = begin; j < begin + heads; ++j) {
      prepare<Rule>(seq, j, chunk, s);
      std::fill(d.carry, d.carry + round_up(K, LANES), 0.0f);
      for (int64_t c = 0; c < V; c += PANEL)
        return_panel(seq, j, c, chunk, s, kept(x, j), d, panels(d.states, j) + c * K,
                     c > 0 ? 1.0f : 0.0f);
      Rule::backward_keys(seq, j, chunk, s, d);
      for (int64_t i = 0; i < chunk.size; ++i) *seq.dbeta(chunk.first + i, j) = d.beta[i];
    }
    store_key_gradients(seq, h, chunk, s, d);
  }
  for (int64_t j = begin; j < begin + heads; ++j)
    store_panels(panels(d.states, j), V, K, seq.state(seq.grads.dinitial_state, j));
}

// Gradients of the tokens past the last sequence.
template <typename T>
void clear_padding_gradients(const BackwardCall& call) {
  const int64_t end = call.cu_seqlens[call.num_seqs], left = call.num_tokens - end;
  const auto clear = [&](auto* rows, int64_t size) {
    std::fill(rows + end * size, rows + (end + left) * size, std::decay_t<decltype(*rows)>{});
  };
  clear((T*)call.dq, call.num_k_heads * call.k_dim);
  clear((T*)call.dk, call.num_k_heads * call.k_dim);
  clear((T*)call.dv, call.num_v_heads * call.v_dim);
  clear(call.dg, call.num_v_heads * call.g_dim);
  clear(call.dbeta, call.num_v_heads);
}

template <typename Rule, typename T>
void backward(const BackwardCall& grads) {
  const std::vector<int32_t> zeros(grads.num_seqs);
  const Call call = forward_call(grads, zeros.data());
  const int64_t C = call.chunk_size, K = call.k_dim, V = call.v_dim;
  const int64_t heads = call.num_v_heads / call.num_k_heads, num_work = Rule::num_work(C, K);
  const int64_t num_grads_work = Rule::num_backward_work(C, K);
  clear_padding_gradients<T>(grads);
#pragma omp parallel num_threads(call.num_threads)
  {
    const DenormalsAreZero denormals;
    const int64_t size = Scratch::num_floats(C, K, V, heads, num_work);
    const int64_t grads_size = Gradients::num_floats(C, K, V, heads, num_grads_work);
    AlignedFloats memory(size), grads_memory(grads_size);
    std::fill(memory.data(), memory.data() + size, 0.0f);  // above diagonals nobody writes
    std::fill(grads_memory.data(), grads_memory.data() + grads_size, 0.0f);
    const Scratch s(memory.data(), C, K, num_work);
    const Gradients d(grads_memory.data(), C, K, num_grads_work);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < call.num_seqs * call.num_k_heads; ++item) {
      const BackwardSequence<T> seq(call, grads, item / call.num_k_heads);
      const bool has_gradients = seq.length > 0 || grads.dinitial_state;
      if (has_gradients) return_chunks<Rule>(seq, item % call.num_k_heads, s, d);
    }
  }
}

}  // namespace th::delta

#define TH_EXPORT_DELTA_RULE_BACKWARD(Rule, name)                      \
  TH_EXPORT_CALL(name, th::delta::BackwardCall) {                      \
    if (!th::offsets_are_valid(*call)) return false;                   \
    call->is_bf16 ? th::delta::backward<Rule, th::bf16>(*call)         \
                  : th::delta::backward<Rule, float>(*call);           \
    return true;                                                       \
  }
