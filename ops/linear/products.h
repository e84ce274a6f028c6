// Products of one input with weights that are stored in some way, which whoever includes this names:
// each way is a library of its own, so that nobody waits for the compiler with those of others.
//
//   multiply<T, W>(call, groups)   for x of T, and weights as W of rows.h says
#pragma once

#include <atomic>
#include <type_traits>
#include <vector>

#include "call.h"
#include "rows.h"
#include "threads.h"

namespace products {

TH_CALL(Call,
  const void* x;  // [M, K] in the op's dtype
  void* y;        // [M, rows of all weights]
  int64_t M, K, ldx, ldy, num_weights, streams, by_hardware, format, is_bf16, is_invariant;
  int64_t num_threads;
);

// A weight: [rows, K] as the call's format says; its scales, null where it has none; its bias, [rows]
// or null; how many elements of a row share a scale, where integers do, and whether zero points stand
// beside scales.
TH_CALL(Group,
  const void *weight, *scales, *bias;
  int64_t rows, group, has_zeros;
);

template <typename W>
struct StoredAs;
template <typename T>
struct StoredAs<th::Weights<T>> {
  static th::Weights<T> of(const Call& call, const Group& group) {
    return {group.weight, static_cast<const float*>(group.scales), call.K};
  }
};
template <typename Q>
struct StoredAs<th::Integers<Q>> {
  static th::Integers<Q> of(const Call& call, const Group& group) {
    return {group.weight, static_cast<const float*>(group.scales), call.K, group.group,
            group.has_zeros != 0};
  }
};

// Of weights, what a thread takes at a time: long enough for streams, short enough to balance.
constexpr int64_t CHUNKS_PER_THREAD = 8;
constexpr int64_t MAX_CHUNK_BYTES = 2 << 20, MIN_CHUNK_BYTES = 64 << 10;  // for few rows of x
// One thread has nothing to balance, and streams begin slowly. With K = 1024, sums of 16 rows of x
// take 256 KB of L2.
constexpr int64_t LONE_CHUNK_BYTES = 16 << 20;
constexpr int64_t MAX_CHUNK_ROWS = 384, MIN_CHUNK_ROWS = 96;                // for many
constexpr int64_t MAX_PACKED_ROWS = 512;  // of x, transposed at a time: bounds the memory for it

template <typename T, typename W>
struct Chunk {
  W weight;
  int64_t first, rows;  // of the weight
  const T* bias;        // from its first row on
  int64_t column;       // of y
};

// Rows [first, first + count) of x, and as many columns of y as the chunk has rows, from float sums.
template <typename T, typename W>
void write(const Call& call, const Chunk<T, W>& chunk, int64_t first, int64_t count,
           const float* sums) {
  T* y = static_cast<T*>(call.y) + first * call.ldy + chunk.column;
  for (int64_t m = 0; m < count; ++m)
    for (int64_t n = 0; n < chunk.rows; n += th::LANES) {
      const int left = int(std::min<int64_t>(th::LANES, chunk.rows - n));
      th::f32x16 values = th::load(sums + m * chunk.rows + n, left);
      if (chunk.bias) values += th::load(chunk.bias + n, left);
      th::store(y + m * call.ldy + n, values, left);
    }
}

inline int64_t rows_of_all(const Call& call, const Group* groups) {
  int64_t rows = 0;
  for (int64_t g = 0; g < call.num_weights; ++g) rows += groups[g].rows;
  return rows;
}

// Threads for M rows of x: up to sixteen take hardly longer than what is read of the weights.
inline int num_threads_for(const Call& call, const Group* groups, int64_t M) {
  const int64_t bytes = rows_of_all(call, groups) * call.K * int64_t(sizeof(float));
  return th::threads_for(bytes * std::max<int64_t>(M / 8, 1), call.num_threads);
}

// Hands out the chunks of all weights to the threads that ask; the split changes no result.
template <typename T, typename W>
class Chunks {
 public:
  Chunks(const Call& call, const Group* groups, int64_t rows)
      : call_(call), groups_(groups), rows_(rows) {}

  template <typename Body>
  void each(const Body& body) {
    int64_t mine = taken_++, index = 0, column = 0;
    for (int64_t g = 0; g < call_.num_weights; column += groups_[g++].rows) {
      const W weight = StoredAs<W>::of(call_, groups_[g]);
      const T* bias = static_cast<const T*>(groups_[g].bias);
      for (int64_t first = 0; first < groups_[g].rows; first += rows_, ++index) {
        if (index != mine) continue;
        body(Chunk<T, W>{weight, first, std::min(rows_, groups_[g].rows - first),
                         bias ? bias + first : nullptr, column + first});
        mine = taken_++;
      }
    }
  }

 private:
  const Call& call_;
  const Group* groups_;
  const int64_t rows_;
  std::atomic<int64_t> taken_{0};
};

template <typename T, typename W>
void multiply_few(const Call& call, const Group* groups) {
  const T* x = static_cast<const T*>(call.x);
  const int64_t row_bytes = call.K * int64_t(sizeof(T));
  const int64_t share =
      rows_of_all(call, groups) * row_bytes / (call.num_threads * CHUNKS_PER_THREAD);
  const int64_t bytes = call.num_threads > 1
                            ? std::min(std::max(share, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
                            : LONE_CHUNK_BYTES;
  const int64_t rows = std::max<int64_t>(bytes / (row_bytes + 1) / th::LANES, 1) * th::LANES;
  Chunks<T, W> chunks(call, groups, rows);
#pragma omp parallel num_threads(num_threads_for(call, groups, call.M))
  {
    static thread_local typename th::Meeting<T, W>::Few few;
    static thread_local std::vector<float> sums;
    few.pack(int(call.M), call.K, [&](int i) { return x + i * call.ldx; });
    chunks.each([&](const Chunk<T, W>& chunk) {
      sums.resize(call.M * chunk.rows);
      few.multiply(chunk.weight, chunk.first, chunk.rows, sums.data(), chunk.rows,
                   {call.streams, call.by_hardware != 0});
      write(call, chunk, 0, call.M, sums.data());
    });
  }
}

// Rows of x that all threads transpose together, and then multiply by all weights.
template <typename T, typename W>
void multiply_packed(const Call& call, const Group* groups, int64_t first, th::LaneRows<T>& x) {
  const T* rows = static_cast<const T*>(call.x) + first * call.ldx;
  const int64_t share =
      rows_of_all(call, groups) / (call.num_threads * CHUNKS_PER_THREAD) / MIN_CHUNK_ROWS;
  Chunks<T, W> chunks(call, groups,
                      std::min(std::max<int64_t>(share, 1) * MIN_CHUNK_ROWS, MAX_CHUNK_ROWS));
  std::atomic<int> packed{0};
#pragma omp parallel num_threads(num_threads_for(call, groups, x.rows()))
  {
    for (int v; (v = packed++) < x.vectors();)
      x.pack(v, [&](int64_t i) { return rows + i * call.ldx; });
#pragma omp barrier
    static thread_local std::vector<float> sums;
    static thread_local typename th::Meeting<T, W>::Pieces pieces;
    th::with_lane_product<T>([&](auto& product) {
      constexpr int VECTORS = std::decay_t<decltype(product)>::VECTORS, ROWS = th::LaneRows<T>::ROWS;
      const auto multiply = [&](const Chunk<T, W>& chunk, const auto* rows) {
        for (int v = 0; v < x.vectors(); v += VECTORS) {
          const int64_t at = v * ROWS;
          const int64_t count = std::min<int64_t>(VECTORS * ROWS, x.rows() - at);
          const int last = std::min(v + VECTORS, x.vectors());
          if constexpr (std::is_same_v<T, float>)
            if (!chunk.bias) {
              float* y = static_cast<float*>(call.y) + (first + at) * call.ldy + chunk.column;
              product.run(x, v, last, rows, call.K, chunk.rows, y, call.ldy);
              continue;
            }
          sums.resize(count * chunk.rows);
          product.run(x, v, last, rows, call.K, chunk.rows, sums.data(), chunk.rows);
          write(call, chunk, first + at, count, sums.data());
        }
      };
      chunks.each([&](const Chunk<T, W>& chunk) {
        pieces.each(chunk.weight, chunk.first, chunk.rows, call.M,
                    [&](const auto* rows, int64_t at, int64_t count) {
                      multiply({chunk.weight, chunk.first + at, count,
                                chunk.bias ? chunk.bias + at : nullptr, chunk.column + at},
                               rows);
                    });
      });
    });
  }
}

template <typename T, typename W>
void multiply(const Call& call, const Group* groups) {
  if (!call.is_invariant && th::Meeting<T, W>::is_few(call.M))
    return multiply_few<T, W>(call, groups);
  static thread_local th::LaneRows<T> x;
  for (int64_t first = 0; first < call.M; first += MAX_PACKED_ROWS) {
    x.resize(std::min(MAX_PACKED_ROWS, call.M - first), call.K, call.is_invariant);
    multiply_packed<T, W>(call, groups, first, x);
  }
}

}  // namespace products
