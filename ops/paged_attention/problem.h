// What one call computes, and what its kernels share: addresses of keys and the online softmax.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "pages.h"
#include "simd.h"
#include "softmax.h"

namespace th {

// The arguments as the launcher fills them in; strides in elements. Mirrored in _cpu.py.
struct Call : Pages {
  const void *q, *k, *v;
  void *kv, *out;
  float* lse;  // may be null
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  int64_t num_q_heads, num_kv_heads, head_dim, window, num_threads;
  double scale, softcap;
};

template <typename T>
struct Problem : Call {
  explicit Problem(const Call& call) : Call(call) {}

  int group() const { return int(num_q_heads / num_kv_heads); }
  int64_t plane() const { return num_pages * page_size * num_kv_heads * head_dim; }
  const T* query(int64_t token, int64_t head) const {
    return static_cast<const T*>(q) + token * q_token + head * q_head;
  }
  T* output(int64_t token, int64_t head) const {
    return static_cast<T*>(out) + (token * num_q_heads + head) * head_dim;
  }
  T* slot(int64_t index) const {
    return static_cast<T*>(kv) + index * num_kv_heads * head_dim;
  }
  // The first key that the query at `position` sees.
  int first_key(int position) const {
    return window ? std::max<int>(0, position - int(window) + 1) : 0;
  }
  // rows[i] = key `begin + i` of a sequence; its value is plane() further.
  void key_rows(int n, int head, int begin, int count, const T** rows) const {
    const T* first = static_cast<const T*>(kv) + head * head_dim;
    addresses(n, begin, count, first, num_kv_heads * head_dim, rows);
  }
};

}  // namespace th
