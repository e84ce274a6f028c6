// The indices of a batch whose rows lie in pages, and whether they are inside their pool.
#pragma once

#include <algorithm>
#include <cstdint>

namespace th {

// A Call (call.h) that has the index arguments of an op over pages. Page 0 is null.
//
//   const int32_t *cu_seqlens, *seq_lens, *page_table, *slot_mapping;
//   int64_t page_table_row, num_tokens, num_seqs, num_pages, page_size, max_pages;
template <typename Call>
struct OverPages : Call {
  using Call::cu_seqlens, Call::seq_lens, Call::page_table, Call::slot_mapping;
  using Call::num_tokens, Call::num_seqs, Call::num_pages, Call::page_size;

  explicit OverPages(const Call& call) : Call(call) {}

  int num_new(int n) const { return cu_seqlens[n + 1] - cu_seqlens[n]; }
  bool is_padding(int64_t token) const { return token >= cu_seqlens[num_seqs]; }

  // to[i] = address of row `begin + i` of a sequence, for rows of `width` elements from `pool` on.
  template <typename T>
  void addresses(int n, int begin, int count, const T* pool, int64_t width, const T** to) const {
    const int32_t* pages = table(n) + begin / page_size;
    for (int i = 0, offset = int(begin % page_size); i < count; ++i, ++offset) {
      if (offset == page_size) offset = 0, ++pages;
      to[i] = pool + (*pages * page_size + offset) * width;
    }
  }

  const int32_t* table(int n) const { return page_table + n * this->page_table_row; }

  // Whether all that a call reads and writes is there; `window` 0 means that a query sees all keys.
  bool indices_are_valid(int64_t window = 0) const {
    if (cu_seqlens[0] != 0 || cu_seqlens[num_seqs] > num_tokens) return false;
    for (int n = 0; n < num_seqs; ++n)
      if (!sequence_is_valid(n, window)) return false;
    for (int64_t t = 0; t < cu_seqlens[num_seqs]; ++t)
      if (slot_mapping[t] < page_size || slot_mapping[t] >= num_pages * page_size) return false;
    return true;
  }

 private:
  bool sequence_is_valid(int n, int64_t window) const {
    const int64_t added = int64_t(cu_seqlens[n + 1]) - cu_seqlens[n], length = seq_lens[n];
    if (added <= 0) return added == 0;
    if (length < added || length > this->max_pages * page_size) return false;
    const int64_t first = window ? std::max<int64_t>(0, length - added - window + 1) : 0;
    const int32_t* pages = table(n);
    for (int64_t i = first / page_size; i * page_size < length; ++i)
      if (pages[i] < 1 || pages[i] >= num_pages) return false;
    return true;
  }
};

}  // namespace th
