// Reads a buffer as fast as the memory gives it: what "read bandwidth" means in the floors.
#include <cstdint>
#include <cstring>

typedef float f32x16 __attribute__((vector_size(64)));
constexpr int64_t STREAMS = 4;  // per thread: more than one page stream keeps the prefetchers busy

extern "C" __attribute__((visibility("default"))) float th_read(
    const float *x, int64_t num_floats, int64_t num_threads) {
  const int64_t stream = num_floats / 16 / STREAMS / num_threads;  // vectors of one stream
  float total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total)
  for (int64_t thread = 0; thread < num_threads; ++thread) {
    const float *first = x + thread * STREAMS * stream * 16;
    f32x16 sums[STREAMS] = {};
    for (int64_t i = 0; i < stream; ++i)
      for (int64_t s = 0; s < STREAMS; ++s) {
        f32x16 value;
        std::memcpy(&value, first + (s * stream + i) * 16, sizeof value);
        sums[s] += value;
      }
    for (int64_t s = 0; s < STREAMS; ++s)
      for (int lane = 0; lane < 16; ++lane) total += sums[s][lane];
  }
  return total;
}
