// linear: y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], f32.
//
// The weight is in layout panel32, zero in the columns past N:
//
//   panel 0                                 panel 1
//   | k=0: n=0 .. 31 | k=1: n=0 .. 31 | ... | k=0: n=32 .. 63 | ...     [ceil(N/32)][K][32]
//
// so a microkernel reads it as one stream, and a vector's lanes are different n. Rows of x are cut into
// blocks that stay in the second-level cache, K into pieces whose part of a panel does too. A chain that
// spans pieces rests in y between them, which changes no bit: K is never summed in parts.
#pragma once

#include "kernels.h"
#include "microkernel.h"
#include "parallel.h"

namespace ew {
namespace {

constexpr int64_t kRowBlock = 96;      // rows of x in a task
constexpr int64_t kDepthBlock = 1024;  // k of one pass over a panel
constexpr int64_t kAhead = 32;         // k that a prefetch is ahead: 4 KB a panel, best of 8 .. 48

// One microkernel call: R rows of P panels, k0 <= k < k1. Loads y unless k0 is 0; adds the bias when k1 is K.
template <int R, int P>
void linear_block(const LinearArgs& a, int64_t row, int64_t panel, int64_t k0, int64_t k1) {
  const int64_t panel_stride = a.k * kPanel;
  const float* x = a.x + row * a.x_stride + k0;
  const float* w = a.weight + panel * panel_stride + k0 * kPanel;
  float* y = a.y + row * a.y_stride + panel * kPanel;
  const int64_t columns = a.n - panel * kPanel;  // that exist; may be more than P * 32
  const bool whole = columns >= P * kPanel;
  const auto width = [&](int c) {
    const int64_t left = columns - c * 16;
    return left > 16 ? int64_t{16} : left < 0 ? int64_t{0} : left;
  };

  F16 acc[R][2 * P];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < 2 * P; ++c) acc[r][c] = splat(0.0f);
  }
  if (k0 > 0) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < 2 * P; ++c) {
        const float* at = y + r * a.y_stride + c * 16;
        acc[r][c] = whole ? load(at) : load_n(at, width(c));
      }
    }
  }
  chain<R, P, 2, true>(x, a.x_stride, w, kPanel, panel_stride, k1 - k0, kAhead * kPanel, acc);
  if (k1 == a.k && a.bias != nullptr) {
#pragma GCC unroll 8
    for (int c = 0; c < 2 * P; ++c) {
      const float* at = a.bias + panel * kPanel + c * 16;
      const F16 bias = whole ? load(at) : load_n(at, width(c));
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) acc[r][c] = acc[r][c] + bias;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < 2 * P; ++c) {
      float* at = y + r * a.y_stride + c * 16;
      if (whole) {
        store(at, acc[r][c]);
      } else {
        store_n(at, acc[r][c], width(c));
      }
    }
  }
}

// Few rows are bound by memory: several panels are streamed at once where registers allow.
template <int R>
void linear_stream(const LinearArgs& a, int64_t panel, int64_t panel_end) {
  constexpr int kFit = (kRegisters / 2 - 1) / (R + 1);  // R x 2P sums and 2P weights at once, and a broadcast
  constexpr int P = R == 1 || kFit > kStreamPanels ? kStreamPanels : kFit < 1 ? 1 : kFit;
  if constexpr (P > 1) {
    for (; panel + P <= panel_end; panel += P) linear_block<R, P>(a, 0, panel, 0, a.k);
  }
  for (; panel < panel_end; ++panel) linear_block<R, 1>(a, 0, panel, 0, a.k);
}

inline void linear(const LinearArgs& a, ThreadPool& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  const int64_t panels = (a.n + kPanel - 1) / kPanel;
  const int64_t work = a.m * panels * kPanel * a.k;
  const int64_t threads = pool_size(pool);
  const int64_t row_blocks = (a.m + kRowBlock - 1) / kRowBlock;

  // Enough tasks to even out, each large enough (some 100 KB of weights) to be worth handing out.
  const int64_t even = panels * row_blocks / (8 * threads);
  int64_t group = 1 + (int64_t{1} << 15) / (kPanel * (a.k + 1));
  group = group < even ? even : group;
  group = group > 16 ? 16 : group;
  const int64_t groups = (panels + group - 1) / group;

  run_tasks(pool, groups * row_blocks, work, [&](int64_t task, int) {
    const int64_t panel = task / row_blocks * group;
    const int64_t panel_end = panel + group < panels ? panel + group : panels;
    if (a.m <= kMaxRows) {
      with_rows(a.m, [&]<int R>() { linear_stream<R>(a, panel, panel_end); });
      return;
    }
    const int64_t begin = a.m * (task % row_blocks) / row_blocks;
    const int64_t end = a.m * (task % row_blocks + 1) / row_blocks;
    for (int64_t p = panel; p < panel_end; ++p) {
      int64_t k0 = 0;
      do {
        const int64_t k1 = a.k - k0 < kDepthBlock ? a.k : k0 + kDepthBlock;
        for_row_blocks(end - begin, [&]<int R>(int64_t r) { linear_block<R, 1>(a, begin + r, p, k0, k1); });
        k0 = k1;
      } while (k0 < a.k);
    }
  });
}

}  // namespace
}  // namespace ew
