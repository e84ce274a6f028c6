// Backward of the gated delta rule; see native/delta_rule_backward.h.
#include <algorithm>

#include "delta_rule_backward.h"
#include "delta_rule_gated.h"

namespace {

using namespace th;
using namespace th::delta;

struct GatedBackward : GatedDeltaRule {
  // Gradients::work: products of gradients, [C, K], and sums [C] over the pairs of a column.
  static int64_t num_backward_work(int64_t C, int64_t K) { return C * K + round_up(C, LANES); }

  // Decays the gradients of products in place, and sums for each row the pairs that its decay lies
  // between, from the last row on: no difference of sums is taken.
  static void decay_pairs(int64_t C, const Chunk& chunk, const Work& work, const Scratch& s,
                          const Gradients& d, float* columns, float* dg) {
    const float *kk = work.products, *qk = work.products + chunk.rows * C;
    std::fill(columns, columns + round_up(C, LANES), 0.0f);
    for (int64_t i = chunk.rows - 1; i >= 0; --i) {
      f32x16 sums{};
      for (int64_t c = 0; c < chunk.rows; c += LANES) {
        const int n = int(std::min<int64_t>(LANES, chunk.rows - c));
        const int64_t at = i * C + c;
        f32x16 between{}, dsystem{}, dattend{};
        if (c <= i) {
          alignas(64) float log_decay[LANES], log_below[LANES];
          for (int l = 0; l < LANES; ++l) {
            log_decay[l] = c + l <= i ? float(work.G[i] - work.G[c + l]) : float(FULL_DECAY);
            log_below[l] = c + l < i ? log_decay[l] : float(FULL_DECAY);
          }
          const f32x16 below = exp(load(log_below));
          dsystem = -load(d.system + at, n) * below;
          dattend = load(d.attend + at, n) * exp(load(log_decay));
          between = dsystem * s.beta[i] * load(kk + at, n) +
                    load(d.attend + at, n) * below * load(qk + at, n);
        }
        store(d.system + at, dsystem, n);
        store(d.attend + at, dattend, n);
        const f32x16 column = load(columns + c) + between;
        store(columns + c, column);
        // Pairs of row i lie at and after it; those of its own column begin at it, not before it.
        alignas(64) float of_columns[LANES];
        store(of_columns, column);
        for (int l = 0; l < LANES; ++l)
          if (c + l >= i) of_columns[l] = 0.0f;
        sums += load(of_columns);
      }
      dg[i] = sum(sums);
    }
  }

  template <typename T>
  static void backward_keys(const BackwardSequence<T>& seq, int64_t j, const Chunk& chunk,
                            const Scratch& s, const Gradients& d) {
    const int64_t K = seq.call.k_dim, C = seq.call.chunk_size, rows = chunk.rows;
    const Work work(s.work, C);
    const int R = int(rows), size = int(K);
    float *w = d.work, *columns = d.work + C * K, *dg = d.x;
    decay_pairs(C, chunk, work, s, d, columns, dg);
    const float *k = s.keys, *q = s.keys + rows * K;
    float *dk = d.keys, *dq = d.keys + rows * K;
    gemm_nn(R, size, R, d.system, C, k, K, w, K);
    for (int64_t i = 0; i < rows; ++i) {
      d.beta[i] += dot(k + i * K, w + i * K, K);
      for (int64_t c = 0; c < rows; ++c) d.system[i * C + c] *= s.beta[i];
    }
    gemm_tn(R, size, R, d.system, C, k, K, dk, K, 1.0f);
    gemm_tn(R, size, R, d.attend, C, q, K, dk, K, 1.0f);
    gemm_nn(R, size, R, d.attend, C, k, K, dq, K, 1.0f);
    add_rows(K, chunk, work, s, d, w);
    store_decays(seq, j, chunk, s, d, dg);
  }

  // Adds what rows read from the state, and write to it, to the gradients of keys and queries.
  static void add_rows(int64_t K, const Chunk& chunk, const Work& work, const Scratch& s,
                       const Gradients& d, const float* w) {
    const int64_t rows = chunk.rows, q_rows = rows * K;
    for (int64_t i = 0; i < rows; ++i) {
      const f32x16 since_start = splat(std::exp(float(work.G[i])));
      const f32x16 to_end = splat(std::exp(float(work.G[rows - 1] - work.G[i])));
      const f32x16 beta = splat(s.beta[i]);
      for_lanes(K, [&](int64_t c, int n) TH_LAMBDA {
        const int64_t at = i * K + c;
        f32x16 dk = load(d.keys + at, n), dq = load(d.keys + q_rows + at, n);
        dk = fma(load(d.reads + at, n), since_start, dk);
        dk = fma(load(d.writes + at, n), to_end, dk);
        store(d.keys + at, fma(load(w + at, n), beta, dk), n);
        store(d.keys + q_rows + at, fma(load(d.reads + q_rows + at, n), since_start, dq), n);
      });
    }
  }

  // A decay is in all that is read at its row or after it, and in all that is written before it.
  template <typename T>
  static void store_decays(const BackwardSequence<T>& seq, int64_t j, const Chunk& chunk,
                           const Scratch& s, const Gradients& d, float* dg) {
    const int64_t K = seq.call.k_dim, rows = chunk.rows, q_rows = rows * K;
    float read = 0.0f, written = 0.0f, whole = 0.0f;
    for (int64_t c = 0; c < K; ++c) whole += d.carry[c];
    whole *= s.carry[0];
    for (int64_t i = rows - 1; i >= 0; --i) {
      read += dot(s.reads + i * K, d.reads + i * K, K);
      read += dot(s.reads + q_rows + i * K, d.reads + q_rows + i * K, K);
      dg[i] += read;
    }
    for (int64_t i = 0; i < chunk.size; ++i) {
      *seq.dg(chunk.first + i, j) = dg[i] + written + whole;
      written += dot(s.writes + i * K, d.writes + i * K, K);
    }
  }
};

}  // namespace

TH_EXPORT_DELTA_RULE_BACKWARD(GatedBackward, gated_delta_rule_backward)
