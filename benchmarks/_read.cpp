// Reads a buffer as fast as the memory gives it: what "read bandwidth" means in the floors.
#include "simd.h"

namespace {

constexpr int SUMS = 8;  // more than one chain of additions: none waits for the one before

// One thread's part, in so many streams that lie far apart.
template <int STREAMS>
float read(const float* x, int64_t num_vectors) {
  constexpr int STEP = SUMS / STREAMS;  // vectors of a stream in one go
  const int64_t stream = num_vectors / STREAMS;
  th::f32x16 sums[SUMS] = {};
  for (int64_t i = 0; i + STEP <= stream; i += STEP)
#pragma GCC unroll 8
    for (int s = 0; s < SUMS; ++s)
      sums[s] += th::load(x + (s / STEP * stream + i + s % STEP) * th::LANES);
  float total = 0;
#pragma GCC unroll 8
  for (int s = 0; s < SUMS; ++s) total += th::sum(sums[s]);
  return total;
}

}  // namespace

// CPUs differ in how many streams they like: 1, 2, 4 or 8.
extern "C" TH_EXPORT float th_read(const float* x, int64_t num_floats, int64_t num_threads,
                                   int64_t num_streams) {
  const int64_t share = num_floats / th::LANES / num_threads;
  float total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total)
  for (int64_t thread = 0; thread < num_threads; ++thread) {
    const float* first = x + thread * share * th::LANES;
    total += num_streams == 8   ? read<8>(first, share)
             : num_streams == 4 ? read<4>(first, share)
             : num_streams == 2 ? read<2>(first, share)
                                : read<1>(first, share);
  }
  return total;
}
