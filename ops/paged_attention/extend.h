// Several new tokens: tiles of queries against blocks of keys, as two matrix products a block.
//
// A tile holds the rows (token, query head) of consecutive tokens that share a key head, so keys
// are gathered from their pages, and transposed, once for TILE_ROWS rows. Blocks that no row of
// the tile sees are skipped; a row's result depends on its tile and sequence alone.
#pragma once

#include <vector>

#include "gemm.h"
#include "problem.h"

namespace th {

constexpr int TILE_ROWS = 128;
constexpr int TILE_KEYS = 64;

struct Tile {
  int n, head, begin, count;  // new tokens [begin, begin + count) of sequence n
};

inline int tile_tokens(int group) { return std::max(1, TILE_ROWS / group); }

// What one thread works in: it stays in L2.
struct TileScratch {
  TileScratch(int group, int64_t head_dim)
      : state(tile_tokens(group) * group),
        queries(state.size() * head_dim),
        out(state.size() * head_dim),
        weights(state.size() * TILE_KEYS),
        panel(std::max<int64_t>(head_dim, TILE_KEYS) * detail::TILE_COLS) {}

  std::vector<RowState> state;  // [rows]
  std::vector<float> queries;   // [rows][D]
  std::vector<float> out;       // [rows][D], unnormalised
  std::vector<float> weights;   // [rows][TILE_KEYS], products at first
  std::vector<float> panel;     // of keys, [D][TILE_COLS], or of values, [TILE_KEYS][TILE_COLS]
};

// panel[d][j] = key j, for `count` <= TILE_COLS keys.
template <typename T>
void pack_keys(const T* const* keys, int count, int64_t head_dim, float* panel) {
  for (int j = 0; j < detail::TILE_COLS; j += LANES)
    for (int64_t d = 0; d < head_dim; d += LANES) {
      f32x16 x[LANES];
      for (int i = 0; i < LANES; ++i) x[i] = j + i < count ? load(keys[j + i] + d) : f32x16{};
      transpose16(x);
      for (int i = 0; i < LANES; ++i) store(panel + (d + i) * detail::TILE_COLS + j, x[i]);
    }
}

// panel[j][c] = column c of value j, for `columns` <= TILE_COLS columns.
template <typename T>
void pack_values(const T* const* keys, int count, int64_t to_values, int columns, float* panel) {
  for (int j = 0; j < count; ++j)
    for (int c = 0; c < detail::TILE_COLS; c += LANES)
      store(panel + j * detail::TILE_COLS + c,
            c < columns ? load(keys[j] + to_values + c) : f32x16{});
}

// Weights of the row at `position` for keys [begin, begin + count); returns the factor of what was
// summed before. Keys that the row does not see get weight 0.
template <typename T>
float weigh_row(const Problem<T>& p, int position, int begin, int count, float* s, RowState& row) {
  const int padded = (count + LANES - 1) / LANES * LANES;
  const int first = std::clamp(p.first_key(position) - begin, 0, padded);
  const int last = std::clamp(position + 1 - begin, 0, count);
  if (first >= last) {
    std::fill(s, s + padded, 0.0f);
    return 1.0f;
  }
  std::fill(s, s + first, NO_KEY);
  std::fill(s + last, s + padded, NO_KEY);
  return softmax_row(s, padded, row, float(p.scale), float(p.softcap));
}

template <typename T>
void load_queries(const Problem<T>& p, const Tile& tile, float* to) {
  const int group = p.group();
  for (int i = 0; i < tile.count; ++i)
    for (int g = 0; g < group; ++g, to += p.head_dim) {
      const int64_t token = p.cu_seqlens[tile.n] + tile.begin + i;
      scale_row(to, p.query(token, tile.head * group + g), 1.0f, p.head_dim);
    }
}

template <typename T>
void store_tile(const Problem<T>& p, const Tile& tile, TileScratch& scratch) {
  const int group = p.group();
  for (int r = 0; r < tile.count * group; ++r) {
    const int64_t token = p.cu_seqlens[tile.n] + tile.begin + r / group;
    const int64_t head = tile.head * group + r % group;
    const RowState& row = scratch.state[r];
    const float* sum = scratch.out.data() + r * p.head_dim;
    scale_row(p.output(token, head), sum, 1.0f / row.sum, p.head_dim);
    if (p.lse) p.lse[token * p.num_q_heads + head] = row.lse();
  }
}

// Folds keys [begin, begin + count) into the tile's output; its first row is at `position`.
template <typename T>
void attend_block(const Problem<T>& p, const Tile& tile, int position, int begin, int count,
                  TileScratch& scratch) {
  using detail::TILE_COLS;
  const int rows = tile.count * p.group(), D = int(p.head_dim);
  const T* keys[TILE_KEYS];
  p.key_rows(tile.n, tile.head, begin, count, keys);
  for (int j = 0; j < count; j += TILE_COLS) {
    const int width = std::min(TILE_COLS, count - j);
    pack_keys(keys + j, width, D, scratch.panel.data());
    detail::tiles(rows, D, {scratch.queries.data(), D, 1}, scratch.panel.data(), TILE_COLS,
                  scratch.weights.data() + j, TILE_KEYS, width, false);
  }
  for (int r = 0; r < rows; ++r) {
    const float factor = weigh_row(p, position + r / p.group(), begin, count,
                                   scratch.weights.data() + r * TILE_KEYS, scratch.state[r]);
    float* sum = scratch.out.data() + r * D;
    if (factor != 1.0f) scale_row(sum, sum, factor, D);
  }
  for (int c = 0; c < D; c += TILE_COLS) {
    const int width = std::min(TILE_COLS, D - c);
    pack_values(keys, count, p.plane() + c, width, scratch.panel.data());
    detail::tiles(rows, count, {scratch.weights.data(), TILE_KEYS, 1}, scratch.panel.data(),
                  TILE_COLS, scratch.out.data() + c, D, width, true);
  }
}

template <typename T>
void attend_tile(const Problem<T>& p, const Tile& tile, TileScratch& scratch) {
  const int rows = tile.count * p.group();
  load_queries(p, tile, scratch.queries.data());
  std::fill(scratch.out.data(), scratch.out.data() + rows * p.head_dim, 0.0f);
  std::fill(scratch.state.begin(), scratch.state.begin() + rows, RowState{});
  const int position = p.seq_lens[tile.n] - p.num_new(tile.n) + tile.begin;
  const int end = position + tile.count;
  for (int begin = p.first_key(position); begin < end; begin += TILE_KEYS)
    attend_block(p, tile, position, begin, std::min(TILE_KEYS, end - begin), scratch);
  store_tile(p, tile, scratch);
}

}  // namespace th
