// What one call computes, and what its kernels share: addresses of keys and the online softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "call.h"
#include "fp8_rows.h"
#include "pages.h"
#include "simd.h"
#include "softmax.h"

namespace th {

// Strides in elements. The pool is of fp8 where there are kv_scales. Keys `reach` tokens before a
// query or more have no bias.
TH_CALL(Call,
  const int32_t *cu_seqlens, *seq_lens, *page_table, *slot_mapping;
  const float* kv_scales;
  const void *q, *k, *v, *relative_bias;
  void *kv, *out;
  float* lse;
  int64_t page_table_row, num_tokens, num_seqs, num_pages, page_size, max_pages;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  int64_t num_q_heads, num_kv_heads, head_dim, window, reach, is_bf16, is_invariant, num_threads;
  double scale, softcap;
);

// Queries and results are of T, and the pool of Kept: T or fp8.
template <typename T, typename Kept>
struct Problem : OverPages<Call> {
  using OverPages<Call>::OverPages;

  int group() const { return int(num_q_heads / num_kv_heads); }
  int64_t plane() const { return num_pages * page_size * num_kv_heads * head_dim; }
  const T* query(int64_t token, int64_t head) const {
    return static_cast<const T*>(q) + token * q_token + head * q_head;
  }
  T* output(int64_t token, int64_t head) const {
    return static_cast<T*>(out) + (token * num_q_heads + head) * head_dim;
  }
  // By distance, of a query; there are `reach` of them.
  const T* biases(int64_t token, int64_t head) const {
    return static_cast<const T*>(relative_bias) + (token * num_q_heads + head) * reach;
  }
  Kept* slot(int64_t index) const {
    return static_cast<Kept*>(kv) + index * num_kv_heads * head_dim;
  }
  // What kept numbers are worth, in the keys and in the values of a head.
  float key_scale(int64_t head) const { return kv_scales ? kv_scales[head] : 1.0f; }
  float value_scale(int64_t head) const { return kv_scales ? kv_scales[num_kv_heads + head] : 1.0f; }
  float logit_scale(int64_t head) const { return float(scale * key_scale(head)); }
  // The first key that the query at `position` sees.
  int first_key(int position) const {
    return window ? std::max<int>(0, position - int(window) + 1) : 0;
  }
  // rows[i] = key `begin + i` of a sequence; its value is plane() further.
  void key_rows(int n, int head, int begin, int count, const Kept** rows) const {
    const Kept* first = static_cast<const Kept*>(kv) + head * head_dim;
    addresses(n, begin, count, first, num_kv_heads * head_dim, rows);
  }
};

}  // namespace th
