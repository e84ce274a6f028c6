// How weights come from memory.
#pragma once

#include <cstdint>

#include "simd.h"

namespace th {

constexpr int64_t LINE_BYTES = 64;

// What is the fastest on this machine, as forms.py measured it. No result depends on it.
struct Reading {
  int64_t streams;   // of a weight that one or two rows of x meet: 1 (its rows in turn), 4 or 8
  bool by_hardware;  // for 5 to 16 rows, its prefetchers run ahead; else the kernel fetches all lines
};

// Rows that are used next, of which each step fetches some lines.
struct NextRows {
  const char* first;
  int64_t row_bytes;
  int rows;

  // The lines at this byte of the rows. A line that is on its way holds one of the ten to sixteen
  // places that a core has: so it is asked for once, and not all of a row at a time.
  TH_INLINE void fetch(int64_t byte) const {
    for (int r = 0; r < rows; ++r) __builtin_prefetch(first + r * row_bytes + byte, 0, 2);
  }
};

}  // namespace th
