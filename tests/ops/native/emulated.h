// Instructions that few CPUs have, as functions: those of AVX512-BF16 and, with EMULATED_TILES, of
// AMX. Included before a kernel, it has the forms for CPUs with them run on one with AVX-512 alone.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace emulated {

inline __m512 even(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
inline __m512 odd(__m512i pairs) {
  return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000)));
}
template <typename Pairs>
__m512 dot_pairs(__m512 sum, Pairs a, Pairs b) {
  const __m512i x = (__m512i)a, y = (__m512i)b;
  return _mm512_fmadd_ps(odd(x), odd(y), _mm512_fmadd_ps(even(x), even(y), sum));
}

struct Tile {
  float rows[16][16];
};
inline thread_local Tile tiles[8];
inline std::atomic<int64_t> tile_products{0};

inline void load(int to, const void* from, int64_t stride) {
  for (int m = 0; m < 16; ++m)
    std::memcpy(tiles[to].rows[m], static_cast<const char*>(from) + m * stride, 64);
}
inline void store(int from, void* to, int64_t stride) {
  for (int m = 0; m < 16; ++m)
    std::memcpy(static_cast<char*>(to) + m * stride, tiles[from].rows[m], 64);
}
// Each pair of a row of a meets its row of b.
inline void multiply(int c, int a, int b) {
  ++tile_products;
  for (int m = 0; m < 16; ++m) {
    __m512 sum = _mm512_loadu_ps(tiles[c].rows[m]);
    for (int k = 0; k < 16; ++k) {
      const __m512i pair = (__m512i)_mm512_set1_ps(tiles[a].rows[m][k]);
      sum = dot_pairs(sum, pair, (__m512i)_mm512_loadu_ps(tiles[b].rows[k]));
    }
    _mm512_storeu_ps(tiles[c].rows[m], sum);
  }
}

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) inline __attribute__((used)) int64_t
tile_products() {
  return emulated::tile_products;
}

// The compiler's headers, which are included by now, go by these macros too.
#define __AVX512BF16__ 1
#ifdef EMULATED_TILES
#define __AMX_BF16__ 1
#endif
#define _mm512_dpbf16_ps emulated::dot_pairs
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_release
#define _tile_loadd(to, from, stride) emulated::load(to, from, stride)
#define _tile_stored(from, to, stride) emulated::store(from, to, stride)
#define _tile_zero(tile) (emulated::tiles[tile] = {})
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
// The system lets every process use them.
#define syscall(...) 0
