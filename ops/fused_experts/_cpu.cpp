// The experts of a mixture, with weights of their input's dtype or of 8-bit floats: see README.md.
#include "experts.h"

TH_EXPORT_CALL(fused_experts, experts::Call) {
  using namespace experts;
  if (!ids_are_valid(*call)) return false;
  call->is_bf16 ? Experts<th::bf16, th::Weights<th::bf16>>(*call).run()
                : Experts<float, th::Weights<float>>(*call).run();
  return true;
}
