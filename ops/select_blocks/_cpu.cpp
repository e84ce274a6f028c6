// The best blocks of each query on a CPU: write the new keys, score blocks, take the best.
//
// Queries go in groups of bounded scratch. Of a group, chunks of a query's blocks are scored in any
// order by any thread, so that one query of a long sequence keeps all of them busy; then each query
// finds the score that its last block must have, and takes all above it and the first of those at
// it. A query that can take all of its blocks scores none.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "aligned_floats.h"
#include "call.h"
#include "pages.h"
#include "simd.h"

namespace th {
namespace {

TH_CALL(Call,
  const int32_t *cu_seqlens, *seq_lens, *page_table, *slot_mapping;
  const void *q, *keys;
  const float* weights;  // [T, H] or null
  void* block_keys;
  int32_t* chosen;
  int64_t page_table_row, num_tokens, num_seqs, num_pages, page_size, max_pages;
  int64_t q_token, q_head, key_token, num_heads, index_dim, block_size, top_k;
  int64_t is_bf16, num_threads;
);

constexpr int KEYS = 256;  // of a chunk
constexpr int64_t GROUP_SCORES = 1 << 20;

struct Chunk {
  int token, n, begin, count;  // blocks [begin, begin + count) of sequence n
  float* scores;
};

template <typename T>
struct Problem : OverPages<Call> {
  using OverPages<Call>::OverPages;

  int complete(int n, int token) const {
    return int((seq_lens[n] - cu_seqlens[n + 1] + token + 1) / block_size);
  }
  void write_key(int64_t token) const {
    const int64_t slot = slot_mapping[token];
    if (slot % block_size != block_size - 1) return;
    std::memcpy(static_cast<T*>(block_keys) + slot / block_size * index_dim,
                static_cast<const T*>(keys) + token * key_token, index_dim * sizeof(T));
  }
  // rows[i] = key of block `begin + i` of a sequence.
  void key_rows(int n, int begin, int count, const T** rows) const {
    const int64_t page_blocks = page_size / block_size;
    const int32_t* pages = table(n) + begin / page_blocks;
    for (int64_t i = 0, offset = begin % page_blocks; i < count; ++i, ++offset) {
      if (offset == page_blocks) offset = 0, ++pages;
      rows[i] = static_cast<const T*>(block_keys) + (*pages * page_blocks + offset) * index_dim;
    }
  }
};

// The scores of a chunk, LANES keys at once: their products with a head are summed together.
template <typename T>
void score(const Problem<T>& p, const Chunk& chunk, float* query) {
  const int64_t D = p.index_dim;
  for (int64_t h = 0; h < p.num_heads; ++h) {
    const T* q = static_cast<const T*>(p.q) + chunk.token * p.q_token + h * p.q_head;
    for (int64_t d = 0; d < D; d += LANES) store(query + h * D + d, load(q + d));
  }
  const T* rows[KEYS + LANES];
  p.key_rows(chunk.n, chunk.begin, chunk.count, rows);
  std::fill_n(rows + chunk.count, LANES, rows[0]);
  for (int i = 0; i < chunk.count; i += LANES) {
    f32x16 total{};
    for (int64_t h = 0; h < p.num_heads; ++h) {
      f32x16 x[LANES];
#pragma GCC unroll 16
      for (int first = 0; first < LANES; first += SUMS) {
        f32x16 sums[SUMS] = {};
        for (int64_t d = 0; d < D; d += LANES) {
          const f32x16 q = load(query + h * D + d);
#pragma GCC unroll 16
          for (int j = 0; j < SUMS; ++j) sums[j] = fma(q, load(rows[i + first + j] + d), sums[j]);
        }
#pragma GCC unroll 16
        for (int j = 0; j < SUMS; ++j) x[first + j] = sums[j];
      }
      const float weight = p.weights ? p.weights[chunk.token * p.num_heads + h] : 1.0f;
      total = fma(max(sum16(x), f32x16{}), splat(weight), total);
    }
    // A score that is none would have no place among the others.
    total = select(total == total, total, splat(-std::numeric_limits<float>::infinity()));
    store(chunk.scores + i, total, std::min<int>(LANES, chunk.count - i));
  }
}

// The k best of n > k scores, by number; of equal ones the first.
void take_best(const float* scores, int n, int k, std::vector<float>& ordered, int32_t* chosen) {
  ordered.assign(scores, scores + n);
  std::nth_element(ordered.begin(), ordered.begin() + (k - 1), ordered.end(), std::greater<>());
  const float last = ordered[k - 1];
  int64_t equal = k - std::count_if(scores, scores + n, [&](float x) { return x > last; });
  for (int i = 0; i < n; ++i)
    if (scores[i] > last || (scores[i] == last && equal-- > 0)) *chosen++ = i;
}

template <typename T>
bool run(const Call& call) {
  const Problem<T> p(call);
  if (!p.indices_are_valid()) return false;
  const int64_t end = p.cu_seqlens[p.num_seqs];
#pragma omp parallel for num_threads(int(p.num_threads)) schedule(static)
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    std::fill_n(p.chosen + token * p.top_k, p.top_k, -1);
    if (token < end) p.write_key(token);
  }

  std::vector<Chunk> chunks;   // those of a query are consecutive
  std::vector<int> queries;    // where each of them begins
  std::vector<int64_t> placed;  // where its scores do
  int64_t num_scores = 0;
  std::unique_ptr<float[]> scores;
  const auto flush = [&] {
    scores.reset(new float[num_scores]);
    queries.push_back(int(chunks.size()));
#pragma omp parallel num_threads(int(p.num_threads))
    {
      AlignedFloats query(p.num_heads * p.index_dim);
      std::vector<float> ordered;
#pragma omp for schedule(dynamic)
      for (int i = 0; i < int(chunks.size()); ++i) {
        chunks[i].scores = scores.get() + placed[i];
        score(p, chunks[i], query.data());
      }
#pragma omp for schedule(dynamic)
      for (int i = 0; i < int(queries.size()) - 1; ++i) {
        const Chunk& first = chunks[queries[i]];
        take_best(first.scores, p.complete(first.n, first.token), int(p.top_k), ordered,
                  p.chosen + first.token * p.top_k);
      }
    }
    chunks.clear(), queries.clear(), placed.clear(), num_scores = 0;
  };

  for (int n = 0; n < p.num_seqs; ++n)
    for (int token = p.cu_seqlens[n]; token < p.cu_seqlens[n + 1]; ++token) {
      const int blocks = p.complete(n, token);
      if (blocks <= p.top_k) {
        for (int i = 0; i < blocks; ++i) p.chosen[token * p.top_k + i] = i;
        continue;
      }
      if (num_scores && num_scores + blocks > GROUP_SCORES) flush();
      queries.push_back(int(chunks.size()));
      for (int i = 0; i < blocks; i += KEYS) {
        const int count = std::min(KEYS, blocks - i);
        chunks.push_back({token, n, i, count, nullptr});
        placed.push_back(num_scores);
        num_scores += count;
      }
    }
  if (num_scores) flush();
  return true;
}

}  // namespace
}  // namespace th

TH_EXPORT_CALL(select_blocks, th::Call) {
  return call->is_bf16 ? th::run<th::bf16>(*call) : th::run<float>(*call);
}
