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

// tanh within 2e-7: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
TH_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 magnitude = max(x, -x), z = x * x;
  f32x16 p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  p = fma(p * z, x, x);
  const f32x16 far = 1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f);
  return select(magnitude < splat(0.625f), p, select(x < splat(0.0f), -far, far));
}

// Turns products s[0, n) into weights e^(logit - max) in place, n a multiple of 16 (a lane that is
// no key holds NO_KEY, at least one is a key); returns the factor of what was summed before.
inline float softmax_row(float* s, int n, RowState& row, float scale, float softcap) {
  f32x16 largest = splat(row.max);
  for (int i = 0; i < n; i += LANES) {
    f32x16 x = load(s + i) * scale;
    if (softcap != 0) {
      const f32x16 capped = softcap * tanh(x * (1.0f / softcap));
      x = select(x == splat(NO_KEY), x, capped);
    }
    store(s + i, x);
    largest = max(x, largest);
  }
  const float before = row.max;
  row.max = max(largest);
  f32x16 total{};
  for (int i = 0; i < n; i += LANES) {
    const f32x16 weight = exp(load(s + i) - row.max);
    store(s + i, weight);
    total += weight;
  }
  const float factor = before == NO_KEY ? 0.0f : std::exp(before - row.max);
  row.sum = row.sum * factor + sum(total);
  return factor;
}

}  // namespace th
