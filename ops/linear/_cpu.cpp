// Sibling linears of one input with few rows: see README.md and skinny.h.
#include <atomic>
#include <vector>

#include "call.h"
#include "skinny.h"

namespace {

TH_CALL(Call,
  const void* x;  // [M, K] in the op's dtype
  void* y;        // [M, rows of all weights]
  int64_t M, K, ldx, ldy, num_weights, is_bf16, num_threads;
);

// A weight: [rows, K], and its bias, [rows] or null.
TH_CALL(Group,
  const void *weight, *bias;
  int64_t rows;
);

// Of weights, what a thread takes at a time: long enough for streams, short enough to balance.
constexpr int64_t MAX_CHUNK_BYTES = 512 << 10, MIN_CHUNK_BYTES = 64 << 10, CHUNKS_PER_THREAD = 8;

template <typename T>
struct Scratch {
  th::PackedRows<T> x;
  std::vector<float> y;
};

template <typename T>
void multiply_chunk(Scratch<T>& scratch, const Group& group, int64_t first, int64_t rows, T* y,
                    int64_t ldy) {
  const int64_t K = scratch.x.depth();
  const T* W = static_cast<const T*>(group.weight) + first * K;
  const T* bias = static_cast<const T*>(group.bias);
  scratch.y.resize(scratch.x.rows() * rows);
  th::multiply_rows(scratch.x, W, K, rows, scratch.y.data(), rows);
  for (int m = 0; m < scratch.x.rows(); ++m)
    for (int64_t n = 0; n < rows; n += th::LANES) {
      const int count = int(std::min<int64_t>(th::LANES, rows - n));
      th::f32x16 values = th::load(scratch.y.data() + m * rows + n, count);
      if (bias) values += th::load(bias + first + n, count);
      th::store(y + m * ldy + first + n, values, count);
    }
}

// Rows of a chunk; the split does not change any result.
int64_t chunk_rows(const Call& call, const Group* groups, int64_t row_bytes) {
  int64_t rows = 0;
  for (int64_t g = 0; g < call.num_weights; ++g) rows += groups[g].rows;
  const int64_t share = rows * row_bytes / (call.num_threads * CHUNKS_PER_THREAD);
  const int64_t bytes = std::min(std::max(share, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES);
  return std::max<int64_t>(bytes / (row_bytes + 1) / th::LANES, 1) * th::LANES;
}

template <typename T>
void multiply(const Call& call, const Group* groups) {
  const T* x = static_cast<const T*>(call.x);
  T* y = static_cast<T*>(call.y);
  const int64_t chunk = chunk_rows(call, groups, call.K * int64_t(sizeof(T)));
  std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(int(call.num_threads))
  {
    static thread_local Scratch<T> scratch;
    scratch.x.pack(int(call.M), call.K, x, call.ldx);
    int64_t mine = taken++, index = 0, column = 0;
    for (int64_t g = 0; g < call.num_weights; ++g) {
      for (int64_t first = 0; first < groups[g].rows; first += chunk, ++index) {
        if (index != mine) continue;
        const int64_t rows = std::min(chunk, groups[g].rows - first);
        multiply_chunk(scratch, groups[g], first, rows, y + column, call.ldy);
        mine = taken++;
      }
      column += groups[g].rows;
    }
  }
}

}  // namespace

TH_EXPORT_CALL_OF_ROWS(linear, Call, Group) {
  const Group* groups = th::rows_of<Group>(*call);
  call->is_bf16 ? multiply<th::bf16>(*call, groups) : multiply<float>(*call, groups);
  return true;
}
