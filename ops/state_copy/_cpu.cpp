// Copies and clears of whole slots and pages, cut into pieces that threads share.
#include <algorithm>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t PIECE_BYTES = 1 << 18;

// A pool seen as [outer, size, bytes]. Mirrored in _cpu.py.
struct Pool {
  char* data;
  int64_t outer, size, bytes;
  char* at(int64_t i, int64_t index) const { return data + (i * size + index) * bytes; }
};

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

extern "C" TH_EXPORT void th_state_copy(const Pool* pools, int64_t num_pools, const int32_t* src,
                                        const int32_t* dst, int64_t num_pairs,
                                        int64_t num_threads) {
  std::vector<Piece> pieces;
  int64_t total = 0;
  for (int64_t n = 0; n < num_pools; ++n)
    for (int64_t i = 0; i < pools[n].outer; ++i)
      for (int64_t pair = 0; pair < num_pairs; ++pair) {
        if (dst[pair] == 0) continue;
        const char* from = src[pair] ? pools[n].at(i, src[pair]) : nullptr;
        add_pieces(pieces, pools[n].at(i, dst[pair]), from, pools[n].bytes);
        total += pools[n].bytes;
      }
  const int64_t count = int64_t(pieces.size());
#pragma omp parallel for schedule(dynamic) num_threads(int(num_threads)) if (total > PIECE_BYTES)
  for (int64_t i = 0; i < count; ++i) {
    const Piece& piece = pieces[i];
    if (piece.from)
      std::memcpy(piece.to, piece.from, piece.bytes);
    else
      std::memset(piece.to, 0, piece.bytes);
  }
}
