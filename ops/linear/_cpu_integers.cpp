// Sibling linears of one input, with weights that are integers or FP4: see README.md.
#include "products.h"

namespace {

template <typename T>
void multiply(const products::Call& call, const products::Group* groups) {
  switch (call.format) {
    case th::INT8: return products::multiply<T, th::Integers<th::Int8>>(call, groups);
    case th::INT4: return products::multiply<T, th::Integers<th::Int4>>(call, groups);
    default: groups[0].group == 32 ? products::multiply<T, th::Integers<th::Fp4<32>>>(call, groups)
                                   : products::multiply<T, th::Integers<th::Fp4<16>>>(call, groups);
  }
}

}  // namespace

TH_EXPORT_CALL_OF_ROWS(linear_of_integers, products::Call, products::Group) {
  const auto* groups = th::rows_of<products::Group>(*call);
  call->is_bf16 ? multiply<th::bf16>(*call, groups) : multiply<float>(*call, groups);
  return true;
}
