// Matrix products of tiles, one thread, float accumulation: for chunks of linear attention and
// tiles of attention, where the operands fit in L1 or L2. T is float or bf16 for each operand.
//
//   gemm_nt(M, N, K, A, lda, B, ldb, C, ldc, keep)   C[M,N] = keep C + A[M,K]   B[N,K]^T
//   gemm_nn(M, N, K, A, lda, B, ldb, C, ldc, keep)   C[M,N] = keep C + A[M,K]   B[K,N]
//   gemm_tn(M, N, K, A, lda, B, ldb, C, ldc, keep)   C[M,N] = keep C + A[K,M]^T B[K,N]
//
// Leading dimensions are row strides in elements; C is float, and not read where keep is 0, as it is
// by default. Any size works, 0 included. C may not overlap A or B. A row of C depends on that row
// of A alone, and the order of additions depends on the shape alone.
//
// How: columns of C are taken 32 at a time (a panel of B, packed when it is transposed, bf16 or
// short), rows 8 at a time: 16 accumulators live in registers, each step of K loads two vectors
// of B and broadcasts eight scalars of A. With smaller registers, four rows of sixteen columns. For M <= 8, gemm_nt takes dot products along K instead,
// since a transposed panel would not be used often enough to pay for itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace th {
namespace detail {

constexpr int TILE_VECTORS = SUMS >= 16 ? 2 : 1, TILE_ROWS = SUMS / TILE_VECTORS;
constexpr int TILE_COLS = TILE_VECTORS * LANES;
constexpr int DEPTH = 256;      // of K: a packed panel is 32 KB
constexpr int BLOCK_ROWS = 64;  // of A: a packed block is 64 KB
constexpr int SKINNY_ROWS = 8;

// An operand seen as X(i, k) = p[i * row + k * col].
template <typename T>
struct Strided {
  const T* p;
  int64_t row, col;
  Strided at(int64_t i, int64_t k) const { return {p + i * row + k * col, row, col}; }
};

template <int R>
using Tile = f32x16[R][TILE_VECTORS];

// sums += A[R, K] B[K, TILE_COLS].
template <int R>
TH_INLINE void add_products(int K, Strided<float> A, const float* B, int64_t ldb, Tile<R>& sums) {
  for (int k = 0; k < K; ++k) {
    f32x16 b[TILE_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECTORS; ++v) b[v] = load(B + k * ldb + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const f32x16 a = splat(A.p[r * A.row + k * A.col]);
#pragma GCC unroll 8
      for (int v = 0; v < TILE_VECTORS; ++v) sums[r][v] = fma(a, b[v], sums[r][v]);
    }
  }
}

// C[R, n] = keep C + A[R, K] B[K, n], n <= TILE_COLS; B has TILE_COLS readable columns.
template <int R>
TH_INLINE void tile(int K, Strided<float> A, const float* B, int64_t ldb, float* C, int64_t ldc,
                    int n, float keep) {
  Tile<R> sums = {};
  add_products<R>(K, A, B, ldb, sums);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECTORS; ++v) {
      const int left = n - v * LANES;
      if (left <= 0) continue;
      float* c = C + r * ldc + v * LANES;
      store(c, keep != 0 ? fma(splat(keep), load(c, left), sums[r][v]) : sums[r][v], left);
    }
}

inline void tiles(int M, int K, Strided<float> A, const float* B, int64_t ldb, float* C,
                  int64_t ldc, int n, float keep) {
  int i = 0;
  for (; i + TILE_ROWS <= M; i += TILE_ROWS)
    tile<TILE_ROWS>(K, A.at(i, 0), B, ldb, C + i * ldc, ldc, n, keep);
  for (; i + 4 <= M; i += 4) tile<4>(K, A.at(i, 0), B, ldb, C + i * ldc, ldc, n, keep);
  for (; i + 2 <= M; i += 2) tile<2>(K, A.at(i, 0), B, ldb, C + i * ldc, ldc, n, keep);
  for (; i < M; ++i) tile<1>(K, A.at(i, 0), B, ldb, C + i * ldc, ldc, n, keep);
}

// panel[k][j] = B(j, k) for n <= TILE_COLS columns of which the rest become 0; K contiguous.
template <typename T>
inline void pack_transposed(int n, int K, const T* B, int64_t ldb, float* panel) {
  for (int j = 0; j < TILE_COLS; j += LANES)
    for (int k = 0; k < K; k += LANES) {
      f32x16 x[LANES];
      for (int i = 0; i < LANES; ++i)
        x[i] = j + i < n ? load(B + (j + i) * ldb + k, K - k) : f32x16{};
      transpose16(x);
      for (int i = 0; i < LANES && k + i < K; ++i) store(panel + (k + i) * TILE_COLS + j, x[i]);
    }
}

// panel[k][j] = B(j, k), columns contiguous.
template <typename T>
inline void pack_straight(int n, int K, const T* B, int64_t ldb, float* panel) {
  for (int k = 0; k < K; ++k)
    for (int j = 0; j < TILE_COLS; j += LANES)
      store(panel + k * TILE_COLS + j, j < n ? load(B + k * ldb + j, n - j) : f32x16{});
}

// block[i][k] = A(i, k) in float, rows K apart.
inline void pack_rows(int M, int K, Strided<bf16> A, float* block) {
  for (int i = 0; i < M; ++i)
    for (int k = 0; k < K; ++k) block[i * K + k] = to_float(A.p[i * A.row + k * A.col]);
}

// C = keep C + A B for one block of rows and one stretch of K; B(j, k) = B.p[j * B.row + k * B.col].
template <typename TB>
inline void block_product(int M, int N, int K, Strided<float> A, Strided<TB> B, float* C,
                          int64_t ldc, float keep) {
  alignas(64) float panel[DEPTH * TILE_COLS];
  for (int j = 0; j < N; j += TILE_COLS) {
    const int n = std::min(TILE_COLS, N - j);
    const Strided<TB> b = B.at(j, 0);
    if constexpr (std::is_same_v<TB, float>)
      if (B.row == 1 && n == TILE_COLS) {
        tiles(M, K, A, b.p, B.col, C + j, ldc, n, keep);
        continue;
      }
    if (B.row == 1)
      pack_straight(n, K, b.p, B.col, panel);
    else
      pack_transposed(n, K, b.p, B.row, panel);
    tiles(M, K, A, panel, TILE_COLS, C + j, ldc, n, keep);
  }
}

template <typename TA, typename TB>
inline void gemm(int M, int N, int K, Strided<TA> A, Strided<TB> B, float* C, int64_t ldc,
                 float keep) {
  if (K == 0 && keep != 1)
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j) C[i * ldc + j] = keep != 0 ? keep * C[i * ldc + j] : 0.0f;
  for (int i = 0; i < M; i += BLOCK_ROWS)
    for (int k = 0; k < K; k += DEPTH) {
      const int m = std::min(BLOCK_ROWS, M - i), depth = std::min(DEPTH, K - k);
      const float kept = k > 0 ? 1.0f : keep;
      if constexpr (std::is_same_v<TA, float>) {
        block_product(m, N, depth, A.at(i, k), B.at(0, k), C + i * ldc, ldc, kept);
      } else {
        alignas(64) float block[BLOCK_ROWS * DEPTH];
        pack_rows(m, depth, A.at(i, k), block);
        block_product(m, N, depth, Strided<float>{block, depth, 1}, B.at(0, k), C + i * ldc, ldc,
                      kept);
      }
    }
}

// C[R, J] = keep C + A[R, K] B[J, K]^T by dot products.
template <int R, int J, typename TA, typename TB>
TH_INLINE void dots(int K, const TA* A, int64_t lda, const TB* B, int64_t ldb, float* C,
                    int64_t ldc, float keep) {
  f32x16 acc[R * J] = {};
  const auto step = [&](int k, int left) __attribute__((always_inline)) {
    f32x16 a[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) a[r] = held(load(A + r * lda + k, left));
#pragma GCC unroll 16
    for (int j = 0; j < J; ++j) {
      const f32x16 b = held(load(B + j * ldb + k, left));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r * J + j] = fma(a[r], b, acc[r * J + j]);
    }
  };
  int k = 0;
  for (; k + LANES <= K; k += LANES) step(k, LANES);
  if (k < K) step(k, K - k);
  float sums[LANES];
  sum_each(acc, sums);
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j)
      C[r * ldc + j] = sums[r * J + j] + (keep != 0 ? keep * C[r * ldc + j] : 0.0f);
}

template <int R, typename TA, typename TB>
inline void dot_rows(int N, int K, const TA* A, int64_t lda, const TB* B, int64_t ldb, float* C,
                     int64_t ldc, float keep) {
  constexpr int J = SUMS / R;
  int j = 0;
  for (; j + J <= N; j += J) dots<R, J>(K, A, lda, B + j * ldb, ldb, C + j, ldc, keep);
  for (; j < N; ++j) dots<R, 1>(K, A, lda, B + j * ldb, ldb, C + j, ldc, keep);
}

template <typename TA, typename TB>
inline void skinny(int M, int N, int K, const TA* A, int64_t lda, const TB* B, int64_t ldb,
                   float* C, int64_t ldc, float keep) {
  int i = 0;
  for (; i + 4 <= M && SUMS >= 16; i += 4)
    dot_rows<4>(N, K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, keep);
  for (; i + 2 <= M; i += 2)
    dot_rows<2>(N, K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, keep);
  for (; i < M; ++i) dot_rows<1>(N, K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, keep);
}

}  // namespace detail

template <typename TA, typename TB>
inline void gemm_nt(int M, int N, int K, const TA* A, int64_t lda, const TB* B, int64_t ldb,
                    float* C, int64_t ldc, float keep = 0) {
  using namespace detail;
  if (M <= SKINNY_ROWS) return skinny(M, N, K, A, lda, B, ldb, C, ldc, keep);
  gemm(M, N, K, Strided<TA>{A, lda, 1}, Strided<TB>{B, ldb, 1}, C, ldc, keep);
}

template <typename TA, typename TB>
inline void gemm_nn(int M, int N, int K, const TA* A, int64_t lda, const TB* B, int64_t ldb,
                    float* C, int64_t ldc, float keep = 0) {
  using namespace detail;
  gemm(M, N, K, Strided<TA>{A, lda, 1}, Strided<TB>{B, 1, ldb}, C, ldc, keep);
}

template <typename TA, typename TB>
inline void gemm_tn(int M, int N, int K, const TA* A, int64_t lda, const TB* B, int64_t ldb,
                    float* C, int64_t ldc, float keep = 0) {
  using namespace detail;
  gemm(M, N, K, Strided<TA>{A, 1, lda}, Strided<TB>{B, 1, ldb}, C, ldc, keep);
}

}  // namespace th
