// Several new tokens: tiles of queries against blocks of keys, as two matrix products a block.
//
// A tile holds the rows (token, query head) of consecutive tokens that share a key head, so keys
// are copied from their pages once for all of them. Blocks that no row of the tile sees are
// skipped; a row's result depends on its tile and sequence alone, and where the call is invariant on
// its sequence alone.
#pragma once

#include "attention.h"
#include "problem.h"

namespace th {

struct Tile {
  int n, head, begin, count;  // rows [begin, begin + count) of sequence n: row r is token r / group
};

// What one thread works in: it stays in L2.
template <typename T>
struct TileScratch {
  explicit TileScratch(const Call& p)
      : tile(p.head_dim, p.head_dim),
        block(p.head_dim, p.head_dim),
        biases(p.reach ? KEYS_PER_BLOCK * MAX_ROWS_PER_TILE : 0) {}

  AttentionTile<T, float, MAX_ROWS_PER_TILE> tile;
  DenseBlock<T> block;
  AlignedFloats biases;
};

// Calls action(row of the tile, token, query head) for each row.
template <typename P, typename Action>
void each_row(const P& p, const Tile& tile, const Action& action) {
  const int group = p.group();
  for (int r = 0; r < tile.count; ++r)
    action(r, p.cu_seqlens[tile.n] + (tile.begin + r) / group,
           tile.head * group + (tile.begin + r) % group);
}

template <typename P>
KeyRange visible_keys(const P& p, const Tile& tile, int row) {
  const int token = (tile.begin + row) / p.group();
  const int position = p.seq_lens[tile.n] - p.num_new(tile.n) + token;
  return {p.first_key(position), position + 1};
}

// to[key of a block][row of the tile]: its biases, 0 of keys that are out of a row's reach. None where
// all of them are.
template <typename T, typename Kept>
const float* biases_of(const Problem<T, Kept>& p, const Tile& tile, int begin, int count, float* to) {
  const int group = p.group(), reach = int(p.reach);
  const T* const all = static_cast<const T*>(p.relative_bias);
  if (!reach || visible_keys(p, tile, 0).end - (begin + count) >= reach) return nullptr;
  for (int row = 0; row < tile.count; row += LANES)
    for (int key = 0; key < count; key += LANES) {
      f32x16 x[LANES];
      for (int i = 0; i < LANES; ++i) {
        const int r = std::min(row + i, tile.count - 1);  // lanes past the end: any row
        const T* biases = p.biases(p.cu_seqlens[tile.n] + (tile.begin + r) / group,
                                   tile.head * group + (tile.begin + r) % group);
        // Of the last of these keys: that of the one before it is one more.
        const int nearest = visible_keys(p, tile, r).end - 1 - (begin + key + LANES - 1);
        // Distances below 0 are of keys that are unseen, whatever is added to their logits: those of
        // the row before, but for the first one.
        if (nearest + LANES <= reach && biases + nearest >= all) {
          x[i] = load(biases + nearest);
        } else {
          float each[LANES];
          for (int d = 0; d < LANES; ++d) {
            const int distance = nearest + d;
            each[d] = distance >= 0 && distance < reach ? to_float(biases[distance]) : 0.0f;
          }
          x[i] = load(each);
        }
        __builtin_prefetch(biases + nearest - KEYS_PER_BLOCK, 0, 2);  // of the next keys
      }
      transpose16(x);
      for (int d = 0; d < LANES; ++d)
        store(to + (key + LANES - 1 - d) * MAX_ROWS_PER_TILE + row, x[d]);
    }
  return to;
}

template <typename T, typename Kept>
void attend_tile(const Problem<T, Kept>& p, const Tile& tile, TileScratch<T>& scratch) {
  const T* rows[MAX_ROWS_PER_TILE];
  each_row(p, tile, [&](int r, int64_t token, int64_t head) { rows[r] = p.query(token, head); });
  scratch.tile.begin(tile.count, [&](int r) { return visible_keys(p, tile, r); });
  scratch.tile.pack(rows, 0, p.head_dim);
  const int end = visible_keys(p, tile, tile.count - 1).end;
  const int first = visible_keys(p, tile, 0).begin;
  // Blocks of all tiles begin alike where the call is invariant: keys before the first are unseen.
  int begin = p.is_invariant ? first - first % KEYS_PER_BLOCK : first;
  for (; begin < end; begin += KEYS_PER_BLOCK) {
    const Kept* keys[2 * KEYS_PER_BLOCK];  // those of the block, and those to be fetched
    const int unseen = std::max(0, first - begin);
    const int count = std::min(2 * KEYS_PER_BLOCK, end - begin) - unseen;
    p.key_rows(tile.n, tile.head, begin + unseen, count, keys + unseen);
    std::fill_n(keys, unseen, keys[unseen]);
    const auto& block = scratch.block.load(
        begin, end, [&](int i) { return keys[i - begin]; },
        [&](int i) { return keys[i - begin] + p.plane(); });
    const float* biases = biases_of(p, tile, begin, block.count, scratch.biases.data());
    scratch.tile.fold(block, p.logit_scale(tile.head), float(p.softcap), biases);
  }
  each_row(p, tile, [&](int r, int64_t token, int64_t head) {
    const RowState state = scratch.tile.state(r);
    const float factor = p.value_scale(tile.head) / state.sum;
    scale_row(p.output(token, head), scratch.tile.row(r), factor, p.head_dim);
    p.lse[token * p.num_q_heads + head] = state.lse();
  });
}

}  // namespace th
