// The row before each token's, on a CPU: rows are copied as bytes.
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.h"
#include "recurrent_call.h"

namespace previous {

TH_CALL(Call,
  const char* x;
  char *last, *records;  // records may be null
  const int32_t *cu_seqlens, *initial_indices, *state_indices, *accepted;  // accepted may be null
  char* out;
  int64_t num_tokens, num_seqs, num_slots, num_records, row_bytes, num_threads;
);

// From how many bytes on several threads copy.
constexpr int64_t MANY_BYTES = 1 << 18;

bool counts_are_valid(const Call& call) {
  if (!call.accepted) return true;
  for (int64_t n = 0; n < call.num_seqs; ++n) {
    const int64_t count = call.accepted[n], most = call.num_records;
    if (count < 0 || count > most || (count > 0 && call.initial_indices[n] == 0)) return false;
    if (call.cu_seqlens[n + 1] - call.cu_seqlens[n] > most + 1) return false;
  }
  return true;
}

// What sequence n goes on from; null: from zeros.
const char* before(const Call& call, int64_t n) {
  const int64_t slot = call.initial_indices[n], count = call.accepted ? call.accepted[n] : 0;
  if (slot == 0) return nullptr;
  if (count == 0) return call.last + slot * call.row_bytes;
  return call.records + (slot * call.num_records + count - 1) * call.row_bytes;
}

// The slot of one sequence is no other's, so each is stored when its own first row was taken.
void store(const Call& call, int64_t n) {
  const int64_t first = call.cu_seqlens[n], end = call.cu_seqlens[n + 1], row = call.row_bytes;
  const int64_t slot = call.state_indices[n];
  if (slot == 0) return;
  char* last = call.last + slot * row;
  if (!call.accepted) {
    if (end > first) std::memcpy(last, call.x + (end - 1) * row, row);
    return;
  }
  if (end > first)
    std::memcpy(last, call.x + first * row, row);
  else if (call.accepted[n] > 0)
    std::memcpy(last, before(call, n), row);
  if (end > first + 1)
    std::memcpy(call.records + slot * call.num_records * row, call.x + (first + 1) * row,
                (end - first - 1) * row);
}

}  // namespace previous

TH_EXPORT_CALL(previous_rows, previous::Call) {
  if (!th::indices_are_valid(*call) || !previous::counts_are_valid(*call)) return false;
  const int64_t row = call->row_bytes, end = call->cu_seqlens[call->num_seqs];
#pragma omp parallel for schedule(static) num_threads(int(call->num_threads)) \
    if (end * row > previous::MANY_BYTES)
  for (int64_t t = 1; t < end; ++t) std::memcpy(call->out + t * row, call->x + (t - 1) * row, row);
  std::memset(call->out + end * row, 0, (call->num_tokens - end) * row);
  for (int64_t n = 0; n < call->num_seqs; ++n) {
    const int64_t first = call->cu_seqlens[n];
    if (first == call->cu_seqlens[n + 1]) continue;
    if (const char* found = previous::before(*call, n))
      std::memcpy(call->out + first * row, found, row);
    else
      std::memset(call->out + first * row, 0, row);
  }
  for (int64_t n = 0; n < call->num_seqs; ++n) previous::store(*call, n);
  return true;
}
