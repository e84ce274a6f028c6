// Paged attention on a CPU: check the indices, write the new rows, attend, merge.
#include <memory>

#include <vector>

#include "decode.h"
#include "extend.h"
#include "threads.h"

namespace th {
namespace {

// Writes the key and value of one token, or zeroes the output of a padding token.
template <typename T, typename Kept>
void write_token(const Problem<T, Kept>& p, int64_t token) {
  if (p.is_padding(token)) {
    std::fill_n(p.output(token, 0), p.num_q_heads * p.head_dim, T{});
    std::fill_n(p.lse + token * p.num_q_heads, p.num_q_heads, NO_KEY);
    return;
  }
  Kept* key = p.slot(p.slot_mapping[token]);
  for (int64_t head = 0; head < p.num_kv_heads; ++head, key += p.head_dim) {
    const T* k = static_cast<const T*>(p.k) + token * p.k_token + head * p.k_head;
    const T* v = static_cast<const T*>(p.v) + token * p.v_token + head * p.v_head;
    keep_row(key, k, p.key_scale(head), p.head_dim);
    keep_row(key + p.plane(), v, p.value_scale(head), p.head_dim);
  }
}

struct Work {
  std::vector<Tile> tiles;    // the longest rows first: they cost most
  std::vector<Split> splits;  // those of the same heads of a sequence are consecutive
  std::vector<int> runs;      // where each such run begins, and the end of the last
};

template <typename T, typename Kept>
Work plan(const Problem<T, Kept>& p) {
  Work work;
  const int heads = heads_per_split(p);
  for (int n = 0; n < p.num_seqs; ++n) {
    const int num_new = p.num_new(n), length = p.seq_lens[n];
    const bool is_split = num_new == 1 && !p.is_invariant;
    for (int head = 0; head < p.num_kv_heads && is_split; head += heads) {
      work.runs.push_back(int(work.splits.size()));
      const int num_heads = std::min(heads, int(p.num_kv_heads) - head);
      const int first = p.first_key(length - 1), keys = keys_per_split(length - first);
      for (int i = first; i < length; i += keys)
        work.splits.push_back({n, head, num_heads, i, std::min(keys, length - i)});
    }
    const int rows = is_split ? 0 : num_new * p.group(), step = rows_per_tile(rows);
    for (int i = (rows - 1) / step * step; i >= 0 && rows; i -= step)
      for (int head = 0; head < p.num_kv_heads; ++head)
        work.tiles.push_back({n, head, i, std::min(step, rows - i)});
  }
  work.runs.push_back(int(work.splits.size()));
  return work;
}

// Threads for what all heads read, eight queries of a head together in the time of one.
template <typename T, typename Kept>
int num_threads_for(const Problem<T, Kept>& p) {
  int64_t rows = 0;
  for (int n = 0; n < p.num_seqs; ++n)
    rows += p.seq_lens[n] * std::max<int64_t>(p.num_new(n) * p.group() / 8, 1);
  const int64_t row_bytes = 2 * p.num_kv_heads * p.head_dim * int64_t(sizeof(float));
  return threads_for(rows * row_bytes, p.num_threads);
}

template <typename T, typename Kept>
bool run(const Problem<T, Kept>& p) {
  if (!p.indices_are_valid(p.window)) return false;
  const Work work = plan(p);
  const int num_tiles = int(work.tiles.size()), num_splits = int(work.splits.size());
  const int num_runs = int(work.runs.size()) - 1;
  const int rows = heads_per_split(p) * p.group();  // of a split
  const std::unique_ptr<float[]> out(new float[num_splits * rows * p.head_dim]);
  const std::unique_ptr<RowState[]> state(new RowState[num_splits * rows]);
#pragma omp parallel num_threads(num_threads_for(p))
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < p.num_tokens; ++token) write_token(p, token);
    if (num_tiles) {
      TileScratch<T> scratch(p);
#pragma omp for schedule(dynamic) nowait
      for (int i = 0; i < num_tiles; ++i) attend_tile(p, work.tiles[i], scratch);
    }
    if (num_splits) {
      SplitScratch<T, Kept> scratch(p);
#pragma omp for schedule(dynamic)
      for (int i = 0; i < num_splits; ++i)
        attend_split(p, work.splits[i], out.get() + i * rows * p.head_dim, state.get() + i * rows,
                     scratch);
#pragma omp for schedule(static)
      for (int i = 0; i < num_runs; ++i) {
        const int first = work.runs[i];
        merge_splits(p, work.splits[first], work.runs[i + 1] - first, rows,
                     out.get() + first * rows * p.head_dim, state.get() + first * rows);
      }
    }
  }
  return true;
}

template <typename T>
bool run(const Call& call) {
  return call.kv_scales ? run(Problem<T, fp8>(call)) : run(Problem<T, T>(call));
}

}  // namespace
}  // namespace th

TH_EXPORT_CALL(paged_attention_with_lse, th::Call) {
  return call->is_bf16 ? th::run<th::bf16>(*call) : th::run<float>(*call);
}
