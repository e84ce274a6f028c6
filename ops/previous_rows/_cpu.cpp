// The row before each token's, on a CPU: rows are copied as bytes.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "recurrent_call.h"

namespace previous {

TH_CALL(Call,
  const char* x;
  const int64_t* tokens;
  char* kept;
  int64_t* kept_tokens;
  const int32_t *cu_seqlens, *seq_lens, *initial_indices, *state_indices;
  char* out;
  int64_t num_tokens, num_seqs, num_slots, num_kept, row_bytes, num_threads;
);

// From how many bytes on several threads copy.
constexpr int64_t MANY_BYTES = 1 << 18;

// One sequence of a call; place(i) keeps its new token i, and place(-1) the one before those.
struct Sequence {
  const Call& call;
  int64_t first, end, past, initial, slot;

  Sequence(const Call& call, int64_t n)
      : call(call),
        first(call.cu_seqlens[n]),
        end(call.cu_seqlens[n + 1]),
        past(call.seq_lens[n] - (end - first)),
        initial(call.initial_indices[n]),
        slot(call.state_indices[n]) {}

  bool goes_on() const { return initial > 0 && past > 0; }
  int64_t place(int64_t at, int64_t i) const { return at * call.num_kept + (past + i) % call.num_kept; }
  char* row(int64_t place) const { return call.kept + place * call.row_bytes; }

  void put_before() const {
    if (first == end) return;
    char* out = call.out + first * call.row_bytes;
    if (goes_on())
      std::memcpy(out, row(place(initial, -1)), call.row_bytes);
    else
      std::memset(out, 0, call.row_bytes);
  }

  void keep() const {
    if (slot == 0) return;
    if (goes_on() && initial != slot) {
      std::memcpy(row(place(slot, -1)), row(place(initial, -1)), call.row_bytes);
      call.kept_tokens[place(slot, -1)] = call.kept_tokens[place(initial, -1)];
    }
    for (int64_t t = std::max(first, end - call.num_kept); t < end; ++t) {
      std::memcpy(row(place(slot, t - first)), call.x + t * call.row_bytes, call.row_bytes);
      call.kept_tokens[place(slot, t - first)] = call.tokens[t];
    }
  }
};

bool lengths_are_valid(const Call& call) {
  for (int64_t n = 0; n < call.num_seqs; ++n)
    if (Sequence(call, n).past < 0) return false;
  return true;
}

}  // namespace previous

TH_EXPORT_CALL(previous_rows, previous::Call) {
  if (!th::indices_are_valid(*call) || !previous::lengths_are_valid(*call)) return false;
  const int64_t row = call->row_bytes, end = call->cu_seqlens[call->num_seqs];
#pragma omp parallel for schedule(static) num_threads(int(call->num_threads)) \
    if (end * row > previous::MANY_BYTES)
  for (int64_t t = 1; t < end; ++t) std::memcpy(call->out + t * row, call->x + (t - 1) * row, row);
  std::fill_n(call->out + end * row, (call->num_tokens - end) * row, 0);
  // The slot of one sequence is no other's, so what one reads is written by none before it.
  for (int64_t n = 0; n < call->num_seqs; ++n) {
    const previous::Sequence sequence(*call, n);
    sequence.put_before();
    sequence.keep();
  }
  return true;
}
