// Rows of a table by hashes of n-grams, on a CPU: a thread takes tokens, and copies all rows of one
// after it has named them, so that the memory is asked for all of them at once.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.h"
#include "recurrent_call.h"

namespace ngram {

TH_CALL(Call,
  const int64_t* tokens;
  const char* table;  // [R, row_bytes]
  const int64_t *multipliers, *head_sizes, *head_offsets;
  int64_t* history;  // [S, num_back]
  const int32_t *cu_seqlens, *initial_indices, *state_indices;
  char* out;
  int64_t num_tokens, num_seqs, num_slots, num_rows, row_bytes, num_back, num_heads, eos;
  int64_t num_threads;
);

constexpr int64_t LINE = 64;

struct Sequence {
  const Call& call;
  int64_t start, length, initial, slot;

  Sequence(const Call& call, int64_t n)
      : call(call),
        start(call.cu_seqlens[n]),
        length(call.cu_seqlens[n + 1] - start),
        initial(call.initial_indices[n]),
        slot(call.state_indices[n]) {}

  // At position t of the sequence's new tokens; from -num_back to -1 is what came before.
  int64_t token(int64_t t) const {
    if (t >= 0) return call.tokens[start + t];
    return initial ? call.history[initial * call.num_back + t + call.num_back] : call.eos;
  }
};

void look_up(const Sequence& seq, int64_t t, std::vector<const char*>& rows) {
  const Call& call = seq.call;
  const int64_t per_order = call.num_heads / call.num_back;
  uint64_t hash = uint64_t(seq.token(t)) * uint64_t(call.multipliers[0]);
  bool ended = false;
  for (int64_t back = 1, head = 0; back <= call.num_back; ++back) {
    const int64_t token = seq.token(t - back);
    ended |= token == call.eos;
    hash ^= uint64_t(ended ? call.eos : token) * uint64_t(call.multipliers[back]);
    for (; head < back * per_order; ++head) {
      const int64_t size = call.head_sizes[head], rest = int64_t(hash) % size;
      const int64_t row = call.head_offsets[head] + (rest < 0 ? rest + size : rest);
      rows[head] = call.table + row * call.row_bytes;
      for (int64_t i = 0; i < call.row_bytes; i += LINE) __builtin_prefetch(rows[head] + i);
    }
  }
  char* out = call.out + (seq.start + t) * call.num_heads * call.row_bytes;
  for (const char* row : rows) std::memcpy(out, row, call.row_bytes), out += call.row_bytes;
}

// Going up, a short sequence shifts the history that is there.
void write_history(const Sequence& seq) {
  int64_t* slot = seq.call.history + seq.slot * seq.call.num_back;
  for (int64_t i = 0; i < seq.call.num_back; ++i)
    slot[i] = seq.token(seq.length - seq.call.num_back + i);
}

bool heads_are_valid(const Call& call) {
  for (int64_t head = 0; head < call.num_heads; ++head) {
    const int64_t size = call.head_sizes[head], first = call.head_offsets[head];
    if (size < 1 || first < 0 || first > call.num_rows - size) return false;
  }
  return true;
}

}  // namespace ngram

TH_EXPORT_CALL(ngram_embedding, ngram::Call) {
  if (!ngram::heads_are_valid(*call) || !th::indices_are_valid(*call)) return false;
  const int32_t* ends = call->cu_seqlens + 1;
#pragma omp parallel num_threads(call->num_threads)
  {
    std::vector<const char*> rows(call->num_heads);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < call->num_tokens; ++t) {
      const int64_t n = std::upper_bound(ends, ends + call->num_seqs, int32_t(t)) - ends;
      if (n == call->num_seqs) {
        const int64_t bytes = call->num_heads * call->row_bytes;
        std::memset(call->out + t * bytes, 0, bytes);
      } else {
        const ngram::Sequence seq(*call, n);
        ngram::look_up(seq, t - seq.start, rows);
      }
    }
#pragma omp for schedule(static)
    for (int64_t n = 0; n < call->num_seqs; ++n) {
      const ngram::Sequence seq(*call, n);
      if (seq.slot != 0 && seq.length > 0) ngram::write_history(seq);
    }
  }
  return true;
}
