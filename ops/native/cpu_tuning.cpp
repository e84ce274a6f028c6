// One product, or one token on many states, on one thread, in a form that the caller names: what
// cpu_tuning.py measures.
#include "call.h"
#include "rows.h"
#include "scalar_decay.h"

namespace {

TH_CALL(Call,
  const void *x, *W;  // [M, K] and [N, K]
  float* y;           // [M, N]
  int64_t M, K, N, streams, by_hardware, is_bf16;
);

template <typename T>
void multiply(const Call& call) {
  static thread_local th::Rows<T, th::Weights<T>> x;
  const th::Weights<T> W{call.W, nullptr, call.K};
  x.pack(int(call.M), call.K, [&](int64_t i) { return static_cast<const T*>(call.x) + i * call.K; });
  // In stretches, as threads take them: their rows are what streams lie apart.
  const int64_t stretch = call.M <= th::few_rows<T>() ? 128 : 384;
  for (int64_t n = 0; n < call.N; n += stretch)
    x.multiply(W, n, std::min(stretch, call.N - n), call.y + n, call.N,
               {call.streams, call.by_hardware != 0});
}

constexpr int64_t STATE_ROWS = 64, STATE_DEPTH = 128;

TH_CALL(StatesCall,
  float* state;  // [num_heads, 64, 128]
  int64_t num_heads, streams;
);

}  // namespace

TH_EXPORT_CALL(multiply, Call) {
  call->is_bf16 ? multiply<th::bf16>(*call) : multiply<float>(*call);
  return true;
}

// With what leaves them as they are.
TH_EXPORT_CALL(advance, StatesCall) {
  const float zeros[STATE_DEPTH] = {};
  float out[STATE_ROWS];
  const auto step = th::scalar_decay::choose_step<float>(STATE_DEPTH);
  const th::scalar_decay::Token<float> token{zeros, zeros, zeros, 1.0f, 0.0f, 0.0f, 1.0f, out};
  for (int64_t h = 0; h < call->num_heads; ++h)
    step(token, STATE_DEPTH, STATE_ROWS, call->streams, call->state + h * STATE_ROWS * STATE_DEPTH);
  return true;
}
