// The scalar-decay recurrence on a CPU: which thread does what. The work itself is in recurrent.h
// and native/ssd_chunk.h.
#include <algorithm>

#include "aligned_floats.h"
#include "recurrent.h"
#include "ssd_chunk.h"

namespace th::ssd {

template <typename T>
void recurrent(const Call& call) {
  const int64_t num_items = call.num_seqs * call.num_v_heads;
  // Long enough stretches to keep neighbours together, short enough to level out lengths.
  const int64_t stretch = std::max<int64_t>(1, num_items / (8 * call.num_threads));
#pragma omp parallel num_threads(call.num_threads)
  {
    th::Spare spare;
    th::clear_padding<T>(call);
#pragma omp for schedule(dynamic, stretch)
    for (int64_t item = 0; item < num_items; ++item) {
      const Sequence<T> seq(call, item / call.num_v_heads);
      const int64_t h = item % call.num_v_heads;
      if (seq.length > 0) run_recurrent(seq, h, seq.open_state(h, spare));
    }
  }
}

int64_t group_size(const Call& call) { return call.num_v_heads / call.num_k_heads; }

// Heads of a group that a thread takes at once: they share q, k and their products, but their
// states have to stay in L2, and no thread may be left without work.
int64_t heads_per_item(const Call& call) {
  constexpr int64_t STATE_FLOATS = 1 << 16;
  const int64_t fit = STATE_FLOATS / th::panels_size(call.v_dim, call.k_dim);
  const int64_t share = call.num_seqs * call.num_v_heads / (4 * call.num_threads);
  return std::max<int64_t>(1, std::min({fit, share, group_size(call)}));
}

template <typename T>
void chunk(const Call& call) {
  const int64_t heads = heads_per_item(call), group = group_size(call);
  const int64_t parts = (group + heads - 1) / heads, per_seq = call.num_k_heads * parts;
#pragma omp parallel num_threads(call.num_threads)
  {
    th::AlignedFloats memory(
        Scratch::num_floats(call.chunk_size, call.k_dim, call.v_dim, heads));
    const Scratch scratch(memory.data(), call.chunk_size, call.k_dim);
    th::Spare spare;
    th::clear_padding<T>(call);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < call.num_seqs * per_seq; ++item) {
      const Sequence<T> seq(call, item / per_seq);
      const int64_t part = item % parts, first = item % per_seq / parts * group;
      const int64_t begin = first + part * heads, end = first + std::min(group, (part + 1) * heads);
      if (seq.length > RECURRENT_LENGTH)
        run_chunks(seq, begin, end, scratch);
      else if (seq.length > 0)
        for (int64_t h = begin; h < end; ++h) run_recurrent(seq, h, seq.open_state(h, spare));
    }
  }
}

// Token by token where chunk_size is 0.
template <typename T>
void run(const Call& call) {
  call.chunk_size ? chunk<T>(call) : recurrent<T>(call);
}

}  // namespace th::ssd

TH_EXPORT_CALL(ssd, th::ssd::Call) {
  if (!th::indices_are_valid(*call)) return false;
  call->is_bf16 ? th::ssd::run<th::bf16>(*call) : th::ssd::run<float>(*call);
  return true;
}
