// Gated RMS norms on a CPU. A thread takes a group of a row after another: one pass finds its size,
// and backwards its share of the gradient, another writes, when the group is still in the cache.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "call.h"
#include "simd.h"
#include "threads.h"

namespace {

using namespace th;

// Shares of the rows, each with sums of its own for the weights, whatever the number of threads.
constexpr int64_t SHARES = 64;

TH_CALL(Forward,
  const void *x, *gate;  // [T, D]
  const float* weight;   // [D]
  void* out;             // [T, D], contiguous
  int64_t num_tokens, width, group_size, x_stride, gate_stride;
  int64_t silu, gates_first, is_bf16, num_threads;
  double eps;
);

TH_CALL(Backward,
  const void *x, *gate;
  const float* weight;
  const void* dout;   // [T, D]
  void *dx, *dgate;   // [T, D], contiguous
  float* dweight;     // [D]
  int64_t num_tokens, width, group_size, x_stride, gate_stride, dout_stride;
  int64_t silu, gates_first, is_bf16, num_threads;
  double eps;
);

template <typename T_, bool FIRST_, bool SILU>
struct Form {
  using T = T_;
  static constexpr bool FIRST = FIRST_;

  static TH_INLINE f32x16 gate(f32x16 x) { return SILU ? silu(x) : sigmoid(x); }
  static TH_INLINE f32x16 slope(f32x16 x) {
    const f32x16 s = sigmoid(x), rest = 1.0f - s;
    return s * (SILU ? 1.0f + x * rest : rest);
  }
};

template <typename Call>
int threads_of(const Call& call) {
  return threads_for(call.num_tokens * call.width * 4, call.num_threads);
}

template <typename Call>
float inverse_size(const Call& call, float squares) {
  return 1.0f / std::sqrt(squares / float(call.group_size) + float(call.eps));
}

template <typename F>
void normalise(const Forward& call, int64_t row, int64_t first) {
  using T = typename F::T;
  const T* x = (const T*)call.x + row * call.x_stride + first;
  const T* gate = (const T*)call.gate + row * call.gate_stride + first;
  T* out = (T*)call.out + row * call.width + first;
  f32x16 squares{};
  for_lanes(call.group_size, [&](int64_t c, int n) TH_LAMBDA {
    f32x16 u = load(x + c, n);
    if (F::FIRST) u *= F::gate(load(gate + c, n));
    squares = fma(u, u, squares);
  });
  const float inverse = inverse_size(call, sum(squares));
  for_lanes(call.group_size, [&](int64_t c, int n) TH_LAMBDA {
    const f32x16 gated = load(x + c, n) * F::gate(load(gate + c, n));
    store(out + c, gated * (load(call.weight + first + c, n) * inverse), n);
  });
}

// Gradients of a group: with u the rows that are normalised and r the inverse of their size,
// du = r (dn - u r^2 mean(dn u)).
template <typename F>
void differentiate(const Backward& call, int64_t row, int64_t first, float* sums) {
  using T = typename F::T;
  const T* x = (const T*)call.x + row * call.x_stride + first;
  const T* gate = (const T*)call.gate + row * call.gate_stride + first;
  const T* dout = (const T*)call.dout + row * call.dout_stride + first;
  T* dx = (T*)call.dx + row * call.width + first;
  T* dgate = (T*)call.dgate + row * call.width + first;
  const float* weight = call.weight + first;
  f32x16 squares{}, along{};
  for_lanes(call.group_size, [&](int64_t c, int n) TH_LAMBDA {
    const f32x16 gated = load(x + c, n) * F::gate(load(gate + c, n));
    const f32x16 u = F::FIRST ? gated : load(x + c, n);
    squares = fma(u, u, squares);
    along = fma(load(dout + c, n) * load(weight + c, n), gated, along);
  });
  const float r = inverse_size(call, sum(squares));
  const float back = r * r * sum(along) / float(call.group_size);
  for_lanes(call.group_size, [&](int64_t c, int n) TH_LAMBDA {
    const f32x16 g = load(gate + c, n), act = F::gate(g), slope = F::slope(g);
    const f32x16 rows = load(x + c, n), grad = load(dout + c, n) * r;
    const f32x16 by_weight = grad * load(weight + c, n);
    if (F::FIRST) {
      const f32x16 u = rows * act, du = by_weight - u * (back * r);
      store(dx + c, du * act, n);
      store(dgate + c, du * rows * slope, n);
      store(sums + c, fma(grad, u, load(sums + c, n)), n);
    } else {
      store(dx + c, by_weight * act - rows * (back * r), n);
      store(dgate + c, by_weight * rows * slope, n);
      store(sums + c, fma(grad, rows * act, load(sums + c, n)), n);
    }
  });
}

template <typename F>
void forward(const Forward& call) {
#pragma omp parallel for schedule(static) num_threads(threads_of(call))
  for (int64_t row = 0; row < call.num_tokens; ++row)
    for (int64_t first = 0; first < call.width; first += call.group_size)
      normalise<F>(call, row, first);
}

template <typename F>
void backward(const Backward& call) {
  std::vector<float> sums(SHARES * call.width);
#pragma omp parallel for schedule(static) num_threads(threads_of(call))
  for (int64_t share = 0; share < SHARES; ++share) {
    const int64_t end = (share + 1) * call.num_tokens / SHARES;
    for (int64_t row = share * call.num_tokens / SHARES; row < end; ++row)
      for (int64_t first = 0; first < call.width; first += call.group_size)
        differentiate<F>(call, row, first, sums.data() + share * call.width + first);
  }
  for_lanes(call.width, [&](int64_t c, int n) TH_LAMBDA {
    f32x16 total{};
    for (int64_t share = 0; share < SHARES; ++share)
      total += load(sums.data() + share * call.width + c, n);
    store(call.dweight + c, total, n);
  });
}

// Calls run with the form of a call.
template <typename Call, typename Run>
void by_form(const Call& call, Run run) {
  const auto with = [&](auto dtype, auto first) {
    using T = decltype(dtype);
    call.silu ? run(Form<T, first, true>{}) : run(Form<T, first, false>{});
  };
  const auto of = [&](auto dtype) {
    call.gates_first ? with(dtype, std::true_type{}) : with(dtype, std::false_type{});
  };
  call.is_bf16 ? of(bf16{}) : of(float{});
}

}  // namespace

TH_EXPORT_CALL(gated_norm_forward, Forward) {
  by_form(*call, [&](auto form) { forward<decltype(form)>(*call); });
  return true;
}

TH_EXPORT_CALL(gated_norm_backward, Backward) {
  by_form(*call, [&](auto form) { backward<decltype(form)>(*call); });
  return true;
}
