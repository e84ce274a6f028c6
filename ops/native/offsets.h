// Places of packed sequences among tokens.
#pragma once

#include <cstdint>

namespace th {

// Whether sequences lie one after the other within the tokens of a call; the launcher says where not.
template <typename Call>
bool offsets_are_valid(const Call& call) {
  if (call.cu_seqlens[0] != 0 || call.cu_seqlens[call.num_seqs] > call.num_tokens) return false;
  for (int64_t n = 0; n < call.num_seqs; ++n)
    if (call.cu_seqlens[n + 1] < call.cu_seqlens[n]) return false;
  return true;
}

}  // namespace th
