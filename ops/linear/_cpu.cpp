// Sibling linears of one input, and the experts of a mixture, with weights of their input's dtype or of
// 8-bit floats: one library, since both are made of the same products. See both READMEs.
#include "experts.h"
#include "products.h"

TH_EXPORT_CALL_OF_ROWS(linear, products::Call, products::Group) {
  const auto* groups = th::rows_of<products::Group>(*call);
  call->is_bf16 ? products::multiply<th::bf16, th::Weights<th::bf16>>(*call, groups)
                : products::multiply<float, th::Weights<float>>(*call, groups);
  return true;
}

TH_EXPORT_CALL(fused_experts, experts::Call) {
  using namespace experts;
  if (!ids_are_valid(*call)) return false;
  call->is_bf16 ? Experts<th::bf16, th::Weights<th::bf16>>(*call).run()
                : Experts<float, th::Weights<float>>(*call).run();
  return true;
}
