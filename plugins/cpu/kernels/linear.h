// linear: y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], f32.
//
// The weight is in layout panel32, zero in the columns past N:
//
//   panel 0                                 panel 1
//   | k=0: n=0 .. 31 | k=1: n=0 .. 31 | ... | k=0: n=32 .. 63 | ...     [ceil(N/32)][K][32]
//
// so a microkernel reads it as one stream, and a vector's lanes are different n. Rows of x are cut into
// blocks that stay in the second-level cache, K into tiles whose part of a panel does too. Sums are spilled
// between the tiles, which changes no bit: K is never summed in parts.
#pragma once

#include "kernels.h"
#include "linear_epilogue.h"
#include "linear_sparse.h"
#include "microkernel.h"
#include "parallel.h"

namespace ew {
namespace {

constexpr int64_t kRowBlock = 96;      // rows of x in a task
constexpr int64_t kDepthBlock = 1024;  // k of one pass over a panel
constexpr int64_t kAhead = 32;         // k that a prefetch is ahead: 4 KB a panel, best of 8 .. 48

// One microkernel call: R rows of P panels, k0 <= k < k1. With Tiled that may be a part of K, and sums
// that are not at its end are kept in `spilled` [R][P * 32]: not in y, which may be the residual.
template <int R, int P, bool Tiled>
void linear_block(const LinearArgs& a, int64_t row, int64_t panel, int64_t k0, int64_t k1, float* spilled) {
  const int64_t panel_stride = a.k * kPanel;
  const float* x = a.x + row * a.x_stride + k0;
  const float* w = a.weight + panel * panel_stride + k0 * kPanel;
  F16 acc[R][2 * P];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < 2 * P; ++c) {
      acc[r][c] = Tiled && k0 > 0 ? load(spilled + (r * 2 * P + c) * 16) : splat(0.0f);
    }
  }
  chain<R, P, 2, Fetch::near>(x, a.x_stride, w, kPanel, panel_stride, k1 - k0, kAhead * kPanel, acc);
  if (!Tiled || k1 == a.k) {
    store_block<R, 2 * P>(acc, a, row, panel * kPanel);
    return;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < 2 * P; ++c) store(spilled + (r * 2 * P + c) * 16, acc[r][c]);
  }
}

// Few rows are bound by memory: several panels are streamed at once where registers allow.
template <int R>
void linear_stream(const LinearArgs& a, int64_t panel, int64_t panel_end) {
  constexpr int kFit = (kRegisters / 2 - 1) / (R + 1);  // R x 2P sums and 2P weights at once, and a broadcast
  constexpr int P = R == 1 || kFit > kStreamPanels ? kStreamPanels : kFit < 1 ? 1 : kFit;
  if constexpr (P > 1) {
    for (; panel + P <= panel_end; panel += P) linear_block<R, P, false>(a, 0, panel, 0, a.k, nullptr);
  }
  for (; panel < panel_end; ++panel) linear_block<R, 1, false>(a, 0, panel, 0, a.k, nullptr);
}

inline void linear(const LinearArgs& a, Workers& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  if (a.sparse) return linear_sparse(a, pool);
  const int64_t panels = (a.n + kPanel - 1) / kPanel;
  const int64_t work = a.m * panels * kPanel * a.k;
  const int64_t threads = pool.size();
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
    float spilled[kRowBlock * kPanel];
    for (int64_t p = panel; p < panel_end; ++p) {
      int64_t k0 = 0;
      do {
        const int64_t k1 = a.k - k0 < kDepthBlock ? a.k : k0 + kDepthBlock;
        for_row_blocks(end - begin, [&]<int R>(int64_t r) {
          linear_block<R, 1, true>(a, begin + r, p, k0, k1, spilled + r * kPanel);
        });
        k0 = k1;
      } while (k0 < a.k);
    }
  });
}

}  // namespace
}  // namespace ew
