// Linears and experts, as in _cpu.cpp, with weights that are integers or FP4.
#include "experts.h"
#include "products.h"

namespace {

// body(W{}): how the call's weights are stored; `group` of a scale tells kinds of FP4 apart.
template <typename Body>
void with_format(int64_t format, int64_t group, const Body& body) {
  switch (format) {
    case th::INT8: return body(th::Integers<th::Int8>{});
    case th::INT4: return body(th::Integers<th::Int4>{});
    default: group == 32 ? body(th::Integers<th::Fp4<32>>{}) : body(th::Integers<th::Fp4<16>>{});
  }
}

}  // namespace

TH_EXPORT_CALL_OF_ROWS(linear_of_integers, products::Call, products::Group) {
  const auto* groups = th::rows_of<products::Group>(*call);
  with_format(call->format, groups[0].group, [&](auto stored) {
    using W = decltype(stored);
    call->is_bf16 ? products::multiply<th::bf16, W>(*call, groups)
                  : products::multiply<float, W>(*call, groups);
  });
  return true;
}

TH_EXPORT_CALL(experts_of_integers, experts::Call) {
  using namespace experts;
  if (!ids_are_valid(*call)) return false;
  with_format(call->format, call->down_group, [&](auto stored) {
    using W = decltype(stored);
    call->is_bf16 ? Experts<th::bf16, W>(*call).run() : Experts<float, W>(*call).run();
  });
  return true;
}
