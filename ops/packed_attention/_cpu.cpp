// Causal attention within packed sequences on a CPU, and its backward, by tiles of 64 queries and 64
// keys of a sequence whose products are float.
//
// Forwards a thread takes a tile of queries of one head, and has an online softmax over the keys
// before it. Backwards it takes a sequence and a head of keys, and of its heads of queries makes the
// weights of tiles again, from log-sum-exps; where these are fewer than threads, one head of queries.
// Heads have sums of their own, which are added in their order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "aligned_floats.h"
#include "call.h"
#include "gemm.h"
#include "softmax.h"

namespace th::packed_attention {

constexpr int BLOCK = 64;

TH_CALL(Forward,
  const void *q, *k, *v;      // [T, H, K], [T, HKV, K], [T, HKV, V]
  const int32_t *cu_seqlens, *blocks;  // [N + 1], [T, B] or null
  const void* bias;                    // [T, H, R], or null
  void* out;                  // [T, H, V], contiguous
  float* lse;                 // [T, H], contiguous
  int64_t num_tokens, num_seqs, num_heads, num_k_heads, head_dim, v_head_dim, reach;
  int64_t q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride;
  int64_t bias_stride, bias_head_stride;
  int64_t span;  // tokens that one attends to, itself among them
  int64_t num_picked, block_size;
  int64_t is_bf16, num_threads;
  double scale;
);

TH_CALL(Backward,
  const void *q, *k, *v;
  const int32_t *cu_seqlens, *blocks;
  const void *bias, *out;
  const float* lse;
  const void* dout;
  const float* dlse;           // or null
  void *dq, *dk, *dv, *dbias;  // contiguous; the last like bias
  int64_t num_tokens, num_seqs, num_heads, num_k_heads, head_dim, v_head_dim, reach;
  int64_t q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride;
  int64_t bias_stride, bias_head_stride, out_stride, lse_stride, dout_stride, dlse_stride;
  int64_t span, num_picked, block_size, is_bf16, num_threads;
  double scale;
);

// Rows of one head of a sequence.
template <typename T>
struct Rows {
  T* first;
  int64_t stride;
  T* at(int64_t row) const { return first + row * stride; }
};

// A head of queries of a sequence, and its head of keys.
template <typename T, typename Call>
struct Head {
  const Call& call;
  int64_t start, length, head;
  int64_t k_head() const { return head / (call.num_heads / call.num_k_heads); }

  template <typename E>
  Rows<E> rows(E* tensor, int64_t stride, int64_t at) const {
    return {tensor + start * stride + at, stride};
  }
  Rows<const T> q() const {
    return rows((const T*)call.q, call.q_stride, head * call.q_head_stride);
  }
  Rows<const T> k() const {
    return rows((const T*)call.k, call.k_stride, k_head() * call.k_head_stride);
  }
  Rows<const T> v() const {
    return rows((const T*)call.v, call.v_stride, k_head() * call.v_head_stride);
  }
  Rows<const T> bias() const {
    return rows((const T*)call.bias, call.bias_stride, head * call.bias_head_stride);
  }

  // The first block of keys that queries from `row` on see.
  int64_t first_block(int64_t row) const {
    return std::max<int64_t>(0, row - call.span + 1) / BLOCK * BLOCK;
  }

  // Makes biases of complete blocks -inf that query `row` has not picked.
  void hide(int64_t row, int64_t key, float* biases) const {
    const int64_t size = call.block_size, done = (row + 1) / size * size - key;
    if (done <= 0) return;
    float given[BLOCK];
    std::copy_n(biases, BLOCK, given);
    std::fill_n(biases, std::min<int64_t>(done, BLOCK), NO_KEY);
    const int32_t* picked = call.blocks + (start + row) * call.num_picked;
    for (int64_t i = 0; i < call.num_picked; ++i) {
      const int64_t first = std::max<int64_t>(picked[i] * size - key, 0);
      const int64_t end = std::min<int64_t>((picked[i] + 1) * size - key, BLOCK);
      if (picked[i] >= 0 && first < end) std::copy(given + first, given + end, biases + first);
    }
  }

  // Turns products of query `row` with BLOCK keys from `key` on into logits, -inf if it sees not.
  void finish(int64_t row, int64_t key, float* products) const {
    const int64_t begin = row - call.span + 1 - key, end = row + 1 - key;
    const int64_t last = std::min<int64_t>(end, BLOCK);
    alignas(64) float biases[BLOCK] = {};
    if (call.bias) {
      const T* b = bias().at(row);
      for (int64_t j = std::max<int64_t>(0, end - call.reach); j < last; ++j)
        biases[j] = to_float(b[end - 1 - j]);
    }
    if (call.blocks) hide(row, key, biases);
    for (int j = 0; j < BLOCK; j += LANES) {
      f32x16 x = load(products + j) * float(call.scale);
      if (call.bias || call.blocks) x += load(biases + j);
      const i32x16 at = lane_numbers() + j;
      const auto sees = (at >= int32_t(std::max<int64_t>(begin, 0))) & (at < int32_t(last));
      store(products + j, select(sees, x, splat(NO_KEY)));
    }
  }
};

template <typename T>
void widen_rows(Rows<const T> from, int64_t row, int64_t rows, int64_t size, float* to) {
  for (int64_t i = 0; i < rows; ++i)
    for_lanes(size, [&](int64_t c, int n) TH_LAMBDA {
      store(to + i * size + c, load(from.at(row + i) + c, n), n);
    });
}

// to[c][j] = from(row + j)[c], BLOCK columns of which those past `rows` are 0.
template <typename T>
void transpose_rows(Rows<const T> from, int64_t row, int64_t rows, int64_t size, float* to) {
  for (int64_t j = 0; j < BLOCK; j += LANES)
    for (int64_t c = 0; c < size; c += LANES) {
      const int n = int(std::min<int64_t>(LANES, size - c));
      f32x16 x[LANES];
      for (int i = 0; i < LANES; ++i)
        x[i] = j + i < rows ? load(from.at(row + j + i) + c, n) : f32x16{};
      transpose16(x);
      for (int i = 0; i < n; ++i) store(to + (c + i) * BLOCK + j, x[i]);
    }
}

template <typename T>
void write_rows(const float* from, int64_t rows, int64_t size, float factor, Rows<T> to) {
  for (int64_t i = 0; i < rows; ++i)
    for_lanes(size, [&](int64_t c, int n) TH_LAMBDA {
      store(to.at(i) + c, load(from + i * size + c, n) * factor, n);
    });
}

// What a thread works in.
struct Scratch {
  AlignedFloats queries, keys, keys_across, values, values_across, grads, weights, dweights, sums;

  Scratch(int64_t K, int64_t V, int64_t sums)
      : queries(BLOCK * K), keys(BLOCK * K), keys_across(BLOCK * K), values(BLOCK * V),
        values_across(BLOCK * V), grads(BLOCK * V), weights(BLOCK * BLOCK),
        dweights(BLOCK * BLOCK), sums(sums) {}
};

template <typename T>
void attend(const Head<T, Forward>& head, int64_t row, Scratch& s) {
  const Forward& call = head.call;
  const int64_t K = call.head_dim, V = call.v_head_dim;
  const int64_t rows = std::min<int64_t>(BLOCK, head.length - row);
  float *out = s.sums.data(), *weights = s.weights.data();
  RowState states[BLOCK];
  std::fill_n(out, rows * V, 0.0f);
  widen_rows(head.q(), row, rows, K, s.queries.data());
  for (int64_t key = head.first_block(row); key <= row; key += BLOCK) {
    const int64_t keys = std::min<int64_t>(BLOCK, head.length - key);
    transpose_rows(head.k(), key, keys, K, s.keys_across.data());
    widen_rows(head.v(), key, keys, V, s.values.data());
    gemm_nn(rows, BLOCK, K, s.queries.data(), K, s.keys_across.data(), BLOCK, weights, BLOCK);
    for (int64_t i = 0; i < rows; ++i) {
      float* w = weights + i * BLOCK;
      head.finish(row + i, key, w);
      f32x16 largest = splat(NO_KEY), sums{};
      for (int j = 0; j < BLOCK; j += LANES) largest = max(largest, load(w + j));
      const float most = std::max(states[i].max, max(largest));
      const float shift = most == NO_KEY ? 0.0f : most;
      for (int j = 0; j < BLOCK; j += LANES) {
        const f32x16 weight = exp(load(w + j) - shift);
        store(w + j, weight);
        sums += weight;
      }
      const float factor = exp(splat(states[i].max - shift))[0];
      states[i] = {most, fma(states[i].sum, factor, sum(sums))};
      for_lanes(V, [&](int64_t c, int n) TH_LAMBDA {
        store(out + i * V + c, load(out + i * V + c, n) * factor, n);
      });
    }
    gemm_nn(rows, V, keys, weights, BLOCK, s.values.data(), V, out, V, 1);
  }
  const int64_t token = head.start + row;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t at = (token + i) * call.num_heads + head.head;
    const bool sees_some = states[i].sum != 0;  // as torch's kernel has it: else zeros
    call.lse[at] = sees_some ? states[i].lse() : 0.0f;
    const float factor = sees_some ? 1.0f / states[i].sum : 0.0f;
    write_rows(out + i * V, 1, V, factor, Rows<T>{(T*)call.out + at * V, 0});
  }
}

template <typename T>
void forward(const Forward& call) {
  struct Item {
    int64_t seq, row;
  };
  std::vector<Item> items;
  for (int64_t n = 0; n < call.num_seqs; ++n)
    for (int64_t row = 0; row < call.cu_seqlens[n + 1] - call.cu_seqlens[n]; row += BLOCK)
      items.push_back({n, row});
  const int64_t H = call.num_heads, tokens = call.cu_seqlens[call.num_seqs];
  const int64_t padding = (call.num_tokens - tokens) * H;
  std::fill_n((T*)call.out + tokens * H * call.v_head_dim, padding * call.v_head_dim, T{});
  std::fill_n(call.lse + tokens * H, padding, 0.0f);
#pragma omp parallel num_threads(int(call.num_threads))
  {
    Scratch scratch(call.head_dim, call.v_head_dim, BLOCK * call.v_head_dim);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < int64_t(items.size()) * H; ++i) {
      const Item item = items[items.size() - 1 - i / H];  // the last ones see most
      const int64_t start = call.cu_seqlens[item.seq];
      const int64_t length = call.cu_seqlens[item.seq + 1] - start;
      attend(Head<T, Forward>{call, start, length, i % H}, item.row, scratch);
    }
  }
}

// products[i] = a(row + i) b(row + i), BLOCK of them, added in the order of gemm.h: where a query sees
// one key alone, that is its product with the gradient, and no logit gets any.
template <typename T>
void multiply_rows(Rows<const T> a, Rows<const T> b, int64_t row, int64_t rows, int64_t size,
                   Scratch& s, float* products) {
  float *across = s.values.data(), *others = s.values_across.data();
  transpose_rows(a, row, rows, size, across);
  transpose_rows(b, row, rows, size, others);
  constexpr int VECTORS = BLOCK / LANES;
  f32x16 sums[VECTORS] = {};
  for (int64_t c = 0; c < size; ++c)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t at = c * BLOCK + v * LANES;
      sums[v] = fma(load(across + at), load(others + at), sums[v]);
    }
  for (int v = 0; v < VECTORS; ++v) store(products + v * LANES, sums[v]);
}

// Gradients of a head of queries, and of its keys and values [length, K + V] by it alone.
template <typename T>
void differentiate(const Head<T, Backward>& head, float* dk, Scratch& s) {
  const Backward& call = head.call;
  const int64_t K = call.head_dim, V = call.v_head_dim, H = call.num_heads, h = head.head;
  const int64_t length = head.length;
  float *dv = dk + length * K, *dq = s.sums.data(), *shared = dq + length * K;
  float *weights = s.weights.data(), *dweights = s.dweights.data();
  std::fill_n(dk, length * (K + V), 0.0f);
  std::fill_n(dq, length * K, 0.0f);
  const auto out = head.rows((const T*)call.out, call.out_stride, h * V);
  const auto dout = head.rows((const T*)call.dout, call.dout_stride, h * V);
  const auto lse = head.rows(call.lse, call.lse_stride, h);
  for (int64_t row = 0; row < length; row += BLOCK) {
    const int64_t rows = std::min<int64_t>(BLOCK, length - row);
    multiply_rows(dout, out, row, rows, V, s, shared + row);
    for (int64_t i = row; i < row + rows && call.dlse; ++i)
      shared[i] -= *head.rows(call.dlse, call.dlse_stride, h).at(i);
  }
  for (int64_t key = 0; key < length; key += BLOCK) {
    const int64_t keys = std::min<int64_t>(BLOCK, length - key);
    widen_rows(head.k(), key, keys, K, s.keys.data());
    transpose_rows(head.k(), key, keys, K, s.keys_across.data());
    transpose_rows(head.v(), key, keys, V, s.values_across.data());
    for (int64_t row = key; row < length && head.first_block(row) <= key; row += BLOCK) {
      const int64_t rows = std::min<int64_t>(BLOCK, length - row);
      float *queries = s.queries.data(), *grads = s.grads.data();
      widen_rows(head.q(), row, rows, K, queries);
      widen_rows(dout, row, rows, V, grads);
      gemm_nn(rows, BLOCK, K, queries, K, s.keys_across.data(), BLOCK, weights, BLOCK);
      gemm_nn(rows, BLOCK, V, grads, V, s.values_across.data(), BLOCK, dweights, BLOCK);
      for (int64_t i = 0; i < rows; ++i) {
        float *w = weights + i * BLOCK, *d = dweights + i * BLOCK;
        head.finish(row + i, key, w);
        for (int j = 0; j < BLOCK; j += LANES) {
          const f32x16 weight = exp(load(w + j) - *lse.at(row + i));
          store(w + j, weight);
          store(d + j, weight * (load(d + j) - shared[row + i]));
        }
        if (!call.bias) continue;
        const int64_t end = row + i + 1 - key;
        T* dbias = (T*)call.dbias + ((head.start + row + i) * H + h) * call.reach + end - 1;
        for (int64_t j = std::max<int64_t>(0, end - call.reach); j < std::min(end, keys); ++j)
          dbias[-j] = from_float<T>(d[j]);
      }
      gemm_tn(keys, V, rows, weights, BLOCK, grads, V, dv + key * V, V, 1);
      gemm_tn(keys, K, rows, dweights, BLOCK, queries, K, dk + key * K, K, 1);
      gemm_nn(rows, K, keys, dweights, BLOCK, s.keys.data(), K, dq + row * K, K, 1);
    }
  }
  write_rows(dq, length, K, float(call.scale), head.rows((T*)call.dq, H * K, h * K));
}

template <typename T>
void backward(const Backward& call) {
  const int64_t K = call.head_dim, V = call.v_head_dim, H = call.num_heads, HKV = call.num_k_heads;
  const int64_t tokens = call.cu_seqlens[call.num_seqs], padding = call.num_tokens - tokens;
  const int64_t group = H / HKV, size = K + V;
  std::fill_n((T*)call.dq + tokens * H * K, padding * H * K, T{});
  std::fill_n((T*)call.dk + tokens * HKV * K, padding * HKV * K, T{});
  std::fill_n((T*)call.dv + tokens * HKV * V, padding * HKV * V, T{});
  if (call.bias) std::fill_n((T*)call.dbias, call.num_tokens * H * call.reach, T{});
  int64_t longest = 0;
  for (int64_t n = 0; n < call.num_seqs; ++n)
    longest = std::max<int64_t>(longest, call.cu_seqlens[n + 1] - call.cu_seqlens[n]);
  const auto head = [&](int64_t seq, int64_t h) {
    const int64_t start = call.cu_seqlens[seq];
    return Head<T, Backward>{call, start, call.cu_seqlens[seq + 1] - start, h};
  };
  const bool is_split = call.num_seqs * HKV < call.num_threads;
  AlignedFloats all(is_split ? tokens * H * size : 0);
#pragma omp parallel num_threads(int(call.num_threads))
  {
    Scratch scratch(K, V, longest * (K + 1) + BLOCK);
    AlignedFloats own(is_split ? 0 : std::min<int64_t>(group, 2) * longest * size);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < is_split * call.num_seqs * H; ++i) {
      const auto of = head(i / H, i % H);
      differentiate(of, all.data() + (of.start * H + of.head * of.length) * size, scratch);
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < call.num_seqs * HKV; ++i) {
      const auto of = head(i / HKV, i % HKV * group);
      const int64_t length = of.length;
      float* sums = is_split ? all.data() + (of.start * H + of.head * length) * size : own.data();
      for (int64_t h = 0; h < group; ++h) {
        float* more = sums + (is_split ? h : h > 0) * length * size;
        if (!is_split) differentiate(head(i / HKV, of.head + h), more, scratch);
        if (h == 0) continue;
        for_lanes(length * size, [&](int64_t c, int n) TH_LAMBDA {
          store(sums + c, load(sums + c, n) + load(more + c, n), n);
        });
      }
      const auto dk = of.rows((T*)call.dk, HKV * K, of.k_head() * K);
      write_rows(sums, length, K, float(call.scale), dk);
      const auto dv = of.rows((T*)call.dv, HKV * V, of.k_head() * V);
      write_rows(sums + length * K, length, V, 1.0f, dv);
    }
  }
}

}  // namespace th::packed_attention

TH_EXPORT_CALL(packed_attention_forward, th::packed_attention::Forward) {
  using namespace th::packed_attention;
  call->is_bf16 ? forward<th::bf16>(*call) : forward<float>(*call);
  return true;
}

TH_EXPORT_CALL(packed_attention_backward, th::packed_attention::Backward) {
  using namespace th::packed_attention;
  call->is_bf16 ? backward<th::bf16>(*call) : backward<float>(*call);
  return true;
}
