// Attention over paged latents on a CPU: check the indices, write the new rows, attend, merge.
//
// The rows of a tile are (token, head) pairs, token by token: all of them share the latents, so a
// block of these is read from memory once for a whole tile. Tiles of a short query are cut along
// the keys as well, into splits that merge_splits joins, so that one long sequence keeps every core
// busy. The cut depends on that sequence alone, and so do the bits of its result; where the call is
// invariant, keys are cut where they are in any tile, and those bits depend on no other token of it.
#include <memory>
#include <vector>

#include "attention.h"
#include "call.h"
#include "fp8_rows.h"
#include "pages.h"
#include "rows.h"

namespace th {
namespace {

constexpr int ROWS_PER_TILE = 64;  // of 576 floats: what a tile needs fills half of L2
constexpr int KEYS_PER_SPLIT = 256;    // at least
constexpr int SPLITS_PER_SEQUENCE = 16;  // over all of its tiles, which bounds their results
constexpr int INVARIANT_KEYS = 1024;     // of a split, where calls are invariant

template <typename T>
using Scratch = AttentionTile<T, T, ROWS_PER_TILE>;

// Strides in elements. The pool is of fp8 where there is a pool_scale.
TH_CALL(Call,
  const int32_t *cu_seqlens, *seq_lens, *page_table, *slot_mapping;
  const float* pool_scale;
  const void *q_latent, *q_rope, *latent, *k_rope;
  void *pool, *out;
  int64_t page_table_row, num_tokens, num_seqs, num_pages, page_size, max_pages;
  int64_t q_latent_token, q_latent_head, q_rope_token, q_rope_head, latent_token, k_rope_token;
  int64_t num_heads, rank, rope_dim, is_bf16, is_invariant, num_threads;
  double scale;
);

// Queries and results are of T, and the pool of Kept: T or fp8.
template <typename T, typename Kept>
struct Problem : OverPages<Call> {
  using OverPages<Call>::OverPages;

  int64_t width() const { return rank + rope_dim; }
  float kept_scale() const { return pool_scale ? *pool_scale : 1.0f; }  // what a number is worth
  float logit_scale() const { return float(scale * kept_scale()); }
  // Rows of a sequence are (token, head) pairs; those of the output are all of them.
  int num_visible(int n, int row) const {
    return seq_lens[n] - num_new(n) + row / int(num_heads) + 1;
  }
  T* output(int64_t row) const { return static_cast<T*>(out) + row * rank; }
};

// Rows [row, row + rows) of a sequence. Where its keys are cut into several splits, their results
// are rows [result, result + num_splits * rows) of the shared ones.
struct Tile {
  int n, row, rows, num_splits;
  int64_t result;
};

// Keys [begin, begin + count), number `index` of a tile's splits.
struct Split {
  int tile, index, begin, count;
};

struct Work {
  std::vector<Tile> tiles;
  std::vector<Split> splits;
  int64_t num_results = 0;
};

// Keys of a split: about equal parts, in whole blocks.
inline int keys_per_split(int num_keys, int num_tiles) {
  const int most = std::max(1, SPLITS_PER_SEQUENCE / num_tiles);
  const int num_splits = std::clamp(num_keys / KEYS_PER_SPLIT, 1, most);
  const int blocks = (num_keys + KEYS_PER_BLOCK - 1) / KEYS_PER_BLOCK;
  return (blocks + num_splits - 1) / num_splits * KEYS_PER_BLOCK;
}

template <typename T, typename Kept>
void plan_sequence(const Problem<T, Kept>& p, int n, Work& work) {
  const int heads = int(p.num_heads), num_rows = p.num_new(n) * heads;
  const int num_tiles = (num_rows + ROWS_PER_TILE - 1) / ROWS_PER_TILE;
  for (int i = num_tiles - 1; i >= 0; --i) {  // the last rows see most, and go first
    const int row = i * ROWS_PER_TILE, rows = std::min(ROWS_PER_TILE, num_rows - row);
    const int num_keys = p.num_visible(n, row + rows - 1);
    const int keys = p.is_invariant ? INVARIANT_KEYS : keys_per_split(num_keys, num_tiles);
    const int num_splits = (num_keys + keys - 1) / keys;
    for (int s = 0; s < num_splits; ++s)
      work.splits.push_back(
          {int(work.tiles.size()), s, s * keys, std::min(keys, num_keys - s * keys)});
    work.tiles.push_back({n, row, rows, num_splits, work.num_results});
    if (num_splits > 1) work.num_results += num_splits * rows;
  }
}

// Writes the row of one token, or clears the output of a padding token.
template <typename T, typename Kept>
void write_token(const Problem<T, Kept>& p, int64_t token) {
  if (p.is_padding(token)) {
    std::fill_n(p.output(token * p.num_heads), p.num_heads * p.rank, T{});
    return;
  }
  Kept* row = static_cast<Kept*>(p.pool) + p.slot_mapping[token] * p.width();
  const T* latent = static_cast<const T*>(p.latent) + token * p.latent_token;
  const T* k_rope = static_cast<const T*>(p.k_rope) + token * p.k_rope_token;
  keep_row(row, latent, p.kept_scale(), p.rank);
  keep_row(row + p.rank, k_rope, p.kept_scale(), p.rope_dim);
}

template <typename T, typename Kept>
void load_rows(const Problem<T, Kept>& p, const Tile& tile, Scratch<T>& scratch) {
  const auto range = [&](int r) { return KeyRange{0, p.num_visible(tile.n, tile.row + r)}; };
  scratch.begin(tile.rows, range);
  const T* rows[ROWS_PER_TILE];
  const auto pack = [&](const void* q, int64_t by_token, int64_t by_head, int64_t at, int64_t n) {
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t token = p.cu_seqlens[tile.n] + (tile.row + r) / p.num_heads;
      const int64_t head = (tile.row + r) % p.num_heads;
      rows[r] = static_cast<const T*>(q) + token * by_token + head * by_head;
    }
    scratch.pack(rows, at, n);
  };
  pack(p.q_latent, p.q_latent_token, p.q_latent_head, 0, p.rank);
  pack(p.q_rope, p.q_rope_token, p.q_rope_head, p.rank, p.rope_dim);
}

// Latents of T, where they lie; the next block is fetched while one is worked on.
template <typename T, typename Kept>
class Latents {
 public:
  explicit Latents(const Problem<T, Kept>& p) : p_(p) {}

  // The block from number `begin` on, of those up to `end`, of which the first call sees `begin`.
  const KeyBlock<T, T>& load(const Tile& tile, int begin, int end, bool is_first) {
    if (is_first) next_rows(tile, begin, end);
    block_.begin = begin, block_.count = std::min(KEYS_PER_BLOCK, end - begin);
    std::copy_n(block_.ahead, block_.count, block_.keys);
    std::copy_n(block_.ahead, block_.count, block_.values);
    next_rows(tile, begin + block_.count, end);
    return block_;
  }

 private:
  void next_rows(const Tile& tile, int begin, int end) {
    const int count = std::min(KEYS_PER_BLOCK, end - begin);
    p_.addresses(tile.n, begin, count, static_cast<const T*>(p_.pool), p_.width(), block_.ahead);
  }

  const Problem<T, Kept>& p_;
  KeyBlock<T, T> block_;
};

// Latents of fp8, widened without their scale.
template <typename T>
class Latents<T, fp8> {
 public:
  explicit Latents(const Problem<T, fp8>& p) : p_(p), memory_(KEYS_PER_BLOCK * p.width()) {}

  const KeyBlock<T, T>& load(const Tile& tile, int begin, int end, bool) {
    const fp8* rows[2 * KEYS_PER_BLOCK];  // those of the block, and those to be fetched
    const int count = std::min(2 * KEYS_PER_BLOCK, end - begin);
    p_.addresses(tile.n, begin, count, static_cast<const fp8*>(p_.pool), p_.width(), rows);
    block_.begin = begin, block_.count = std::min(KEYS_PER_BLOCK, count);
    for (int j = 0; j < block_.count; ++j) {
      if (j + KEYS_PER_BLOCK < count) fetch_row(rows[j + KEYS_PER_BLOCK], p_.width());
      T* const dense = reinterpret_cast<T*>(memory_.data()) + j * p_.width();
      widen_row(dense, rows[j], p_.width());
      block_.keys[j] = block_.values[j] = dense;
    }
    return block_;
  }

 private:
  const Problem<T, fp8>& p_;
  AlignedFloats memory_;  // [KEYS_PER_BLOCK][width] of T
  KeyBlock<T, T> block_;
};

template <typename T, typename Kept>
void attend(const Problem<T, Kept>& p, const Tile& tile, const Split& split, Scratch<T>& scratch,
            Latents<T, Kept>& latents) {
  load_rows(p, tile, scratch);
  const int end = split.begin + split.count;
  for (int begin = split.begin; begin < end; begin += KEYS_PER_BLOCK)
    scratch.fold(latents.load(tile, begin, end, begin == split.begin), p.logit_scale());
}

// Row `row` of a tile, from the sum over what it has seen, which is something.
template <typename T, typename Kept>
void store_row(const Problem<T, Kept>& p, const Tile& tile, int row, const float* sum, RowState state) {
  const int64_t to = p.cu_seqlens[tile.n] * p.num_heads + tile.row + row;
  scale_row(p.output(to), sum, p.kept_scale() / state.sum, p.rank);
}

// Joins the results of the splits of one tile: out[num_splits][rows][rank].
template <typename T, typename Kept>
void merge_splits(const Problem<T, Kept>& p, const Tile& tile, float* out, const RowState* state) {
  for (int r = 0; r < tile.rows; ++r) {
    RowState all;
    for (int s = 0; s < tile.num_splits; ++s)
      all.max = std::max(all.max, state[s * tile.rows + r].max);
    float* sum = out + r * p.rank;
    for (int s = 0; s < tile.num_splits; ++s) {
      const RowState& part = state[s * tile.rows + r];
      const float factor = std::exp(part.max - all.max);
      const float* from = out + (s * tile.rows + r) * p.rank;
      all.sum = th::fma(part.sum, factor, all.sum);
      for (int64_t d = 0; d < p.rank; d += LANES)
        store(sum + d, fma(load(from + d), splat(factor), s ? load(sum + d) : f32x16{}));
    }
    store_row(p, tile, r, sum, all);
  }
}

template <typename T, typename Kept>
bool run(const Problem<T, Kept>& p) {
  if (!p.indices_are_valid()) return false;
  Work work;
  for (int n = 0; n < p.num_seqs; ++n) plan_sequence(p, n, work);
  const std::unique_ptr<float[]> out(new float[work.num_results * p.rank]);
  const std::unique_ptr<RowState[]> state(new RowState[work.num_results]);
#pragma omp parallel num_threads(int(p.num_threads))
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < p.num_tokens; ++token) write_token(p, token);
    Scratch<T> scratch(p.width(), p.rank);
    Latents<T, Kept> latents(p);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < work.splits.size(); ++i) {
      const Split& split = work.splits[i];
      const Tile& tile = work.tiles[split.tile];
      attend(p, tile, split, scratch, latents);
      const int64_t result = tile.result + split.index * tile.rows;
      for (int r = 0; r < tile.rows; ++r) {
        if (tile.num_splits == 1) {
          store_row(p, tile, r, scratch.row(r), scratch.state(r));
        } else {
          std::copy_n(scratch.row(r), p.rank, out.get() + (result + r) * p.rank);
          state[result + r] = scratch.state(r);
        }
      }
    }
#pragma omp for schedule(static)
    for (size_t i = 0; i < work.tiles.size(); ++i)
      if (const Tile& tile = work.tiles[i]; tile.num_splits > 1)
        merge_splits(p, tile, out.get() + tile.result * p.rank, state.get() + tile.result);
  }
  return true;
}

template <typename T>
bool run(const Call& call) {
  return call.pool_scale ? run(Problem<T, fp8>(call)) : run(Problem<T, T>(call));
}

}  // namespace
}  // namespace th

TH_EXPORT_CALL(latent_attention, th::Call) {
  return call->is_bf16 ? th::run<th::bf16>(*call) : th::run<float>(*call);
}

TH_EXPORT_CALL(store_latents, th::StoreCall) { return th::store_rows(*call); }

TH_EXPORT_CALL(gather_latents, th::GatherCall) { return th::gather_rows(*call); }
