// The gated delta rule on a CPU: which thread does what. The work itself is in recurrent.h and
// chunk.h.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "call.h"
#include "chunk.h"
#include "recurrent.h"

namespace gdr {

template <typename T>
void recurrent(const Call& call) {
  const int64_t num_items = call.num_seqs * call.num_v_heads;
  // Long enough stretches to keep neighbours together, short enough to level out lengths.
  const int64_t stretch = std::max<int64_t>(1, num_items / (8 * call.num_threads));
#pragma omp parallel num_threads(call.num_threads)
  {
    std::vector<float> keys(2 * call.k_dim);
    clear_padding<T>(call);
#pragma omp for schedule(dynamic, stretch)
    for (int64_t item = 0; item < num_items; ++item) {
      const Sequence<T> seq(call, item / call.num_v_heads);
      const int64_t j = item % call.num_v_heads;
      if (seq.slot == 0)
        seq.clear_out(j);
      else if (seq.length > 0)
        run_recurrent(seq, j, keys.data());
    }
  }
}

// Value heads that a thread takes at once. Those of one key head share its products, but not when
// that would leave threads without work.
int64_t heads_per_item(const Call& call) {
  const bool enough = call.num_seqs * call.num_k_heads >= 4 * call.num_threads;
  return enough ? call.num_v_heads / call.num_k_heads : 1;
}

// What one thread needs; the next one's begins on a cache line of its own.
int64_t scratch_floats(const Call& call) {
  return round_up(
      Scratch::num_floats(call.chunk_size, call.k_dim, call.v_dim, heads_per_item(call)), LANES);
}

template <typename T>
void chunk(const Call& call, float* scratch_of_all) {
  const int64_t heads = heads_per_item(call), parts = call.num_v_heads / heads;
#pragma omp parallel num_threads(call.num_threads)
  {
    const Scratch scratch(scratch_of_all + omp_get_thread_num() * scratch_floats(call),
                          call.chunk_size, call.k_dim);
    clear_padding<T>(call);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < call.num_seqs * parts; ++item) {
      const Sequence<T> seq(call, item / parts);
      const int64_t begin = item % parts * heads, end = begin + heads;
      if (seq.slot != 0 && seq.length > RECURRENT_LENGTH) {
        run_chunks(seq, begin, end, scratch);
        continue;
      }
      for (int64_t j = begin; j < end; ++j)
        if (seq.slot == 0)
          seq.clear_out(j);
        else if (seq.length > 0)
          run_recurrent(seq, j, scratch.keys);
    }
  }
}

}  // namespace gdr

extern "C" TH_EXPORT void gated_delta_rule_recurrent(const gdr::Call* call) {
  call->is_bf16 ? gdr::recurrent<th::bf16>(*call) : gdr::recurrent<float>(*call);
}

extern "C" TH_EXPORT void gated_delta_rule_chunk(const gdr::Call* call, float* scratch) {
  call->is_bf16 ? gdr::chunk<th::bf16>(*call, scratch) : gdr::chunk<float>(*call, scratch);
}

// Floats of scratch that gated_delta_rule_chunk needs.
extern "C" TH_EXPORT int64_t gated_delta_rule_scratch_floats(const gdr::Call* call) {
  return call->num_threads * gdr::scratch_floats(*call);
}
