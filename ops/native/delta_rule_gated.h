// What the gated delta rule's decays make of a chunk: one decay for all channels of a value head.
#pragma once

#include <algorithm>

#include "delta_rule_chunk.h"

namespace th::delta {

// exp of it is 0 in float32; a finite stand-in for a decay of -inf, whose differences are NaN.
constexpr double FULL_DECAY = -1e4;

struct GatedDeltaRule {
  // Scratch::work: the products of all keys and queries with all keys, and the sums of g.
  struct Work {
    float* products;  // [2 C, C]
    double* G;        // [C]
    Work(float* p, int64_t C) : products(p), G((double*)(p + 2 * C * C)) {}
  };
  static int64_t num_work(int64_t C, int64_t) { return 2 * C * C + 2 * C; }

  template <typename T>
  static void decay(const Sequence<T>& seq, int64_t t, int64_t j, float* decay) {
    std::fill(decay, decay + seq.call.k_dim, std::exp(seq.g(t)[j]));
  }

  template <typename T>
  static void prepare_keys(const Sequence<T>& seq, const Chunk& chunk, const Scratch& s) {
    const int64_t K = seq.call.k_dim, C = seq.call.chunk_size, rows = chunk.rows;
    float* products = Work(s.work, C).products;
    for (int64_t j = 0; j < rows; j += PANEL) {  // only what is on or below the diagonal
      const int n = int(std::min<int64_t>(PANEL, rows - j));
      const float* k_j = s.keys + j * K;
      gemm_nt(int(2 * rows - j), n, int(K), k_j, K, k_j, K, products + j * C + j, C);
    }
  }

  template <typename T>
  static void prepare_head(const Sequence<T>& seq, int64_t j, const Chunk& chunk,
                           const Scratch& s) {
    const int64_t C = seq.call.chunk_size;
    const Work work(s.work, C);
    double G = 0.0;  // in double: a difference of large sums must not lose a small decay
    for (int64_t i = 0; i < chunk.rows; ++i) {
      if (i < chunk.size) G += std::max<double>(seq.g(chunk.first + i)[j], FULL_DECAY);
      work.G[i] = G;
    }
    decay_keys(seq.call.k_dim, chunk, work, s);
    decay_products(C, chunk, work, s);
  }

  static void decay_keys(int64_t K, const Chunk& chunk, const Work& work, const Scratch& s) {
    const int64_t rows = chunk.rows;
    const float *k = s.keys, *q = s.keys + rows * K;
    float *k_read = s.reads, *q_read = s.reads + rows * K;
    for (int64_t i = 0; i < rows; ++i) {
      const f32x16 since_start = splat(std::exp(float(work.G[i])));
      const f32x16 to_end = splat(std::exp(float(work.G[rows - 1] - work.G[i])));
      for_lanes(K, [&](int64_t c, int n) TH_LAMBDA {
        const int64_t at = i * K + c;
        const f32x16 k_i = load(k + at, n);
        store(k_read + at, k_i * since_start, n);
        store(q_read + at, load(q + at, n) * since_start, n);
        store(s.writes + at, k_i * to_end, n);
      });
    }
    std::fill(s.carry, s.carry + K, std::exp(float(work.G[rows - 1])));
  }

  static void decay_products(int64_t C, const Chunk& chunk, const Work& work, const Scratch& s) {
    const float *kk = work.products, *qk = work.products + chunk.rows * C;
    for (int64_t i = 0; i < chunk.rows; ++i)
      for (int64_t c = 0; c <= i; c += LANES) {
        const int n = int(std::min<int64_t>(LANES, chunk.rows - c)), at = int(i * C + c);
        alignas(64) float log_decay[LANES];
        for (int l = 0; l < LANES; ++l)
          log_decay[l] = c + l <= i ? float(work.G[i] - work.G[c + l]) : float(FULL_DECAY);
        const f32x16 D = exp(load(log_decay));
        store(s.attend + at, D * load(qk + at, n), n);
        store(s.system + at, D * load(kk + at, n) * -s.beta[i], n);
      }
  }
};

}  // namespace th::delta
