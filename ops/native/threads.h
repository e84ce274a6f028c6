// How many threads are worth waking for some work; no result depends on it.
//
// One thread has done little work before another is awake, and on a machine with other work the
// other one may be awake only milliseconds later, for which all wait at the end.
#pragma once

#include <algorithm>
#include <cstdint>

namespace th {

// What a thread reads in the few microseconds that it takes to wake one.
constexpr int64_t WORTH_WAKING = 64 << 10;

// Of `most` threads, those that have so many bytes to read each, or work that takes as long.
inline int threads_for(int64_t bytes, int64_t most) {
  return int(std::min(most, std::max<int64_t>(bytes / WORTH_WAKING, 1)));
}

}  // namespace th
