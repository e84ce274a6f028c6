// Copies and clears of whole slots and pages, cut into pieces that threads share.
#include <algorithm>
#include <cstring>
#include <vector>

#include "call.h"

namespace {

constexpr int64_t PIECE_BYTES = 1 << 18;

TH_CALL(Call,
  const int32_t *src, *dst;
  int64_t num_pools, num_pairs, num_threads;
);

// A pool seen as [outer, size, bytes].
TH_CALL(Pool,
  char* data;
  int64_t outer, size, bytes;
);

char* at(const Pool& pool, int64_t i, int64_t index) {
  return pool.data + (i * pool.size + index) * pool.bytes;
}

struct Piece {
  char* to;
  const char* from;  // null: clear
  int64_t bytes;
};

void add_pieces(std::vector<Piece>& pieces, char* to, const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += PIECE_BYTES)
    pieces.push_back({to + at, from ? from + at : nullptr, std::min(PIECE_BYTES, bytes - at)});
}

}  // namespace

TH_EXPORT_CALL_OF_ROWS(state_copy, Call, Pool) {
  const Pool* pools = th::rows_of<Pool>(*call);
  std::vector<Piece> pieces;
  int64_t total = 0;
  for (int64_t n = 0; n < call->num_pools; ++n)
    for (int64_t i = 0; i < pools[n].outer; ++i)
      for (int64_t pair = 0; pair < call->num_pairs; ++pair) {
        const int64_t src = call->src[pair], dst = call->dst[pair];
        if (dst == 0) continue;
        const char* from = src ? at(pools[n], i, src) : nullptr;
        add_pieces(pieces, at(pools[n], i, dst), from, pools[n].bytes);
        total += pools[n].bytes;
      }
  const int64_t count = int64_t(pieces.size());
#pragma omp parallel for schedule(dynamic) num_threads(int(call->num_threads)) \
    if (total > PIECE_BYTES)
  for (int64_t i = 0; i < count; ++i) {
    const Piece& piece = pieces[i];
    if (piece.from)
      std::memcpy(piece.to, piece.from, piece.bytes);
    else
      std::memset(piece.to, 0, piece.bytes);
  }
  return true;
}
