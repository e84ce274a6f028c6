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
      : tile(p.head_dim, p.head_dim), block(p.head_dim, p.head_dim) {}

  AttentionTile<T, float, MAX_ROWS_PER_TILE> tile;
  DenseBlock<T> block;
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
    scratch.tile.fold(block, p.logit_scale(tile.head), float(p.softcap));
  }
  each_row(p, tile, [&](int r, int64_t token, int64_t head) {
    const RowState state = scratch.tile.state(r);
    const float factor = p.value_scale(tile.head) / state.sum;
    scale_row(p.output(token, head), scratch.tile.row(r), factor, p.head_dim);
    p.lse[token * p.num_q_heads + head] = state.lse();
  });
}

}  // namespace th
