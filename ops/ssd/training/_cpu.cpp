// Backward of linear attention with a scalar decay on a CPU, derived from the chunk form.
//
// A thread takes one sequence and HEADS heads of one group. It walks over the chunks once as the
// forward does, and keeps of each its state at the start. Then it walks back with the gradient of
// the state. What heads add to the gradients of q and k is summed over them at last. All sums have
// a fixed order, whatever the number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "aligned_floats.h"
#include "denormals.h"
#include "offsets.h"
#include "ssd_chunk.h"

namespace th::ssd {

TH_CALL(BackwardCall,
  const void *q, *k, *v;  // as in Call
  const float *g, *dt, *D;
  const int32_t* cu_seqlens;
  const float* initial_state;  // [N, H, V, K], or null: from zeros
  const void* dout;            // [T, H, V] in the op's dtype
  const float* dfinal_state;   // as initial_state
  void *dq, *dk, *dv;          // like q, k, v; these and the others are contiguous
  float *dg, *ddt, *dD;        // ddt and dD are null where dt and D are
  float* dinitial_state;       // null where initial_state is
  int64_t num_tokens, num_seqs, num_k_heads, num_v_heads, k_dim, v_dim;
  int64_t q_stride, k_stride, v_stride, g_stride, dt_stride, dout_stride;
  int64_t chunk_size, is_bf16, num_threads;
  double scale;
);

constexpr int64_t HEADS = 4;

// What the forward's functions ask a call for. Indices of slots are zeros: no state is in a pool.
Call forward_call(const BackwardCall& b, const int32_t* zeros) {
  return Call{.q = b.q, .k = b.k, .v = b.v, .g = b.g, .dt = b.dt, .D = b.D, .state = nullptr,
              .cu_seqlens = b.cu_seqlens, .initial_indices = zeros, .state_indices = zeros,
              .out = nullptr, .num_tokens = b.num_tokens, .num_seqs = b.num_seqs, .num_slots = 1,
              .num_k_heads = b.num_k_heads, .num_v_heads = b.num_v_heads, .k_dim = b.k_dim,
              .v_dim = b.v_dim, .q_stride = b.q_stride, .k_stride = b.k_stride,
              .v_stride = b.v_stride, .g_stride = b.g_stride, .dt_stride = b.dt_stride,
              .chunk_size = b.chunk_size, .sums_decays = 1, .is_bf16 = b.is_bf16,
              .num_threads = b.num_threads, .scale = b.scale};
}

// What all threads leave for the last sums.
struct Sums {
  float *dq, *dk;  // [parts of a group, T, G, K]
  float* own;      // [T, H]: dout . v
};

template <typename T>
struct BackwardSequence : Sequence<T> {
  const BackwardCall& grads;
  const Sums& sums;
  int64_t n;

  BackwardSequence(const Call& call, const BackwardCall& grads, const Sums& sums, int64_t n)
      : Sequence<T>(call, n), grads(grads), sums(sums), n(n) {}

  const T* dout(int64_t t, int64_t h) const {
    return (const T*)grads.dout + (this->start + t) * grads.dout_stride + h * grads.v_dim;
  }
  int64_t at(int64_t t, int64_t h) const { return (this->start + t) * grads.num_v_heads + h; }
  T* dv(int64_t t, int64_t h) const { return (T*)grads.dv + at(t, h) * grads.v_dim; }
  // A row of a part's share in the gradients of q or k.
  float* key_row(float* shares, int64_t part, int64_t t, int64_t group) const {
    const int64_t token = part * grads.num_tokens + this->start + t;
    return shares + (token * grads.num_k_heads + group) * grads.k_dim;
  }
  // A state of head h among those of all sequences, or null.
  template <typename F>
  F* state(F* states, int64_t h) const {
    return states ? states + (n * grads.num_v_heads + h) * grads.v_dim * grads.k_dim : nullptr;
  }
};

// The buffers of one thread beside Scratch. There, `left` has weights besides decays, and `attend`
// no weights.
struct Gradients {
  float *dq, *dk;           // [C, K], summed over heads
  float *reads, *writes;    // [C, K]: what a head adds by the state before and after the chunk
  float* pairs;             // [C, C]: decays from each column to each row
  float *dattend, *dproducts;  // [C, C]: dout v^T; and gradients of q k^T, summed over heads
  float *dout, *read;       // [C, PANEL]: and by the decay since the start
  float *du, *written;      // [C, PANEL]: gradients of values with weights, and their part by states
  float *to_end, *columns, *between, *ddt, *own;  // [C]
  float* states;            // [heads, V / PANEL, K, PANEL]

  static int64_t num_floats(int64_t C, int64_t K, int64_t V) {
    return 4 * C * round_up(K, LANES) + 3 * C * C + 4 * C * PANEL + 5 * round_up(C, LANES) +
           HEADS * th::panels_size(V, K);
  }

  Gradients(float* p, int64_t C, int64_t K) {
    const auto take = [&p](int64_t n) { return (p += n) - n; };
    for (float** rows : {&dq, &dk, &reads, &writes}) *rows = take(C * round_up(K, LANES));
    for (float** square : {&pairs, &dattend, &dproducts}) *square = take(C * C);
    for (float** panel : {&dout, &read, &du, &written}) *panel = take(C * PANEL);
    for (float** row : {&to_end, &columns, &between, &ddt, &own}) *row = take(round_up(C, LANES));
    states = p;
  }
};

// The decays of head h over a chunk, as in the forward.
template <typename T>
void prepare_pairs(const Sequence<T>& seq, int64_t h, const Chunk& chunk, const Scratch& s,
                   const Gradients& d) {
  const int64_t C = seq.call.chunk_size;
  std::fill(d.to_end, d.to_end + C, 0.0f);
  for (int64_t i = 0; i < C; ++i)
    s.dt[i] = i < chunk.size ? seq.dt(chunk.first + i, h) : 0.0f;
  for (int64_t i = 0; i < chunk.rows; ++i) {
    const float decay = i < chunk.size ? std::exp(seq.g(chunk.first + i, h)) : 1.0f;
    advance_decays(i, decay, d.to_end);
    for (int64_t c = 0; c <= i; c += LANES) {
      const int64_t at = i * C + c;
      th::store(d.pairs + at, th::load(d.to_end + c));
      th::store(s.attend + at, th::load(s.products + at) * th::load(d.to_end + c));
    }
  }
  sum_decays(seq, h, chunk, s.decay, d.to_end);
  for (int64_t i = 0; i < C; i += LANES)
    th::store(s.left + i, th::load(d.to_end + i) * th::load(s.dt + i));
}

// The gradients of the outputs of a chunk in float32, and by the decay since its start.
template <typename T>
void load_gradients(const BackwardSequence<T>& seq, const Columns& columns, const Chunk& chunk,
                    const Scratch& s, const Gradients& d) {
  for (int64_t i = 0; i < chunk.rows; ++i)
    for (int64_t c = 0; c < PANEL; c += LANES) {
      f32x16 x{};
      if (i < chunk.size && c < columns.width)
        x = th::load(seq.dout(chunk.first + i, columns.h) + columns.first + c,
                     int(columns.width - c));
      th::store(d.dout + i * PANEL + c, x);
      th::store(d.read + i * PANEL + c, x * s.decay[i]);
    }
}

// Gradients of PANEL columns of values, and what they add to those of weights.
template <typename T>
void store_values(const BackwardSequence<T>& seq, const Columns& columns, const Chunk& chunk,
                  const Scratch& s, const Gradients& d, float keep) {
  const float D = seq.D(columns.h);
  for (int64_t i = 0; i < chunk.size; ++i) {
    float *du = d.du + i * PANEL, *dout = d.dout + i * PANEL;
    for (int64_t c = 0; c < PANEL; c += LANES) {
      const f32x16 x = th::load(du + c) + th::load(d.written + i * PANEL + c) * d.to_end[i];
      th::store(du + c, x);
      if (c < columns.width)
        th::store(seq.dv(chunk.first + i, columns.h) + columns.first + c,
                  x * s.dt[i] + th::load(dout + c) * D, int(columns.width - c));
    }
    d.ddt[i] = th::dot(du, s.v + i * PANEL, PANEL) + keep * d.ddt[i];
    d.own[i] = th::dot(dout, s.v + i * PANEL, PANEL) + keep * d.own[i];
  }
}

// Takes PANEL columns of the gradient of a state back through a chunk. `keep` is 0 for the first.
// Returns state . dstate.
template <typename T>
float return_panel(const BackwardSequence<T>& seq, const Columns& columns, const Chunk& chunk,
                   const Scratch& s, const Gradients& d, const float* state, float* dstate,
                   float keep) {
  const int64_t C = seq.call.chunk_size;
  const int K = int(seq.call.k_dim), R = int(chunk.rows);
  load_values(seq, columns, chunk, s);
  load_gradients(seq, columns, chunk, s, d);
  th::gemm_tn(R, PANEL, R, s.attend, C, d.dout, PANEL, d.du, PANEL);
  th::gemm_nn(R, PANEL, K, s.k, K, dstate, PANEL, d.written, PANEL);
  th::gemm_nt(R, R, PANEL, d.dout, PANEL, s.v, PANEL, d.dattend, C, keep);
  th::gemm_nt(R, K, PANEL, d.read, PANEL, state, PANEL, d.reads, K, keep);
  th::gemm_nt(R, K, PANEL, s.kept, PANEL, dstate, PANEL, d.writes, K, keep);
  store_values(seq, columns, chunk, s, d, keep);
  const float both = th::dot(state, dstate, int64_t(K) * PANEL);
  th::gemm_tn(K, PANEL, R, s.q, K, d.read, PANEL, dstate, PANEL, s.decay[R - 1]);
  return both;
}

// Adds a head's gradients of q k^T to those of the others, and sums for each row the pairs that its
// decay lies between, from the last row on: no difference of sums is taken.
inline void add_pairs(int64_t C, const Chunk& chunk, const Scratch& s, const Gradients& d) {
  std::fill(d.columns, d.columns + C, 0.0f);
  for (int64_t i = chunk.rows - 1; i >= 0; --i) {
    f32x16 sums{};
    for (int64_t c = 0; c <= i; c += LANES) {
      const int64_t at = i * C + c;
      const i32x16 token = th::lane_numbers() + int(c);
      const f32x16 dproduct = th::load(d.dattend + at) * th::load(s.dt + c) * th::load(d.pairs + at);
      th::store(d.dproducts + at, th::load(d.dproducts + at) + dproduct);
      const f32x16 pair = th::select(token < int(i), dproduct * th::load(s.products + at), f32x16{});
      const f32x16 column = th::load(d.columns + c) + pair;
      th::store(d.columns + c, column);
      sums += th::select(token < int(i), column, f32x16{});
    }
    d.between[i] = th::sum(sums);
  }
}

// Gradients of the decays and weights of head h, and its shares in those of q and k.
template <typename T>
void store_head(const BackwardSequence<T>& seq, int64_t h, const Chunk& chunk, const Scratch& s,
                const Gradients& d, float whole) {
  const int64_t K = seq.call.k_dim;
  add_pairs(seq.call.chunk_size, chunk, s, d);
  for (int64_t i = 0; i < chunk.rows * K; i += LANES) {
    th::store(d.dq + i, th::load(d.dq + i) + th::load(d.reads + i));
    th::store(d.dk + i, th::load(d.dk + i) + th::load(d.writes + i));
  }
  // A decay is in all that is read at its row or after it, and in all that is written before it.
  float read = 0.0f, written = 0.0f;
  for (int64_t i = chunk.size - 1; i >= 0; --i)
    d.between[i] += read += th::dot(s.q + i * K, d.reads + i * K, K);
  for (int64_t i = 0; i < chunk.size; ++i) {
    const int64_t at = seq.at(chunk.first + i, h);
    seq.grads.dg[at] = d.between[i] + written + whole;
    written += th::dot(s.k + i * K, d.writes + i * K, K);
    if (seq.grads.ddt) seq.grads.ddt[at] = d.ddt[i];
    seq.sums.own[at] = d.own[i];
  }
}

// One sequence on the heads of one part of a group.
template <typename T>
void return_chunks(const BackwardSequence<T>& seq, int64_t group, int64_t part, const Scratch& s,
                   const Gradients& d) {
  const Call& call = seq.call;
  const int64_t K = call.k_dim, V = call.v_dim, C = call.chunk_size;
  const int64_t group_size = call.num_v_heads / call.num_k_heads;
  const int64_t begin = group * group_size + part * HEADS;
  const int64_t end = group * group_size + std::min(group_size, (part + 1) * HEADS);
  const int64_t num_chunks = (seq.length + C - 1) / C, size = th::panels_size(V, K);
  th::AlignedFloats kept(num_chunks * (end - begin) * size);
  const auto kept_state = [&](int64_t x, int64_t h) {
    return kept.data() + (x * (end - begin) + h - begin) * size;
  };
  const auto open = [&](int64_t x) {
    const int64_t first = x * C, length = std::min(C, seq.length - first);
    const Chunk chunk{first, length, round_up(length, BLOCK)};
    prepare_keys(seq, group, chunk, s);
    return chunk;
  };
  for (int64_t h = begin; h < end; ++h) {
    th::load_panels(seq.state(seq.grads.initial_state, h), V, K, s.states + (h - begin) * size);
    th::load_panels(seq.state(seq.grads.dfinal_state, h), V, K, d.states + (h - begin) * size);
  }
  for (int64_t x = 0; x < num_chunks; ++x) {
    const Chunk chunk = open(x);
    for (int64_t h = begin; h < end; ++h) {
      prepare_pairs(seq, h, chunk, s, d);
      float* states = s.states + (h - begin) * size;
      std::memcpy(kept_state(x, h), states, size * sizeof(float));
      for (int64_t c = 0; c < V; c += PANEL) {
        load_values(seq, Columns{h, c, std::min<int64_t>(PANEL, V - c)}, chunk, s);
        th::gemm_tn(int(K), PANEL, int(chunk.rows), s.k, K, s.kept, PANEL, states + c * K, PANEL,
                    s.decay[chunk.rows - 1]);
      }
    }
  }
  for (int64_t x = num_chunks - 1; x >= 0; --x) {
    const Chunk chunk = open(x);
    const int R = int(chunk.rows);
    std::fill(d.dq, d.dq + C * round_up(K, LANES), 0.0f);
    std::fill(d.dk, d.dk + C * round_up(K, LANES), 0.0f);
    std::fill(d.dproducts, d.dproducts + C * C, 0.0f);
    for (int64_t h = begin; h < end; ++h) {
      prepare_pairs(seq, h, chunk, s, d);
      float both = 0.0f;
      for (int64_t c = 0; c < V; c += PANEL)
        both += return_panel(seq, Columns{h, c, std::min<int64_t>(PANEL, V - c)}, chunk, s, d,
                             kept_state(x, h) + c * K, d.states + (h - begin) * size + c * K,
                             c > 0 ? 1.0f : 0.0f);
      store_head(seq, h, chunk, s, d, both * s.decay[R - 1]);
    }
    th::gemm_nn(R, int(K), R, d.dproducts, C, s.k, K, d.dq, K, 1.0f);
    th::gemm_tn(R, int(K), R, d.dproducts, C, s.q, K, d.dk, K, 1.0f);
    for (int64_t i = 0; i < chunk.size; ++i) {
      const int64_t t = chunk.first + i;
      std::memcpy(seq.key_row(seq.sums.dq, part, t, group), d.dq + i * K, K * sizeof(float));
      std::memcpy(seq.key_row(seq.sums.dk, part, t, group), d.dk + i * K, K * sizeof(float));
    }
  }
  for (int64_t h = begin; h < end; ++h)
    th::store_panels(d.states + (h - begin) * size, V, K, seq.state(seq.grads.dinitial_state, h));
}

// Sums the shares of all parts in the gradients of q or k, and clears those of padding tokens.
template <typename T>
void store_keys(const BackwardCall& call, int64_t parts, const float* shares, float scale, T* to) {
  const int64_t row = call.num_k_heads * call.k_dim, size = call.num_tokens * row;
  const int64_t end = call.cu_seqlens[call.num_seqs];
#pragma omp for schedule(static)
  for (int64_t t = 0; t < call.num_tokens; ++t)
    th::for_lanes(row, [&](int64_t c, int n) TH_LAMBDA {
      f32x16 sum{};
      if (t < end)
        for (int64_t part = 0; part < parts; ++part)
          sum += th::load(shares + part * size + t * row + c, n);
      th::store(to + t * row + c, sum * scale, n);
    });
}

// Gradients of the tokens past the last sequence, and those of D.
template <typename T>
void store_rest(const BackwardCall& call, const Sums& sums) {
  const int64_t H = call.num_v_heads, end = call.cu_seqlens[call.num_seqs];
  const auto clear = [&](auto* rows, int64_t size) {
    if (rows) std::fill(rows + end * size, rows + call.num_tokens * size,
                        std::decay_t<decltype(*rows)>{});
  };
  clear((T*)call.dv, H * call.v_dim), clear(call.dg, H), clear(call.ddt, H);
  if (!call.dD) return;
  std::vector<double> totals(H);
  for (int64_t t = 0; t < end; ++t)
    for (int64_t h = 0; h < H; ++h) totals[h] += sums.own[t * H + h];
  std::copy(totals.begin(), totals.end(), call.dD);
}

template <typename T>
void backward(const BackwardCall& grads) {
  const std::vector<int32_t> zeros(grads.num_seqs);
  const Call call = forward_call(grads, zeros.data());
  const int64_t C = call.chunk_size, K = call.k_dim, V = call.v_dim, G = call.num_k_heads;
  const int64_t parts = (call.num_v_heads / G + HEADS - 1) / HEADS, share = call.num_tokens * G * K;
  th::AlignedFloats shares(2 * parts * share), own(call.num_tokens * call.num_v_heads);
  const Sums sums{shares.data(), shares.data() + parts * share, own.data()};
#pragma omp parallel num_threads(call.num_threads)
  {
    const th::DenormalsAreZero denormals;
    const int64_t size = Scratch::num_floats(C, K, V, HEADS);
    const int64_t grads_size = Gradients::num_floats(C, K, V);
    th::AlignedFloats memory(size), grads_memory(grads_size);
    std::fill(memory.data(), memory.data() + size, 0.0f);  // above diagonals nobody writes
    std::fill(grads_memory.data(), grads_memory.data() + grads_size, 0.0f);
    const Scratch s(memory.data(), C, K);
    const Gradients d(grads_memory.data(), C, K);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < call.num_seqs * G * parts; ++item) {
      const BackwardSequence<T> seq(call, grads, sums, item / (G * parts));
      const bool has_gradients = seq.length > 0 || grads.dinitial_state;
      if (has_gradients) return_chunks(seq, item / parts % G, item % parts, s, d);
    }
    store_keys(grads, parts, sums.dq, float(call.scale), (T*)grads.dq);
    store_keys(grads, parts, sums.dk, 1.0f, (T*)grads.dk);
  }
  store_rest<T>(grads, sums);
}

}  // namespace th::ssd

TH_EXPORT_CALL(ssd_backward, th::ssd::BackwardCall) {
  if (!th::offsets_are_valid(*call)) return false;
  call->is_bf16 ? th::ssd::backward<th::bf16>(*call) : th::ssd::backward<float>(*call);
  return true;
}
