#include "panels.h"

#include <algorithm>

#include "kernels/kernels.h"
#include "thread_pool.h"

namespace ew {
namespace {

int8_t stored(uint8_t value) { return static_cast<int8_t>(value - 128); }
uint8_t stored(int8_t value) { return static_cast<uint8_t>(value + 128); }
float stored(float value) { return value; }
uint16_t stored(uint16_t value) { return value; }

// Panels with `Step` k side by side.
template <int64_t Step, class T, class U>
void pack(const Matrices<T>& rows, U* panels, ThreadPool& pool) {
  const int64_t count = (rows.n + kPanel - 1) / kPanel;
  const int64_t steps = (rows.k + Step - 1) / Step;
  pool.parallel_for(rows.count * count, [&](int64_t task, int) {
    const int64_t first = task % count * kPanel;
    const int64_t filled = std::min(kPanel, rows.n - first);
    const T* from = rows.data + task / count * rows.stride0 + first * rows.stride1;
    U* to = panels + task * kPanel * steps * Step;
    if (filled < kPanel || rows.k % Step != 0) std::fill(to, to + kPanel * steps * Step, stored(T{0}));
    // 64 bytes of columns at a time: a cache line of each row, so that every line is read once.
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    for (int64_t k0 = 0; k0 < rows.k; k0 += kLine) {
      const int64_t k1 = std::min(k0 + kLine, rows.k);
      for (int64_t row = 0; row < filled; ++row) {
        for (int64_t k = k0; k < k1; ++k) {
          to[(k / Step * kPanel + row) * Step + k % Step] = stored(from[row * rows.stride1 + k]);
        }
      }
    }
  });
}

template <int64_t Step, class T, class U>
void unpack(const U* panels, int64_t n, int64_t k, T* rows) {
  const int64_t steps = (k + Step - 1) / Step;
  for (int64_t row = 0; row < n; ++row) {
    const U* panel = panels + row / kPanel * kPanel * steps * Step;
    for (int64_t column = 0; column < k; ++column) {
      const int64_t at = (column / Step * kPanel + row % kPanel) * Step + column % Step;
      rows[row * k + column] = stored(panel[at]);
    }
  }
}

}  // namespace

template <class T>
void pack_panel32(const Matrices<T>& rows, T* panels, ThreadPool& pool) {
  pack<1>(rows, panels, pool);
}
template void pack_panel32(const Matrices<float>&, float*, ThreadPool&);
template void pack_panel32(const Matrices<uint16_t>&, uint16_t*, ThreadPool&);

void pack_panel32x2(const Matrices<uint16_t>& rows, uint16_t* panels, ThreadPool& pool) {
  pack<2>(rows, panels, pool);
}

void pack_panel32x4(const Matrices<int8_t>& rows, uint8_t* panels, ThreadPool& pool) {
  pack<4>(rows, panels, pool);
}

template <class T>
void unpack_panel32(const T* panels, int64_t n, int64_t k, T* rows) {
  unpack<1>(panels, n, k, rows);
}
template void unpack_panel32(const float*, int64_t, int64_t, float*);
template void unpack_panel32(const uint16_t*, int64_t, int64_t, uint16_t*);

void unpack_panel32x2(const uint16_t* panels, int64_t n, int64_t k, uint16_t* rows) {
  unpack<2>(panels, n, k, rows);
}

void unpack_panel32x4(const uint8_t* panels, int64_t n, int64_t k, int8_t* rows) {
  unpack<4>(panels, n, k, rows);
}

}  // namespace ew
