// Rows of the pool as bytes, whatever their dtype: new ones written, and a selection gathered.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace th {

struct Pool {
  char* rows;
  int64_t row_bytes, page_size, num_slots;

  char* row(int64_t slot) const { return rows + slot * row_bytes; }
  bool holds(int64_t slot) const { return slot >= page_size && slot < num_slots; }  // not null
};

// The parts of new rows; strides in bytes. Mirrored in _cpu.py.
struct NewRows {
  const char *latent, *k_rope;
  int64_t latent_stride, latent_bytes, k_rope_stride, k_rope_bytes;

  void write(int64_t token, char* to) const {
    std::memcpy(to, latent + token * latent_stride, latent_bytes);
    std::memcpy(to + latent_bytes, k_rope + token * k_rope_stride, k_rope_bytes);
  }
};

// Writes `count` rows, of which there are slots for `limit`.
inline bool store_rows(const NewRows& rows, const Pool& pool, const int32_t* slots, int64_t count,
                       int64_t limit, int num_threads) {
  if (count < 0 || count > limit) return false;
  for (int64_t t = 0; t < count; ++t)
    if (!pool.holds(slots[t])) return false;
#pragma omp parallel for num_threads(num_threads)
  for (int64_t t = 0; t < count; ++t) rows.write(t, pool.row(slots[t]));
  return true;
}

// Slot 0 stands for zeros.
inline bool gather_rows(const Pool& pool, const int32_t* slots, int64_t count, char* out,
                        int num_threads) {
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] != 0 && !pool.holds(slots[i])) return false;
#pragma omp parallel for num_threads(num_threads)
  for (int64_t i = 0; i < count; ++i) {
    char* to = out + i * pool.row_bytes;
    if (slots[i] == 0)
      std::memset(to, 0, pool.row_bytes);
    else
      std::memcpy(to, pool.row(slots[i]), pool.row_bytes);
  }
  return true;
}

}  // namespace th
