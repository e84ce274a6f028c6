// The state of a head of linear attention, [V, K] in its pool, in the form that products with it
// want: transposed, [K, V], and cut into panels of PANEL columns. Columns of V do not depend on
// each other, so that a panel can go through a whole chunk of tokens while it is in L1.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace th {

constexpr int PANEL = 2 * LANES;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// panel[k][c] = state[c][k] for `n` rows of the state; columns past n become 0.
inline void load_panel(const float* state, int64_t n, int64_t K, float* panel) {
  for (int64_t c = 0; c < PANEL; c += LANES)
    for (int64_t k = 0; k < K; k += LANES) {
      f32x16 x[LANES];
      for (int64_t i = 0; i < LANES; ++i)
        x[i] = c + i < n ? load(state + (c + i) * K + k, int(K - k)) : f32x16{};
      transpose16(x);
      for (int64_t i = 0; i < std::min<int64_t>(LANES, K - k); ++i)
        store(panel + (k + i) * PANEL + c, x[i]);
    }
}

inline void store_panel(const float* panel, int64_t n, int64_t K, float* state) {
  for (int64_t c = 0; c < n; c += LANES)
    for (int64_t k = 0; k < K; k += LANES) {
      f32x16 x[LANES];
      for (int64_t i = 0; i < LANES; ++i)
        x[i] = k + i < K ? load(panel + (k + i) * PANEL + c) : f32x16{};
      transpose16(x);
      for (int64_t i = 0; i < std::min<int64_t>(LANES, n - c); ++i)
        store(state + (c + i) * K + k, x[i], int(K - k));
    }
}

// Floats that a state takes as panels.
constexpr int64_t panels_size(int64_t V, int64_t K) { return round_up(V, PANEL) * K; }

// All panels of a state, the one of column c at panels + c * K. A null state is one of zeros.
inline void load_panels(const float* state, int64_t V, int64_t K, float* panels) {
  if (!state) return std::fill(panels, panels + panels_size(V, K), 0.0f);
  for (int64_t c = 0; c < V; c += PANEL) load_panel(state + c * K, V - c, K, panels + c * K);
}

// A null state is one that is not kept.
inline void store_panels(const float* panels, int64_t V, int64_t K, float* state) {
  if (!state) return;
  for (int64_t c = 0; c < V; c += PANEL)
    store_panel(panels + c * K, std::min<int64_t>(PANEL, V - c), K, state + c * K);
}

// Rows of one head lie a whole token apart, on another page each, where the hardware does not look
// ahead: a row of the next chunk is fetched when its predecessor in this one is used.
template <typename T>
TH_INLINE void prefetch(const T* p, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(p + i, 0, 2);
}

}  // namespace th
