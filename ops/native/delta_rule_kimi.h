// What Kimi delta attention's decays make of a chunk: one decay for each channel of K. The op's
// README.md tells how products are decayed.
#pragma once

#include <algorithm>
#include <utility>

#include "delta_rule_chunk.h"

namespace th::delta {

// Adds products of k_j, J being a row of its block, with the k and q of the block's later rows, decayed
// on the way from row to row; `keep` receives k_j decayed to the block's last row.
template <int J, typename V, typename Load, typename Keep>
TH_INLINE void walk_lanes(int64_t K, const float* k, const float* q, const float* decay,
                          V (&sums)[2 * BLOCK], const Load& load, const Keep& keep) {
  V k_j = load(k + J * K);
  sums[BLOCK + J] = fma(k_j, load(q + J * K), sums[BLOCK + J]);
#pragma GCC unroll 8
  for (int i = J + 1; i < BLOCK; ++i) {
    k_j = k_j * load(decay + i * K);
    sums[i] = fma(k_j, load(k + i * K), sums[i]);
    sums[BLOCK + i] = fma(k_j, load(q + i * K), sums[BLOCK + i]);
  }
  keep(k_j);
}

// The same along K, into `system` and `attend`. Of a vector of two registers one after the other goes
// through all of K: there are no registers for the sums of both.
template <int J>
TH_INLINE void walk_block(int64_t K, const float* k, const float* q, const float* decay,
                          const float* beta, float* system, float* attend, int64_t C, float* end) {
  const int64_t whole = K / LANES * LANES;
  alignas(64) float lanes[2 * BLOCK][LANES];
  for (int part = 0; part < LANES; part += REGISTER_LANES) {
    Register sums[2 * BLOCK] = {};
    for (int64_t c = part; c < whole; c += LANES)
      walk_lanes<J>(K, k + c, q + c, decay + c, sums, load_register,
                    [&](Register k_j) TH_LAMBDA { store_register(end + J * K + c, k_j); });
#pragma GCC unroll 16
    for (int i = 0; i < 2 * BLOCK; ++i) store_register(lanes[i] + part, sums[i]);
  }
  f32x16 sums[2 * BLOCK];
#pragma GCC unroll 16
  for (int i = 0; i < 2 * BLOCK; ++i) sums[i] = load(lanes[i]);
  if (const int n = int(K - whole))
    walk_lanes<J>(
        K, k + whole, q + whole, decay + whole, sums,
        [&](const float* p) TH_LAMBDA { return load(p, n); },
        [&](f32x16 k_j) TH_LAMBDA { store(end + J * K + whole, k_j, n); });
  float products[LANES];
  static_assert(LANES == 2 * BLOCK);
  store(products, sum16(sums));
  for (int i = 0; i < BLOCK; ++i) {
    system[i * C + J] = -beta[i] * products[i];
    attend[i * C + J] = products[BLOCK + i];
  }
}

template <int... J>
TH_INLINE void walk_blocks(std::integer_sequence<int, J...>, int64_t K, const float* k,
                           const float* q, const float* decay, const float* beta, float* system,
                           float* attend, int64_t C, float* end) {
  (walk_block<J>(K, k, q, decay, beta, system, attend, C, end), ...);
}

struct KimiDeltaAttention {
  // Scratch::work, for the block of rows at hand.
  struct Work {
    float* decay;  // [BLOCK, K]: of each row
    float* late;   // [2 BLOCK, K]: -beta k, then q, decayed since the block before
    float* whole;  // [K]: the decay of the block
    Work(float* p, int64_t K) : decay(p), late(p + BLOCK * K), whole(p + 3 * BLOCK * K) {}
  };
  static int64_t num_work(int64_t, int64_t K) { return (3 * BLOCK + 1) * K; }

  template <typename T>
  static void decay(const Sequence<T>& seq, int64_t t, int64_t j, float* decay) {
    const float* g = seq.g(t) + j * seq.call.k_dim;
    for_lanes(seq.call.k_dim, [&](int64_t c, int n) TH_LAMBDA {
      store(decay + c, exp(load(g + c, n)), n);
    });
  }

  template <typename T>
  static void prepare_keys(const Sequence<T>&, const Chunk&, const Scratch&) {}

  // Block after block of rows. `writes` holds the keys of earlier blocks, decayed to the last row
  // before the block at hand, so that a product with a row of it decays on both sides, by factors
  // that are never over 1.
  template <typename T>
  static void prepare_head(const Sequence<T>& seq, int64_t j, const Chunk& chunk,
                           const Scratch& s) {
    const int64_t K = seq.call.k_dim, C = seq.call.chunk_size;
    const Work work(s.work, K);
    std::fill(s.carry, s.carry + K, 1.0f);
    for (int64_t b = 0; b < chunk.rows; b += BLOCK) {
      load_decays(seq, j, b, chunk, work);
      decay_rows(K, b, chunk, work, s);
      float *system = s.system + b * C, *attend = s.attend + b * C;
      gemm_nt(BLOCK, int(b), int(K), work.late, K, s.writes, K, system, C);
      gemm_nt(BLOCK, int(b), int(K), work.late + BLOCK * K, K, s.writes, K, attend, C);
      for (int64_t i = 0; i < b; ++i)
        for_lanes(K, [&](int64_t c, int n) TH_LAMBDA {
          float* k_i = s.writes + i * K + c;
          store(k_i, load(k_i, n) * load(work.whole + c, n), n);
        });
      const float *k = s.keys + b * K, *q = k + chunk.rows * K;
      walk_blocks(std::make_integer_sequence<int, BLOCK>{}, K, k, q, work.decay, s.beta + b,
                  system + b, attend + b, C, s.writes + b * K);
    }
  }

  template <typename T>
  static void load_decays(const Sequence<T>& seq, int64_t j, int64_t b, const Chunk& chunk,
                          const Work& work) {
    const int64_t K = seq.call.k_dim;
    for (int64_t i = 0; i < BLOCK; ++i) {
      const int64_t t = chunk.first + b + i;
      float* row = work.decay + i * K;
      if (b + i < chunk.size)
        decay(seq, t, j, row);
      else
        std::fill(row, row + K, 1.0f);
      if (const int64_t next = t + seq.call.chunk_size; next < seq.length)
        prefetch(seq.g(next) + j * K, K);
    }
  }

  // The rows of the block at b, decayed since the block before (late) and since the start of the
  // chunk (reads).
  static void decay_rows(int64_t K, int64_t b, const Chunk& chunk, const Work& work,
                         const Scratch& s) {
    const int64_t q_rows = chunk.rows * K;
    for_lanes(K, [&](int64_t c, int n) TH_LAMBDA {
      const f32x16 before = load(s.carry + c, n);
      f32x16 since = splat(1.0f);
      for (int64_t i = 0; i < BLOCK; ++i) {
        const int64_t at = (b + i) * K + c, at_late = i * K + c;
        since *= load(work.decay + at_late, n);
        const f32x16 k = load(s.keys + at, n) * since, q = load(s.keys + q_rows + at, n) * since;
        store(work.late + at_late, k * -s.beta[b + i], n);
        store(work.late + BLOCK * K + at_late, q, n);
        store(s.reads + at, k * before, n);
        store(s.reads + q_rows + at, q * before, n);
      }
      store(work.whole + c, since, n);
      store(s.carry + c, before * since, n);
    });
  }
};

}  // namespace th::delta
