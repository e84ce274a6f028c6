// A product with any number of rows, one thread: of few as skinny.h does it, of more as lane_rows.h.
//
//   few_rows<T>()                    up to which number rows are few
//   with_lane_product<T>(body)       body(product), with this thread's LaneProduct, the best there is
//   Rows<T, W> x;                    keep one per thread: its memory is reused
//   x.pack(M, K, row, as_many)       row(i) is a pointer to row i; as_many: by lane_rows.h, however
//                                    few they are, so that a row has the bits that it has alone
//   x.multiply(weight, first, N, y, ldy, reading)
//                                    y[m * ldy + n] = x W^T for rows [first, first + N) of the
//                                    weight, in float
//
// W says how the weight is stored: Weights<T> of block_fp8.h, Integers<Q> of integers.h.
#pragma once

#include "block_fp8.h"
#include "integers.h"
#include "lane_rows.h"
#include "skinny.h"

namespace th {

template <typename T>
bool uses_amx() {
  return HAS_AMX && sizeof(T) == sizeof(bf16) && amx_allowed();
}

// Measured, see ops/linear/README.md.
template <typename T>
int few_rows() {
  return uses_amx<T>() ? 4 : MAX_FEW_ROWS;
}

template <typename T, typename Body>
void with_lane_product(const Body& body) {
  if constexpr (HAS_AMX && sizeof(T) == sizeof(bf16))
    if (uses_amx<T>()) {
      static thread_local LaneProduct<T, true> product;
      return body(product);
    }
  static thread_local LaneProduct<T> product;
  body(product);
}

// How rows of x, of T, meet weights W: fp8's are widened to T, integers in registers by few rows.
template <typename T, typename W>
struct Meeting;

template <typename T>
struct Meeting<T, Weights<T>> {
  using Pieces = th::Pieces<T>;

  class Few {
   public:
    template <typename Row>
    void pack(int M, int64_t K, const Row& row) {
      x_.pack(M, K, row);
    }
    void multiply(const Weights<T>& W, int64_t first, int64_t N, float* y, int64_t ldy,
                  Reading reading) {
      pieces_.each(W, first, N, x_.rows(), [&](const T* rows, int64_t at, int64_t count) {
        multiply_rows(x_, rows, W.K, count, y + at, ldy, reading);
      });
    }

   private:
    PackedRows<T> x_;
    Pieces pieces_;
  };

  static bool is_few(int64_t M) { return M <= few_rows<T>(); }
};

template <typename T, typename Q>
struct Meeting<T, Integers<Q>> {
  using Pieces = IntegerPieces<Q, std::conditional_t<Units<T>::PAIRS, T, float>>;

  class Few {
   public:
    template <typename Row>
    void pack(int M, int64_t K, const Row& row) {
      x_.pack(M, K, row);
    }
    void multiply(const Integers<Q>& W, int64_t first, int64_t N, float* y, int64_t ldy, Reading) {
      x_.multiply(W, first, N, y, ldy);
    }

   private:
    IntegerRows<Q> x_;
  };

  // Where pairs of bf16 are multiplied, floats are worth their memory for the fewest alone.
  static bool is_few(int64_t M) { return M <= (Units<T>::PAIRS ? 4 : MAX_FEW_ROWS); }
};

template <typename T, typename W>
class Rows {
 public:
  template <typename Row>
  void pack(int M, int64_t K, const Row& row, bool as_many = false) {
    is_few_ = !as_many && Meeting<T, W>::is_few(M);
    if (is_few_) return few_.pack(M, K, row);
    many_.resize(M, K, as_many);
    for (int v = 0; v < many_.vectors(); ++v) many_.pack(v, row);
  }

  TH_NOINLINE void multiply(const W& weight, int64_t first, int64_t N, float* y, int64_t ldy,
                            Reading reading) {
    if (is_few_) return few_.multiply(weight, first, N, y, ldy, reading);
    with_lane_product<T>([&](auto& product) {
      pieces_.each(weight, first, N, many_.rows(), [&](const auto* rows, int64_t at, int64_t count) {
        product.run(many_, 0, many_.vectors(), rows, weight.K, count, y + at, ldy);
      });
    });
  }

 private:
  bool is_few_ = true;
  typename Meeting<T, W>::Few few_;
  typename Meeting<T, W>::Pieces pieces_;
  LaneRows<T> many_;
};

// As ops/formats/stored_weights.py counts them.
enum Format : int64_t { IN_DTYPE_OF_X, FP8, INT8, INT4, FP4 };

}  // namespace th
