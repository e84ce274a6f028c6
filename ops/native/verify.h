// How kernels of steps of several tokens find their way. Where drafts are verified, a sequence's
// records are replayed, its first new token runs and its states are left, and further tokens run on
// a copy of them. Where there are none (records and accepted are null) all tokens are certain, and
// run in stretches of a few: decode steps one after the other, by the same arithmetic.
//
// A Call has, besides the fields of its decode step:
//
//   void* records;                           [S, D, R] in the op's dtype
//   const int32_t* accepted;                 [N]
//   int64_t num_records, record_width;       D, R
//
// and the Sequence of its decode step names its dtype, `using Type = T`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace th::verify {

// Tokens that are all certain, and that go through rows of a state together.
constexpr int64_t MAX_STRETCH = 32;

struct DraftsToo {};

// A sequence's records that are replayed, and then its new tokens, of which the first is certain.
// Tokens are counted from the first record.
template <typename Step>
struct Drafted : Step {
  using T = typename Step::Type;
  int64_t num_replayed, num_tokens, num_certain;

  // Tokens [first, first + MAX_STRETCH) of a sequence without drafts, or as many as there are.
  template <typename Call, typename... More>
  Drafted(const Call& call, int64_t n, int64_t first, More... more)
      : Step(call, n, more...),
        num_replayed(0),
        num_tokens(std::clamp<int64_t>(call.cu_seqlens[n + 1] - this->token - first, 0, MAX_STRETCH)),
        num_certain(num_tokens) {
    this->token += first;
    if (first) this->initial = this->slot;
  }

  template <typename Call, typename... More>
  Drafted(const Call& call, int64_t n, DraftsToo, More... more)
      : Step(call, n, more...),
        num_replayed(call.accepted[n]),
        num_tokens(num_replayed + call.cu_seqlens[n + 1] - call.cu_seqlens[n]),
        num_certain(std::min(num_tokens, num_replayed + 1)) {}

  T* record(int64_t at, int64_t i) const {
    return (T*)this->call.records + (at * this->call.num_records + i) * this->call.record_width;
  }
  bool is_replayed(int64_t i) const { return i < num_replayed; }
  // Of a new token among those of the step.
  int64_t place(int64_t i) const { return this->token + i - num_replayed; }
  // A token's part of so many channels from `first` on: in its record, or in the step's tensor.
  const T* part(int64_t i, int64_t first, const void* tensor, int64_t stride) const {
    if (is_replayed(i)) return record(this->initial, i) + first;
    return (const T*)tensor + place(i) * stride;
  }
};

// The most tokens that a sequence has, replayed ones included.
template <typename Call>
int64_t most_tokens(const Call& call) {
  return call.accepted ? 2 * call.num_records + 1 : MAX_STRETCH;
}

// Leaves what a sequence's next tokens need of `size` channels: the last inputs that are certain,
// and records of those that are not. `rows` are the inputs of the W - 1 tokens before it (null:
// zeros), and its own.
template <typename Sequence>
void leave_channels(const Sequence& seq, const typename Sequence::T* const* rows, int64_t channel,
                    int64_t size) {
  using T = typename Sequence::T;
  const int64_t num_past = seq.call.width - 1;
  for (int64_t w = 0; w < num_past; ++w) {
    T* left = seq.past(seq.slot, w) + channel;
    if (const T* row = rows[seq.num_certain + w])
      std::memmove(left, row + channel, size * sizeof(T));
    else
      std::fill(left, left + size, from_float<T>(0.0f));
  }
  for (int64_t i = seq.num_certain; i < seq.num_tokens; ++i)
    std::memcpy(seq.record(seq.slot, i - seq.num_certain) + channel, rows[num_past + i] + channel,
                size * sizeof(T));
}

// run(stretch) for each of the stretches that the tokens of the longest sequence take: where its
// first token is, or DraftsToo for all tokens of steps that verify drafts.
template <typename Call, typename Run>
void each_stretch(const Call& call, const Run& run) {
  if (call.accepted) return run(DraftsToo{});
  int64_t longest = 0;
  for (int64_t n = 0; n < call.num_seqs; ++n)
    longest = std::max<int64_t>(longest, call.cu_seqlens[n + 1] - call.cu_seqlens[n]);
  for (int64_t first = 0; first < longest; first += MAX_STRETCH) run(first);
}

// Whether sequences of several tokens, without drafts, have a slot where states pass from one stretch
// to the next.
template <typename Call>
bool slots_are_valid(const Call& call) {
  for (int64_t n = 0; n < call.num_seqs; ++n)
    if (call.cu_seqlens[n + 1] - call.cu_seqlens[n] > 1 && !call.state_indices[n]) return false;
  return true;
}

// Whether all records that are read and written are there.
template <typename Call>
bool records_are_valid(const Call& call) {
  for (int64_t n = 0; n < call.num_seqs; ++n) {
    const int64_t num_new = call.cu_seqlens[n + 1] - call.cu_seqlens[n];
    if (num_new - 1 > call.num_records) return false;
    if (call.accepted[n] < 0 || call.accepted[n] > call.num_records) return false;
    if (call.accepted[n] && !call.initial_indices[n]) return false;
  }
  return true;
}

}  // namespace th::verify
