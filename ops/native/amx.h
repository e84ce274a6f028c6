// Tiles of AMX, which multiply pairs of bf16: products of a panel with sixteen rows a register.
//
//   HAS_AMX                      whether kernels are built for it
//   amx_allowed()                whether the system lets this process use it
//   AmxTiles tiles(true)         while it lives, this thread's tiles are configured
//   multiply_amx(...)            C[32][16 V] (+)= panel[32][units] x[V][units][16], V = 1 or 2
//
// A tile is 16 rows of 64 bytes. One of the panel is 16 rows of W, as they lie, and one of x sixteen
// units of sixteen rows, as LaneRows packs them: neither is rearranged for AMX. While tiles multiply,
// each step fetches its columns of the rows of W that come next.
#pragma once

#include <cstdint>

#include "reading.h"
#include "simd.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TH_AMX
#endif

namespace th {

constexpr int AMX_TILE_ROWS = 32;  // of W: two tiles

#ifdef TH_AMX

constexpr bool HAS_AMX = true;

// Linux saves these registers for a process only after it has asked for them once.
inline bool amx_allowed() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return allowed;
}

class AmxTiles {
 public:
  explicit AmxTiles(bool wanted) : wanted_(wanted) {
    if (!wanted) return;
    Config config;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
  }
  ~AmxTiles() {
    if (wanted_) _tile_release();
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  bool wanted_;
};

inline void multiply_amx(const float* panel, int64_t panel_stride, const float* x,
                         int64_t vector_stride, int vectors, int64_t units, float* C, int64_t ldc,
                         bool add, NextRows ahead) {
  const int64_t row_bytes = panel_stride * 4, c_bytes = ldc * 4;
  const float* below = panel + 16 * panel_stride;
  float* c_below = C + 16 * ldc;
  if (add) {
    _tile_loadd(0, C, c_bytes);
    _tile_loadd(2, c_below, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(2);
  }
  if (vectors == 1) {
    for (int64_t k = 0; k < units; k += LANES) {
      ahead.fetch(k * int64_t(sizeof(float)));
      _tile_loadd(4, panel + k, row_bytes);
      _tile_loadd(6, x + k * LANES, 64);
      _tile_loadd(5, below + k, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
  } else {
    if (add) {
      _tile_loadd(1, C + LANES, c_bytes);
      _tile_loadd(3, c_below + LANES, c_bytes);
    } else {
      _tile_zero(1);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < units; k += LANES) {
      ahead.fetch(k * int64_t(sizeof(float)));
      _tile_loadd(4, panel + k, row_bytes);
      _tile_loadd(6, x + k * LANES, 64);
      _tile_loadd(7, x + vector_stride + k * LANES, 64);
      _tile_loadd(5, below + k, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(1, C + LANES, c_bytes);
    _tile_stored(3, c_below + LANES, c_bytes);
  }
  _tile_stored(0, C, c_bytes);
  _tile_stored(2, c_below, c_bytes);
}

#else

constexpr bool HAS_AMX = false;

inline bool amx_allowed() { return false; }
struct AmxTiles {
  explicit AmxTiles(bool) {}
};
inline void multiply_amx(const float*, int64_t, const float*, int64_t, int, int64_t, float*,
                         int64_t, bool, NextRows) {}

#endif

}  // namespace th
