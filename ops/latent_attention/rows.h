// Rows of the pool as bytes, whatever their dtype: new ones written, and a selection gathered.
#pragma once

#include <cstdint>
#include <cstring>

#include "call.h"

namespace th {

// [latent | k_rope] to the slot of each token; strides in bytes.
TH_CALL(StoreCall,
  const char *latent, *k_rope;
  char* pool;
  const int32_t *slot_mapping, *cu_seqlens;
  int64_t row_bytes, page_size, num_slots;
  int64_t latent_stride, latent_bytes, k_rope_stride, k_rope_bytes;
  int64_t max_tokens, num_seqs, num_threads;
);

// A row of the pool, or zeros for slot 0, to each row of `out`.
TH_CALL(GatherCall,
  const char* pool;
  const int32_t* rows;
  char* out;
  int64_t row_bytes, page_size, num_slots, num_rows, num_threads;
);

// Whether a slot is in the pool, outside its null page.
template <typename Call>
bool holds(const Call& call, int64_t slot) {
  return slot >= call.page_size && slot < call.num_slots;
}

inline bool store_rows(const StoreCall& call) {
  const int64_t num_tokens = call.cu_seqlens[call.num_seqs];
  if (num_tokens < 0 || num_tokens > call.max_tokens) return false;
  for (int64_t t = 0; t < num_tokens; ++t)
    if (!holds(call, call.slot_mapping[t])) return false;
#pragma omp parallel for num_threads(int(call.num_threads))
  for (int64_t t = 0; t < num_tokens; ++t) {
    char* to = call.pool + call.slot_mapping[t] * call.row_bytes;
    std::memcpy(to, call.latent + t * call.latent_stride, call.latent_bytes);
    std::memcpy(to + call.latent_bytes, call.k_rope + t * call.k_rope_stride, call.k_rope_bytes);
  }
  return true;
}

inline bool gather_rows(const GatherCall& call) {
  for (int64_t i = 0; i < call.num_rows; ++i)
    if (call.rows[i] != 0 && !holds(call, call.rows[i])) return false;
#pragma omp parallel for num_threads(int(call.num_threads))
  for (int64_t i = 0; i < call.num_rows; ++i) {
    char* to = call.out + i * call.row_bytes;
    if (call.rows[i] == 0)
      std::memset(to, 0, call.row_bytes);
    else
      std::memcpy(to, call.pool + call.rows[i] * call.row_bytes, call.row_bytes);
  }
  return true;
}

}  // namespace th
