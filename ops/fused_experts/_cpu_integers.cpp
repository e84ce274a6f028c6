// The experts of a mixture, with weights that are integers or FP4: see README.md.
#include "experts.h"

namespace {

template <typename T>
void run(const experts::Call& call) {
  switch (call.format) {
    case th::INT8: return experts::Experts<T, th::Integers<th::Int8>>(call).run();
    case th::INT4: return experts::Experts<T, th::Integers<th::Int4>>(call).run();
    default: call.down_group == 32 ? experts::Experts<T, th::Integers<th::Fp4<32>>>(call).run()
                                   : experts::Experts<T, th::Integers<th::Fp4<16>>>(call).run();
  }
}

}  // namespace

TH_EXPORT_CALL(experts_of_integers, experts::Call) {
  if (!experts::ids_are_valid(*call)) return false;
  call->is_bf16 ? run<th::bf16>(*call) : run<float>(*call);
  return true;
}
