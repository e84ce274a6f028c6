// The recurrent form: one pass, in address order, over a few rows of a state per token.
#pragma once

#include <algorithm>
#include <cmath>

#include "scalar_decay.h"
#include "ssd_call.h"

namespace th::ssd {

// All tokens of one sequence on head h, for a few rows of its state, which they advance, after the
// other.
template <typename T>
void run_recurrent(const Sequence<T>& seq, int64_t h, float* state) {
  const Call& call = seq.call;
  const int64_t k_dim = call.k_dim, v_dim = call.v_dim, i = seq.key_head(h);
  const auto step = th::scalar_decay::choose_step<T>(k_dim);
  for (int64_t r = 0; r < v_dim; r += LANES)
    for (int64_t t = 0; t < seq.length; ++t) {
      const th::scalar_decay::Token<T> token{seq.q(t, i),  seq.k(t, i), seq.v(t, h) + r,   std::exp(seq.g(t, h)),
                           seq.dt(t, h), seq.D(h),    float(call.scale), seq.out(t, h) + r};
      step(token, k_dim, std::min<int64_t>(LANES, v_dim - r), 1, state + r * k_dim);
    }
}

}  // namespace th::ssd
