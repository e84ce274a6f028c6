// The scalar-decay recurrence on a CPU: which thread does what. The work itself is in recurrent.h
// and chunk.h.
#include <omp.h>

#include <algorithm>

#include "call.h"
#include "chunk.h"
#include "recurrent.h"

namespace ssd {

template <typename T>
void run_or_clear(const Sequence<T>& seq, int64_t h) {
  if (seq.slot == 0)
    seq.clear_out(h);
  else if (seq.length > 0)
    run_recurrent(seq, h);
}

template <typename T>
void recurrent(const Call& call) {
  const int64_t num_items = call.num_seqs * call.num_v_heads;
  // Long enough stretches to keep neighbours together, short enough to level out lengths.
  const int64_t stretch = std::max<int64_t>(1, num_items / (8 * call.num_threads));
#pragma omp parallel num_threads(call.num_threads)
  {
    th::clear_padding<T>(call);
#pragma omp for schedule(dynamic, stretch)
    for (int64_t item = 0; item < num_items; ++item)
      run_or_clear(Sequence<T>(call, item / call.num_v_heads), item % call.num_v_heads);
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

// What one thread needs; the next one's begins on a cache line of its own.
int64_t scratch_floats(const Call& call) {
  return round_up(
      Scratch::num_floats(call.chunk_size, call.k_dim, call.v_dim, heads_per_item(call)), LANES);
}

template <typename T>
void chunk(const Call& call, float* scratch_of_all) {
  const int64_t heads = heads_per_item(call), group = group_size(call);
  const int64_t parts = (group + heads - 1) / heads, per_seq = call.num_k_heads * parts;
#pragma omp parallel num_threads(call.num_threads)
  {
    const Scratch scratch(scratch_of_all + omp_get_thread_num() * scratch_floats(call),
                          call.chunk_size, call.k_dim);
    th::clear_padding<T>(call);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < call.num_seqs * per_seq; ++item) {
      const Sequence<T> seq(call, item / per_seq);
      const int64_t part = item % parts, first = item % per_seq / parts * group;
      const int64_t begin = first + part * heads, end = first + std::min(group, (part + 1) * heads);
      if (seq.slot != 0 && seq.length > RECURRENT_LENGTH)
        run_chunks(seq, begin, end, scratch);
      else
        for (int64_t h = begin; h < end; ++h) run_or_clear(seq, h);
    }
  }
}

}  // namespace ssd

extern "C" TH_EXPORT void ssd_recurrent(const ssd::Call* call) {
  call->is_bf16 ? ssd::recurrent<th::bf16>(*call) : ssd::recurrent<float>(*call);
}

extern "C" TH_EXPORT void ssd_chunk(const ssd::Call* call, float* scratch) {
  call->is_bf16 ? ssd::chunk<th::bf16>(*call, scratch) : ssd::chunk<float>(*call, scratch);
}

// Floats of scratch that ssd_chunk needs.
extern "C" TH_EXPORT int64_t ssd_scratch_floats(const ssd::Call* call) {
  return call->num_threads * ssd::scratch_floats(*call);
}
