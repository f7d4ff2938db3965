#include "panels.h"

#include <algorithm>

#include "kernels/kernels.h"
#include "thread_pool.h"

namespace ew {

void pack_panel32(const float* rows, int64_t stride, int64_t n, int64_t k, float* panels, ThreadPool& pool) {
  const int64_t count = (n + kPanel - 1) / kPanel;
  pool.parallel_for(count, [&](int64_t panel, int) {
    const int64_t first = panel * kPanel;
    const int64_t filled = std::min(kPanel, n - first);
    const float* from = rows + first * stride;
    float* to = panels + first * k;
    if (filled < kPanel) std::fill(to, to + kPanel * k, 0.0f);
    // 16 columns at a time: a cache line of each row, so that every line is read once.
    for (int64_t k0 = 0; k0 < k; k0 += 16) {
      const int64_t k1 = std::min(k0 + 16, k);
      for (int64_t row = 0; row < filled; ++row) {
        for (int64_t column = k0; column < k1; ++column)
          to[column * kPanel + row] = from[row * stride + column];
      }
    }
  });
}

void unpack_panel32(const float* panels, int64_t n, int64_t k, float* rows) {
  for (int64_t row = 0; row < n; ++row) {
    const float* panel = panels + row / kPanel * kPanel * k;
    for (int64_t column = 0; column < k; ++column)
      rows[row * k + column] = panel[column * kPanel + row % kPanel];
  }
}

}  // namespace ew
