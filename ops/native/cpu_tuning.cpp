// One token on many states, on one thread, in a form that the caller names: what cpu_tuning.py
// measures.
#include "call.h"
#include "scalar_decay.h"

namespace {

constexpr int64_t STATE_ROWS = 64, STATE_DEPTH = 128;

TH_CALL(Call,
  float* state;  // [num_heads, 64, 128]
  int64_t num_heads, streams;
);

}  // namespace

// With what leaves them as they are.
TH_EXPORT_CALL(advance, Call) {
  const float zeros[STATE_DEPTH] = {};
  float out[STATE_ROWS];
  const auto step = th::scalar_decay::choose_step<float>(STATE_DEPTH);
  const th::scalar_decay::Token<float> token{zeros, zeros, zeros, 1.0f, 0.0f, 0.0f, 1.0f, out};
  for (int64_t h = 0; h < call->num_heads; ++h)
    step(token, STATE_DEPTH, STATE_ROWS, call->streams, call->state + h * STATE_ROWS * STATE_DEPTH);
  return true;
}
