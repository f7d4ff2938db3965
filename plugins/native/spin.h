// Waiting without the system's help, for a bounded time.
#pragma once

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace ew {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() or the limit; returns whether it is ready. The clock is read once in a few dozen
// pauses.
template <class Ready>
bool spin_until(const Ready& ready, std::chrono::nanoseconds limit) {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    pause();
  }
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace ew
