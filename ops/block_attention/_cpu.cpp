// Attention to chosen blocks on a CPU: check the indices, write the new rows, attend, merge.
//
// Consecutive queries that see all that is before them share tiles of attention.h, as where nothing
// is chosen. Any other query has the heads of a key head for the rows of a tile, and its keys are
// taken from where they lie. One new token of a sequence is cut into splits of keys, so that it
// keeps every core busy. A result depends on its sequence alone, never on the other ones of a step;
// where the call is invariant nothing is split, and it depends on no other new token either.
//
// Where there are no values, keys stand for them: latents, which all heads share.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "call.h"
#include "pages.h"
#include "simd.h"

namespace th {
namespace {

// Strides in elements.
TH_CALL(Call,
  const int32_t *cu_seqlens, *seq_lens, *page_table, *slot_mapping, *blocks;
  const void *q, *k, *v;  // v null where keys are the values as well
  void *kv, *out;
  int64_t page_table_row, num_tokens, num_seqs, num_pages, page_size, max_pages;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  int64_t num_q_heads, num_kv_heads, head_dim, block_size, top_k, is_bf16, is_invariant;
  int64_t num_threads;
  double scale;
);

// Of a tile of one token: where there are more heads, two registers of them meet a key at once.
constexpr int FEW_ROWS = 16, MORE_ROWS = 32;
constexpr int SPLIT_KEYS = 512;  // of one new token

template <typename T>
struct Problem : OverPages<Call> {
  using OverPages<Call>::OverPages;

  int group() const { return int(num_q_heads / num_kv_heads); }
  // From a key to its value.
  int64_t plane() const { return v ? num_pages * page_size * num_kv_heads * head_dim : 0; }
  const T* query(int64_t token, int64_t head) const {
    return static_cast<const T*>(q) + token * q_token + head * q_head;
  }
  T* output(int64_t token, int64_t head) const {
    return static_cast<T*>(out) + (token * num_q_heads + head) * head_dim;
  }
  int position(int n, int token) const { return seq_lens[n] - cu_seqlens[n + 1] + token; }
  int complete(int n, int token) const { return int((position(n, token) + 1) / block_size); }
  const int32_t* chosen(int64_t token) const { return blocks + token * top_k; }
  int num_chosen(int64_t token) const {
    return int(std::find_if(chosen(token), chosen(token) + top_k, [](int b) { return b < 0; }) -
               chosen(token));
  }
  bool sees_all(int n, int token) const { return num_chosen(token) == complete(n, token); }

  bool blocks_are_valid() const {
    for (int n = 0; n < num_seqs; ++n)
      for (int token = cu_seqlens[n]; token < cu_seqlens[n + 1]; ++token)
        for (int i = 0; i < top_k; ++i)
          if (chosen(token)[i] < -1 || chosen(token)[i] >= complete(n, token)) return false;
    return true;
  }
  void key_rows(int n, int64_t head, int begin, int count, const T** rows) const {
    const T* first = static_cast<const T*>(kv) + head * head_dim;
    addresses(n, begin, count, first, num_kv_heads * head_dim, rows);
  }
  // The keys that a query sees: those of its blocks, then those of none.
  void seen_rows(int n, int token, int64_t head, std::vector<const T*>& rows) const {
    const int taken = num_chosen(token), tail = complete(n, token) * int(block_size);
    const int rest = position(n, token) + 1 - tail;
    rows.resize(taken * block_size + rest);
    for (int i = 0; i < taken; ++i)
      key_rows(n, head, chosen(token)[i] * int(block_size), int(block_size),
               rows.data() + i * block_size);
    key_rows(n, head, tail, rest, rows.data() + taken * block_size);
  }
};

template <typename T>
void write_token(const Problem<T>& p, int64_t token) {
  if (p.is_padding(token)) {
    std::fill_n(p.output(token, 0), p.num_q_heads * p.head_dim, T{});
    return;
  }
  T* key = static_cast<T*>(p.kv) + p.slot_mapping[token] * p.num_kv_heads * p.head_dim;
  for (int64_t head = 0; head < p.num_kv_heads; ++head, key += p.head_dim) {
    std::copy_n(static_cast<const T*>(p.k) + token * p.k_token + head * p.k_head, p.head_dim, key);
    if (p.v)
      std::copy_n(static_cast<const T*>(p.v) + token * p.v_token + head * p.v_head, p.head_dim,
                  key + p.plane());
  }
}

// Rows (token, query head of one key head) [begin, begin + count) from a token on, which see all.
struct Tile {
  int n, token, head, begin, count;
};

// Some query heads of one token, and some of the keys that it sees; of several such, `part` is the
// number, else -1.
struct Few {
  int n, token, head, first, rows, begin, count, part;
};

template <typename T, int ROWS>
struct Scratch {
  explicit Scratch(const Call& p)
      : tile(p.head_dim, p.head_dim),
        dense(p.head_dim, p.head_dim),
        few(p.head_dim, p.head_dim) {}

  AttentionTile<T, float, MAX_ROWS_PER_TILE> tile;
  DenseBlock<T> dense;
  AttentionTile<T, T, ROWS> few;
  KeyBlock<T, T> block;
  std::vector<const T*> keys;
};

template <typename T, int ROWS>
void attend_tile(const Problem<T>& p, const Tile& item, Scratch<T, ROWS>& scratch) {
  const int group = p.group();
  const auto token_of = [&](int r) { return item.token + (item.begin + r) / group; };
  const auto head_of = [&](int r) { return item.head * group + (item.begin + r) % group; };
  const auto end_of = [&](int r) { return p.position(item.n, token_of(r)) + 1; };
  const T* rows[MAX_ROWS_PER_TILE];
  for (int r = 0; r < item.count; ++r) rows[r] = p.query(token_of(r), head_of(r));
  scratch.tile.begin(item.count, [&](int r) { return KeyRange{0, end_of(r)}; });
  scratch.tile.pack(rows, 0, p.head_dim);
  const int end = end_of(item.count - 1);
  for (int begin = 0; begin < end; begin += KEYS_PER_BLOCK) {
    const T* keys[2 * KEYS_PER_BLOCK];  // those of the block, and those to be fetched
    p.key_rows(item.n, item.head, begin, std::min(2 * KEYS_PER_BLOCK, end - begin), keys);
    const auto& block = scratch.dense.load(
        begin, end, [&](int i) { return keys[i - begin]; },
        [&](int i) { return keys[i - begin] + p.plane(); });
    scratch.tile.fold(block, float(p.scale));
  }
  for (int r = 0; r < item.count; ++r)
    scale_row(p.output(token_of(r), head_of(r)), scratch.tile.row(r),
              1.0f / scratch.tile.state(r).sum, p.head_dim);
}

// Writes the output, or of a part of the keys what it takes to merge it.
template <typename T, int ROWS>
void attend_few(const Problem<T>& p, const Few& item, Scratch<T, ROWS>& scratch, float* parts,
                RowState* states) {
  auto& tile = scratch.few;
  auto& block = scratch.block;
  p.seen_rows(item.n, item.token, item.head, scratch.keys);
  const int head = item.head * p.group() + item.first, end = item.begin + item.count;
  const T* rows[ROWS];
  for (int r = 0; r < item.rows; ++r) rows[r] = p.query(item.token, head + r);
  tile.begin(item.rows, [&](int) { return KeyRange{item.begin, end}; });
  tile.pack(rows, 0, p.head_dim);
  for (int begin = item.begin; begin < end; begin += KEYS_PER_BLOCK) {
    block.begin = begin, block.count = std::min(KEYS_PER_BLOCK, end - begin);
    for (int i = 0; i < block.count; ++i) {
      block.keys[i] = scratch.keys[begin + i], block.values[i] = block.keys[i] + p.plane();
      block.ahead[i] = scratch.keys[std::min(begin + i + KEYS_PER_BLOCK, end - 1)];
    }
    tile.fold(block, float(p.scale));
  }
  for (int r = 0; r < item.rows; ++r)
    if (item.part < 0) {
      const float sum = tile.state(r).sum;
      scale_row(p.output(item.token, head + r), tile.row(r), sum > 0 ? 1.0f / sum : 0.0f,
                p.head_dim);
    } else {
      const int64_t at = int64_t(item.part) * ROWS + r;
      states[at] = tile.state(r);
      std::copy_n(tile.row(r), p.head_dim, parts + at * p.head_dim);
    }
}

// Joins the parts of some query heads of a token, the first of which is `item`.
template <int ROWS, typename T>
void merge(const Problem<T>& p, const Few& item, int count, float* parts, const RowState* states) {
  for (int r = 0; r < item.rows; ++r) {
    const int64_t first = int64_t(item.part) * ROWS + r;
    RowState all;
    for (int i = 0; i < count; ++i) all.max = std::max(all.max, states[first + i * ROWS].max);
    float* sum = parts + first * p.head_dim;
    for (int i = 0; i < count; ++i) {
      const RowState& state = states[first + i * ROWS];
      const float factor = std::exp(state.max - all.max);
      const float* part = sum + i * ROWS * p.head_dim;
      all.sum = th::fma(state.sum, factor, all.sum);
      for (int64_t d = 0; d < p.head_dim; d += LANES)
        store(sum + d, fma(load(part + d), splat(factor), i ? load(sum + d) : f32x16{}));
    }
    scale_row(p.output(item.token, item.head * p.group() + item.first + r), sum, 1.0f / all.sum,
              p.head_dim);
  }
}

struct Work {
  std::vector<Tile> tiles;
  std::vector<Few> few;
  std::vector<int> runs;  // where the parts of some heads begin among `few`
  int num_parts = 0;
};

template <typename T>
void plan_tiles(const Problem<T>& p, int n, int token, int end, Work& work) {
  const int rows = (end - token) * p.group(), step = rows_per_tile(rows);
  for (int i = (rows - 1) / step * step; i >= 0; i -= step)  // the longest rows first
    for (int head = 0; head < p.num_kv_heads; ++head)
      work.tiles.push_back({n, token, head, i, std::min(step, rows - i)});
}

template <int ROWS, typename T>
void plan_few(const Problem<T>& p, int n, int token, Work& work) {
  const int group = p.group();
  const int seen = p.num_chosen(token) * int(p.block_size) + p.position(n, token) + 1 -
                   p.complete(n, token) * int(p.block_size);
  const bool is_split = !p.is_invariant && p.num_new(n) == 1 && seen > SPLIT_KEYS;
  const int step = is_split ? SPLIT_KEYS : std::max(seen, 1);
  for (int head = 0; head < p.num_kv_heads; ++head)
    for (int first = 0; first < group; first += ROWS) {
      const int rows = std::min(ROWS, group - first);
      if (is_split) work.runs.push_back(int(work.few.size()));
      for (int i = 0; i < std::max(seen, 1); i += step)
        work.few.push_back({n, token, head, first, rows, i, std::min(step, seen - i),
                            is_split ? work.num_parts++ : -1});
    }
}

template <int ROWS, typename T>
Work plan(const Problem<T>& p) {
  Work work;
  for (int n = 0; n < p.num_seqs; ++n) {
    if (p.num_new(n) == 1) {
      plan_few<ROWS>(p, n, p.cu_seqlens[n], work);
      continue;
    }
    for (int token = p.cu_seqlens[n], end; token < p.cu_seqlens[n + 1]; token = end) {
      const bool sees_all = p.sees_all(n, token);
      for (end = token + 1; sees_all && end < p.cu_seqlens[n + 1] && p.sees_all(n, end);) ++end;
      if (sees_all)
        plan_tiles(p, n, token, end, work);
      else
        plan_few<ROWS>(p, n, token, work);
    }
  }
  return work;
}

template <int ROWS, typename T>
void run(const Problem<T>& p) {
  const Work work = plan<ROWS>(p);
  const int num_tiles = int(work.tiles.size()), num_few = int(work.few.size());
  const int num_runs = int(work.runs.size());
  const int64_t rows = int64_t(work.num_parts) * ROWS;
  const std::unique_ptr<float[]> parts(new float[rows * p.head_dim]);
  const std::unique_ptr<RowState[]> states(new RowState[rows]);
#pragma omp parallel num_threads(int(p.num_threads))
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < p.num_tokens; ++token) write_token(p, token);
    Scratch<T, ROWS> scratch(p);
#pragma omp for schedule(dynamic) nowait
    for (int i = 0; i < num_tiles; ++i) attend_tile(p, work.tiles[i], scratch);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < num_few; ++i)
      attend_few(p, work.few[i], scratch, parts.get(), states.get());
#pragma omp for schedule(static)
    for (int i = 0; i < num_runs; ++i) {
      const Few& first = work.few[work.runs[i]];
      int count = 1;
      while (work.runs[i] + count < num_few && work.few[work.runs[i] + count].begin) ++count;
      merge<ROWS>(p, first, count, parts.get(), states.get());
    }
  }
}

template <typename T>
bool run(const Call& call) {
  const Problem<T> p(call);
  if (!p.indices_are_valid() || !p.blocks_are_valid()) return false;
  p.group() > FEW_ROWS ? run<MORE_ROWS>(p) : run<FEW_ROWS>(p);
  return true;
}

}  // namespace
}  // namespace th

TH_EXPORT_CALL(block_attention, th::Call) {
  return call->is_bf16 ? th::run<th::bf16>(*call) : th::run<float>(*call);
}
