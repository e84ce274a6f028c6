// Sibling linears of one input: see README.md.
#include <atomic>
#include <vector>

#include "block_fp8.h"
#include "call.h"
#include "rows.h"

namespace {

TH_CALL(Call,
  const void* x;  // [M, K] in the op's dtype
  void* y;        // [M, rows of all weights]
  int64_t M, K, ldx, ldy, num_weights, streams, by_hardware, is_bf16, num_threads;
);

// A weight: [rows, K]; its scales, null where it is in the op's dtype; its bias, [rows] or null.
TH_CALL(Group,
  const void *weight, *scales, *bias;
  int64_t rows;
);

// Of weights, what a thread takes at a time: long enough for streams, short enough to balance.
constexpr int64_t CHUNKS_PER_THREAD = 8;
constexpr int64_t MAX_CHUNK_BYTES = 512 << 10, MIN_CHUNK_BYTES = 64 << 10;  // for few rows of x
constexpr int64_t MAX_CHUNK_ROWS = 384, MIN_CHUNK_ROWS = 32;                // for many
constexpr int64_t MAX_PACKED_ROWS = 512;  // of x, transposed at a time: bounds the memory for it

template <typename T>
struct Chunk {
  th::Weights<T> weight;
  int64_t first, rows;  // of the weight
  const T* bias;        // from its first row on
  int64_t column;       // of y
};

// Rows [first, first + count) of x, and as many columns of y as the chunk has rows, from float sums.
template <typename T>
void write(const Call& call, const Chunk<T>& chunk, int64_t first, int64_t count,
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

int64_t rows_of_all(const Call& call, const Group* groups) {
  int64_t rows = 0;
  for (int64_t g = 0; g < call.num_weights; ++g) rows += groups[g].rows;
  return rows;
}

// Hands out the chunks of all weights to the threads that ask; the split changes no result.
template <typename T>
class Chunks {
 public:
  Chunks(const Call& call, const Group* groups, int64_t rows)
      : call_(call), groups_(groups), rows_(rows) {}

  template <typename Body>
  void each(const Body& body) {
    int64_t mine = taken_++, index = 0, column = 0;
    for (int64_t g = 0; g < call_.num_weights; column += groups_[g++].rows) {
      const th::Weights<T> weight{groups_[g].weight, static_cast<const float*>(groups_[g].scales),
                                  call_.K};
      const T* bias = static_cast<const T*>(groups_[g].bias);
      for (int64_t first = 0; first < groups_[g].rows; first += rows_, ++index) {
        if (index != mine) continue;
        body(Chunk<T>{weight, first, std::min(rows_, groups_[g].rows - first),
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

template <typename T>
struct Scratch {
  th::PackedRows<T> x;
  th::Pieces<T> pieces;
  std::vector<float> sums;
};

template <typename T>
void multiply_few(const Call& call, const Group* groups) {
  const T* x = static_cast<const T*>(call.x);
  const int64_t row_bytes = call.K * int64_t(sizeof(T));
  const int64_t share =
      rows_of_all(call, groups) * row_bytes / (call.num_threads * CHUNKS_PER_THREAD);
  const int64_t bytes = std::min(std::max(share, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES);
  const int64_t rows = std::max<int64_t>(bytes / (row_bytes + 1) / th::LANES, 1) * th::LANES;
  Chunks<T> chunks(call, groups, rows);
#pragma omp parallel num_threads(int(call.num_threads))
  {
    static thread_local Scratch<T> scratch;
    scratch.x.pack(int(call.M), call.K, x, call.ldx);
    chunks.each([&](const Chunk<T>& chunk) {
      scratch.sums.resize(call.M * chunk.rows);
      scratch.pieces.each(chunk.weight, chunk.first, chunk.rows, call.M,
                          [&](const T* rows, int64_t at, int64_t count) {
                            th::multiply_rows(scratch.x, rows, call.K, count,
                                              scratch.sums.data() + at, chunk.rows,
                                              {call.streams, call.by_hardware != 0});
                          });
      write(call, chunk, 0, call.M, scratch.sums.data());
    });
  }
}

// Rows of x that all threads transpose together, and then multiply by all weights.
template <typename T>
void multiply_packed(const Call& call, const Group* groups, int64_t first, th::LaneRows<T>& x) {
  const T* rows = static_cast<const T*>(call.x) + first * call.ldx;
  const int64_t share =
      rows_of_all(call, groups) / (call.num_threads * CHUNKS_PER_THREAD) / MIN_CHUNK_ROWS;
  Chunks<T> chunks(call, groups,
                   std::min(std::max<int64_t>(share, 1) * MIN_CHUNK_ROWS, MAX_CHUNK_ROWS));
  std::atomic<int> packed{0};
#pragma omp parallel num_threads(int(call.num_threads))
  {
    for (int v; (v = packed++) < x.vectors();)
      x.pack(v, [&](int64_t i) { return rows + i * call.ldx; });
#pragma omp barrier
    static thread_local std::vector<float> sums;
    static thread_local th::Pieces<T> pieces;
    th::with_lane_product<T>([&](auto& product) {
      constexpr int VECTORS = std::decay_t<decltype(product)>::VECTORS;
      const auto multiply = [&](const Chunk<T>& chunk, const T* rows) {
        for (int v = 0; v < x.vectors(); v += VECTORS) {
          const int64_t at = v * th::LANES;
          const int64_t count = std::min<int64_t>(VECTORS * th::LANES, x.rows() - at);
          sums.resize(count * chunk.rows);
          product.run(x, v, std::min(v + VECTORS, x.vectors()), rows, call.K, chunk.rows,
                      sums.data(), chunk.rows);
          write(call, chunk, first + at, count, sums.data());
        }
      };
      chunks.each([&](const Chunk<T>& chunk) {
        pieces.each(chunk.weight, chunk.first, chunk.rows, call.M,
                    [&](const T* rows, int64_t at, int64_t count) {
                      multiply({chunk.weight, chunk.first + at, count,
                                chunk.bias ? chunk.bias + at : nullptr, chunk.column + at},
                               rows);
                    });
      });
    });
  }
}

template <typename T>
void multiply(const Call& call, const Group* groups) {
  if (call.M <= th::few_rows<T>()) return multiply_few<T>(call, groups);
  static thread_local th::LaneRows<T> x;
  for (int64_t first = 0; first < call.M; first += MAX_PACKED_ROWS) {
    x.resize(std::min(MAX_PACKED_ROWS, call.M - first), call.K);
    multiply_packed<T>(call, groups, first, x);
  }
}

}  // namespace

TH_EXPORT_CALL_OF_ROWS(linear, Call, Group) {
  const Group* groups = th::rows_of<Group>(*call);
  call->is_bf16 ? multiply<th::bf16>(*call, groups) : multiply<float>(*call, groups);
  return true;
}
