// The smallest kernel that needs everything a kernel needs: see compiler_missing in build.py.
#include <vector>

#include "gemm.h"
#include "simd.h"

extern "C" TH_EXPORT int th_probe(int num_threads) {
  std::vector<int> alive;
#pragma omp parallel num_threads(num_threads)
#pragma omp critical
  alive.push_back(1);
  return int(alive.size());
}
