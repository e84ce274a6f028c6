// Products y [M, N] = a [M, K] b [K, N] of float matrices, of which each lies by rows or by columns:
// those of a linear layer and of its gradients.
//
// Rows of a are LaneRows. Columns of b meet them: as they lie, or a chunk of them transposed first.
// A stretch of K is done with before the next one, which is added: it bounds the memory, and an
// element of y is a sum of its row of a and its column of b alone, whatever lies how.
#include <atomic>
#include <vector>

#include "call.h"
#include "lane_rows.h"
#include "threads.h"

namespace th::matrix_product {

TH_CALL(Call,
  const float *a, *b;
  float* y;
  int64_t M, N, K, lda, ldb, ldy;      // lda: from one row, or column, of a to the next
  int64_t a_by_columns, b_by_columns;  // those are dense, not rows
  int64_t adds;                        // to y
  int64_t num_threads;
);

constexpr int64_t STRETCH = 2048;   // of K
constexpr int64_t MAX_ROWS = 2048;  // of a, packed at a time
constexpr int64_t MAX_CHUNK = 384, MIN_CHUNK = 96, CHUNKS_PER_THREAD = 8;  // columns of b
constexpr int VECTORS = 4;  // of a, packed together from columns: whole lines

// Writes a block of up to 16 x 16 elements of b, from its rows, as rows that are `ld` floats apart.
template <bool WHOLE>
TH_INLINE void transpose_block(const float* b, int64_t ldb, int width, int rows, float* to,
                               int64_t ld) {
  f32x16 x[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    x[i] = WHOLE ? load(b + i * ldb) : i < rows ? load(b + i * ldb, width) : f32x16{};
  transpose16(x);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (WHOLE)
      store(to + i * ld, x[i]);
    else if (i < width)
      store(to + i * ld, x[i], rows);
}

// The same of `count` columns of b, `depth` rows of it.
TH_NOINLINE void transpose_columns(const float* b, int64_t ldb, int64_t count, int64_t depth,
                                   float* to, int64_t ld) {
  for (int64_t k = 0; k < depth; k += LANES)
    for (int64_t n = 0; n < count; n += LANES) {
      const int width = int(std::min<int64_t>(LANES, count - n));
      const int rows = int(std::min<int64_t>(LANES, depth - k));
      const float* from = b + k * ldb + n;
      if (width == LANES && rows == LANES)
        transpose_block<true>(from, ldb, width, rows, to + n * ld + k, ld);
      else
        transpose_block<false>(from, ldb, width, rows, to + n * ld + k, ld);
    }
}

// Rows [m, m + a.rows()) of y, of the stretch of K from k on.
void multiply(const Call& call, int64_t m, int64_t k, LaneRows<float>& a) {
  const int64_t depth = a.depth();
  const int64_t share = call.N / (call.num_threads * CHUNKS_PER_THREAD) / MIN_CHUNK * MIN_CHUNK;
  const int64_t chunk = std::min(std::max(share, MIN_CHUNK), MAX_CHUNK);
  std::atomic<int64_t> packed{0}, taken{0};
#pragma omp parallel num_threads(threads_for(call.N* depth * a.rows() / 2, call.num_threads))
  {
    for (int v; (v = int(packed.fetch_add(VECTORS))) < a.vectors();) {
      const int last = std::min(v + VECTORS, a.vectors());
      if (call.a_by_columns)
        a.pack_columns(v, last, call.a + k * call.lda + m, call.lda);
      else
        for (; v < last; ++v)
          a.pack(v, [&](int64_t i) { return call.a + (m + i) * call.lda + k; });
    }
#pragma omp barrier
    static thread_local std::vector<float> transposed;
    static thread_local LaneProduct<float> product;
    for (int64_t n; (n = taken.fetch_add(chunk)) < call.N;) {
      const int64_t count = std::min(chunk, call.N - n);
      const float* columns = call.b + n * call.ldb + k;
      int64_t ld = call.ldb;
      if (!call.b_by_columns) {
        ld = depth + LANES;  // rows whose lines do not share the places of one in a cache
        transposed.resize(count * ld);
        transpose_columns(call.b + k * call.ldb + n, call.ldb, count, depth, transposed.data(), ld);
        columns = transposed.data();
      }
      product.run(a, 0, a.vectors(), columns, ld, count, call.y + m * call.ldy + n, call.ldy,
                  k > 0 || call.adds);
    }
  }
}

}  // namespace th::matrix_product

TH_EXPORT_CALL(matrix_product, th::matrix_product::Call) {
  using namespace th::matrix_product;
  static thread_local th::LaneRows<float> a;
  for (int64_t k = 0; k < call->K; k += STRETCH)
    for (int64_t m = 0; m < call->M; m += MAX_ROWS) {
      a.resize(std::min(MAX_ROWS, call->M - m), std::min(STRETCH, call->K - k));
      multiply(*call, m, k, a);
    }
  return true;
}
