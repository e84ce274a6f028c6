// Multiply-adds in registers that do not wait for one another: what "FMA peak" means in the floors.
#include "amx.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int CHAINS = 24;  // what the registers hold beside the operands
#else
constexpr int CHAINS = 12;
#endif

template <bool PAIRS>
float multiply_adds(int64_t rounds, float a, float b) {
  using th::Register;
  Register sums[CHAINS];
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; ++i) sums[i] = float(i) - Register{};
  const Register x = a - Register{}, y = b - Register{};
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; ++i)
      sums[i] = PAIRS ? th::multiply_add<PAIRS>(x, y, sums[i]) : th::fma(sums[i], x, y);
  float total = 0;
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; ++i) total += th::sum(sums[i]);
  return total;
}

void tiles(int64_t rounds) {
#ifdef TH_AMX
  const th::AmxTiles configured(true);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
#endif
}

}  // namespace

// FLOPs of all threads: of floats (kind 0), pairs of bf16 (1) or tiles of AMX (2). 0 where this CPU
// has none of a kind. `seen` keeps the compiler from leaving out what nobody reads.
extern "C" TH_EXPORT double th_peak(int64_t kind, int64_t rounds, int64_t num_threads,
                                    float* seen) {
#ifndef __AVX512BF16__
  if (kind == 1) return 0;
#endif
  if (kind == 2 && !th::amx_allowed()) return 0;
  float total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total)
  for (int64_t thread = 0; thread < num_threads; ++thread) {
    if (kind == 2)
      tiles(rounds);
    else
      total += kind ? multiply_adds<true>(rounds, seen[0], seen[1])
                    : multiply_adds<false>(rounds, seen[0], seen[1]);
  }
  seen[2] = total;
  const double per_round = kind == 2   ? 4.0 * 2 * 16 * 16 * 32
                           : kind == 1 ? 4.0 * th::REGISTER_LANES * CHAINS
                                       : 2.0 * th::REGISTER_LANES * CHAINS;
  return per_round * double(rounds) * double(num_threads);
}
