// Attention within each sequence of a packed batch on a CPU.
//
// A tile has the rows (token, query head) of consecutive queries that share a key head.
#include <vector>

#include "attention.h"
#include "call.h"

namespace th {
namespace {

// Strides in elements.
TH_CALL(Call,
  const void *q, *k, *v;
  void* out;
  float* lse;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  int64_t num_queries, num_keys, num_seqs, num_heads, num_k_heads, head_dim, v_head_dim;
  int64_t causal, is_bf16, num_threads;
  double scale;
);

bool rise_from_zero(const int32_t* offsets, int64_t num_seqs, int64_t limit) {
  for (int64_t n = 0; n < num_seqs; ++n)
    if (offsets[n + 1] < offsets[n]) return false;
  return offsets[0] == 0 && offsets[num_seqs] <= limit;
}

template <typename T>
struct Problem : Call {
  explicit Problem(const Call& call) : Call(call) {}

  int group() const { return int(num_heads / num_k_heads); }
  int num_queries_of(int n) const { return cu_seqlens_q[n + 1] - cu_seqlens_q[n]; }
  int num_keys_of(int n) const { return cu_seqlens_k[n + 1] - cu_seqlens_k[n]; }
  // How many keys query i of a sequence sees.
  int num_visible(int n, int i) const {
    const int all = num_keys_of(n);
    return causal ? std::max(0, all - num_queries_of(n) + i + 1) : all;
  }
  T* output(int64_t token, int64_t head) const {
    return static_cast<T*>(out) + (token * num_heads + head) * v_head_dim;
  }
};

// Rows [row, row + count) of a sequence and key head: row r is query r / group, head r % group.
struct Tile {
  int n, k_head, row, count;
};

template <typename T>
struct Scratch {
  explicit Scratch(const Problem<T>& p)
      : tile(p.head_dim, p.v_head_dim), block(p.head_dim, p.v_head_dim) {}

  AttentionTile<T, float, MAX_ROWS_PER_TILE> tile;
  DenseBlock<T> block;
};

template <typename T>
std::vector<Tile> plan(const Problem<T>& p) {
  std::vector<Tile> tiles;
  for (int n = 0; n < p.num_seqs; ++n) {
    const int rows = p.num_queries_of(n) * p.group();
    const int step = rows_per_tile(rows);
    for (int head = 0; head < p.num_k_heads && rows; ++head)
      for (int row = (rows - 1) / step * step; row >= 0; row -= step)  // the last ones see most
        tiles.push_back({n, head, row, std::min(step, rows - row)});
  }
  return tiles;
}

// Calls action(row of the tile, token, query head) for each row.
template <typename T, typename Action>
void each_row(const Problem<T>& p, const Tile& tile, const Action& action) {
  const int group = p.group();
  for (int r = 0; r < tile.count; ++r)
    action(r, p.cu_seqlens_q[tile.n] + (tile.row + r) / group,
           tile.k_head * group + (tile.row + r) % group);
}

template <typename T>
void attend(const Problem<T>& p, const Tile& tile, Scratch<T>& scratch) {
  const int group = p.group();
  const T* rows[MAX_ROWS_PER_TILE];
  each_row(p, tile, [&](int r, int64_t token, int64_t head) {
    rows[r] = static_cast<const T*>(p.q) + token * p.q_token + head * p.q_head;
  });
  const auto visible = [&](int row) { return p.num_visible(tile.n, (tile.row + row) / group); };
  scratch.tile.begin(tile.count, [&](int row) { return KeyRange{0, visible(row)}; });
  scratch.tile.pack(rows, 0, p.head_dim);
  const int64_t first = p.cu_seqlens_k[tile.n];
  const T* k = static_cast<const T*>(p.k) + first * p.k_token + tile.k_head * p.k_head;
  const T* v = static_cast<const T*>(p.v) + first * p.v_token + tile.k_head * p.v_head;
  const int end = visible(tile.count - 1);
  for (int begin = 0; begin < end; begin += KEYS_PER_BLOCK) {
    const auto& block = scratch.block.load(
        begin, end, [&](int i) { return k + i * p.k_token; },
        [&](int i) { return v + i * p.v_token; });
    scratch.tile.fold(block, float(p.scale));
  }
  each_row(p, tile, [&](int r, int64_t token, int64_t head) {
    const RowState state = scratch.tile.state(r);
    const float factor = state.sum > 0 ? 1.0f / state.sum : 0.0f;  // 0: it has seen no key
    scale_row(p.output(token, head), scratch.tile.row(r), factor, p.v_head_dim);
    p.lse[token * p.num_heads + head] = state.lse();
  });
}

template <typename T>
void clear_padding(const Problem<T>& p) {
  const int64_t first = p.cu_seqlens_q[p.num_seqs], count = p.num_queries - first;
  std::fill_n(p.output(first, 0), count * p.num_heads * p.v_head_dim, T{});
  std::fill_n(p.lse + first * p.num_heads, count * p.num_heads, NO_KEY);
}

template <typename T>
bool run(const Problem<T>& p) {
  if (!rise_from_zero(p.cu_seqlens_q, p.num_seqs, p.num_queries)) return false;
  if (!rise_from_zero(p.cu_seqlens_k, p.num_seqs, p.num_keys)) return false;
  const std::vector<Tile> tiles = plan(p);
  clear_padding(p);
#pragma omp parallel num_threads(int(p.num_threads))
  {
    Scratch<T> scratch(p);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tiles.size(); ++i) attend(p, tiles[i], scratch);
  }
  return true;
}

}  // namespace
}  // namespace th

TH_EXPORT_CALL(ragged_attention_with_lse, th::Call) {
  return call->is_bf16 ? th::run(th::Problem<th::bf16>(*call)) : th::run(th::Problem<float>(*call));
}
