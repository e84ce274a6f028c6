// Backward of Kimi delta attention; see native/delta_rule_backward.h.
#include <algorithm>

#include "delta_rule_backward.h"
#include "delta_rule_kimi.h"

namespace {

using namespace th;
using namespace th::delta;

struct KimiBackward : KimiDeltaAttention {
  static constexpr int MAX_ROWS = 64;

  // Gradients::work: partial sums of the gradient of beta, a vector for each row.
  static int64_t num_backward_work(int64_t C, int64_t) { return C * LANES; }

  // All that sixteen channels of a chunk's rows have to do with each other, in L1.
  struct Lanes {
    f32x16 decay[MAX_ROWS], k[MAX_ROWS], q[MAX_ROWS], beta_k[MAX_ROWS];
    f32x16 decayed[MAX_ROWS];  // k of one row, decayed to each later one
    f32x16 w[MAX_ROWS], dk[MAX_ROWS], dq[MAX_ROWS], dg[MAX_ROWS];
  };

  // Pairs of row j with later rows. Decays are multiplied on the way from row to row, forwards and
  // back, and are never over 1; the decay of a row gets the pairs that it lies between.
  static TH_INLINE void walk_pairs(int64_t j, int64_t rows, int64_t C, const Gradients& d,
                                   Lanes& x) {
    f32x16 k_j = x.k[j];
    const float diagonal = d.attend[j * C + j];
    x.dq[j] = fma(k_j, splat(diagonal), x.dq[j]);
    for (int64_t i = j + 1; i < rows; ++i) {
      x.decayed[i] = k_j = k_j * x.decay[i];
      x.w[i] = fma(k_j, splat(-d.system[i * C + j]), x.w[i]);
      x.dq[i] = fma(k_j, splat(d.attend[i * C + j]), x.dq[i]);
    }
    f32x16 back{};
    for (int64_t i = rows - 1; i > j; --i) {
      const f32x16 own = fma(x.q[i], splat(d.attend[i * C + j]),
                             x.beta_k[i] * -d.system[i * C + j]);
      back = i + 1 < rows ? fma(back, x.decay[i + 1], own) : own;
      x.dg[i] = fma(x.decayed[i], back, x.dg[i]);
    }
    x.dk[j] = fma(x.q[j], splat(diagonal), x.dk[j]);
    if (j + 1 < rows) x.dk[j] = fma(back, x.decay[j + 1], x.dk[j]);
  }

  template <typename T>
  static void backward_keys(const BackwardSequence<T>& seq, int64_t j, const Chunk& chunk,
                            const Scratch& s, const Gradients& d) {
    const int64_t K = seq.call.k_dim, C = seq.call.chunk_size, rows = chunk.rows;
    std::fill(d.work, d.work + C * LANES, 0.0f);
    Lanes x;
    for_lanes(K, [&](int64_t c, int n) {
      for (int64_t i = 0; i < rows; ++i) {
        x.decay[i] = splat(1.0f);
        if (i < chunk.size) x.decay[i] = exp(load(seq.g(chunk.first + i) + j * K + c, n));
        x.k[i] = load(s.keys + i * K + c, n), x.q[i] = load(s.keys + (rows + i) * K + c, n);
        x.beta_k[i] = x.k[i] * s.beta[i];
        x.w[i] = x.dk[i] = x.dq[i] = x.dg[i] = f32x16{};
      }
      for (int64_t i = 0; i < rows; ++i) walk_pairs(i, rows, C, d, x);
      add_lanes(seq, j, c, n, chunk, s, d, x);
    });
    for (int64_t i = 0; i < rows; ++i) d.beta[i] += sum(load(d.work + i * LANES));
  }

  // Adds what sixteen channels read from the state and write to it, and stores their gradients.
  template <typename T>
  static void add_lanes(const BackwardSequence<T>& seq, int64_t j, int64_t c, int n,
                        const Chunk& chunk, const Scratch& s, const Gradients& d, Lanes& x) {
    const int64_t K = seq.call.k_dim, rows = chunk.rows, q_rows = rows * K;
    const f32x16 whole = load(s.carry + c, n) * load(d.carry + c, n);
    f32x16 since_start = splat(1.0f), to_end = splat(1.0f), read{}, written{};
    for (int64_t i = rows - 1; i >= 0; --i) {
      const int64_t at = i * K + c;
      read = fma(load(s.reads + at, n), load(d.reads + at, n), read);
      read = fma(load(s.reads + q_rows + at, n), load(d.reads + q_rows + at, n), read);
      x.dg[i] += read;
      x.dk[i] = fma(load(d.writes + at, n), to_end, x.dk[i]);
      to_end = to_end * x.decay[i];
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = i * K + c;
      since_start = since_start * x.decay[i];
      f32x16 dk = fma(x.w[i], splat(s.beta[i]), x.dk[i]);
      dk = fma(load(d.reads + at, n), since_start, dk);
      const f32x16 dq = fma(load(d.reads + q_rows + at, n), since_start, x.dq[i]);
      store(d.keys + at, load(d.keys + at, n) + dk, n);
      store(d.keys + q_rows + at, load(d.keys + q_rows + at, n) + dq, n);
      if (i < chunk.size) store(seq.dg(chunk.first + i, j) + c, x.dg[i] + written + whole, n);
      written = fma(load(s.writes + at, n), load(d.writes + at, n), written);
      store(d.work + i * LANES, fma(x.k[i], x.w[i], load(d.work + i * LANES)));
    }
  }
};

}  // namespace

TH_EXPORT_DELTA_RULE_BACKWARD(KimiBackward, kimi_delta_attention_backward)
