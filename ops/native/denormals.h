// Denormal numbers are zeros in this thread as long as one of these lives. Some processors take a
// hundred times as long for an operation with one as for another, and decays that are multiplied
// pass through them on their way to zero.
#pragma once

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace th {

class DenormalsAreZero {
 public:
#ifdef __SSE__
  DenormalsAreZero() : kept_(_mm_getcsr()) { _mm_setcsr(kept_ | RESULTS | OPERANDS); }
  ~DenormalsAreZero() { _mm_setcsr(kept_); }
#else
  DenormalsAreZero() {}
#endif
  DenormalsAreZero(const DenormalsAreZero&) = delete;

 private:
#ifdef __SSE__
  static constexpr unsigned RESULTS = 0x8000, OPERANDS = 0x40;
  unsigned kept_;
#endif
};

}  // namespace th
