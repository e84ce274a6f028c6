// Sibling linears of one input, with weights of its dtype or of 8-bit floats: see README.md.
#include "products.h"

TH_EXPORT_CALL_OF_ROWS(linear, products::Call, products::Group) {
  const auto* groups = th::rows_of<products::Group>(*call);
  call->is_bf16 ? products::multiply<th::bf16, th::Weights<th::bf16>>(*call, groups)
                : products::multiply<float, th::Weights<float>>(*call, groups);
  return true;
}
