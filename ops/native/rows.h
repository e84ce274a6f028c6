// A product with any number of rows, one thread: of few as skinny.h does it, of more as lane_rows.h.
//
//   few_rows<T>()                    up to which number rows are few
//   with_lane_product<T>(body)       body(product), with this thread's LaneProduct, the best there is
//   Rows<T> x;                       keep one per thread: its memory is reused
//   x.pack(M, K, row)                row(i) is a pointer to row i
//   x.multiply(W, ldw, N, y, ldy, reading)  y[m * ldy + n] = x W^T, in float
#pragma once

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
  return uses_amx<T>() ? 8 : 16;
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

template <typename T>
class Rows {
 public:
  template <typename Row>
  void pack(int M, int64_t K, const Row& row) {
    is_few_ = M <= few_rows<T>();
    if (is_few_) return few_.pack(M, K, row);
    many_.resize(M, K);
    for (int v = 0; v < many_.vectors(); ++v) many_.pack(v, row);
  }

  void multiply(const T* W, int64_t ldw, int64_t N, float* y, int64_t ldy, Reading reading) {
    if (is_few_) return multiply_rows(few_, W, ldw, N, y, ldy, reading);
    with_lane_product<T>(
        [&](auto& product) { product.run(many_, 0, many_.vectors(), W, ldw, N, y, ldy); });
  }

 private:
  bool is_few_ = true;
  PackedRows<T> few_;
  LaneRows<T> many_;
};

}  // namespace th
