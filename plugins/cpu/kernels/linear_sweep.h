// How a task of a linear goes over its panels: some panels at a time (a sweep), which stay in the
// second-level cache, and for each block of rows all of them, whose sums are kept in memory until they are
// stored together.
//
//            sweep 0            sweep 1
//            p0  p1  p2  p3  |  p4  p5 ..
//   rows 0   1   2   3   4   |  9   10              the order of blocks; rows 0 are stored after 4, rows 1
//   rows 1   5   6   7   8   |  13  14              after 8
//
// So the values of a block of rows are read once a sweep, and what is written to a row of y is a piece of
// kSweep panels and not of one: the lines of y are often in another core's cache, and fetching a few here and
// a few there took longer than a short panel's products.
#pragma once

#include "kernels.h"
#include "linear_store.h"
#include "linear_tasks.h"

namespace ew {
namespace {

constexpr int64_t kSweep = 4;                      // most panels
constexpr int64_t kSweepBytes = int64_t{1} << 18;  // of weights: a share of the second-level cache
constexpr int64_t kSweepColumns = kSweep * kPanel;
constexpr int64_t kFarBytes = 8192;  // that the only block of rows prefetches ahead
constexpr int64_t kNearBytes = 1024;
constexpr int kPatientRows = 3;  // blocks of as many compute for longer than the second-level cache takes

// Prefetches what lies ahead, two lines for each 128 bytes of the panel. Few rows wait for memory alone, and
// have it in the first-level cache; more would fill that up, so it is the second, and the first soon before.
template <int R>
EW_INLINE void prefetch_for(Ahead& ahead, [[maybe_unused]] const void* now) {
  if constexpr (R < kPatientRows) {
    prefetch(ahead);
  } else {
    __builtin_prefetch(ahead.at, 0, 2);
    __builtin_prefetch(ahead.at + 64, 0, 2);
    ahead.at += ahead.step;
    __builtin_prefetch(static_cast<const char*>(now) + kNearBytes);
    __builtin_prefetch(static_cast<const char*>(now) + kNearBytes + 64);
  }
}

// Calls fn.template operator()<R>(first row, panel, ahead, sums) for all blocks of at most Most rows and all
// panels of `weight`, which keeps its sums with keep_sums, and stores them.
template <int Most, class Linear, class F>
EW_INLINE void sweep_panels(const Linear& a, const void* weight, int64_t panel_bytes, int64_t panel,
                            int64_t panel_end, int64_t row, int64_t row_end, const F& fn) {
  float sums[Most * kSweepColumns];
  const int64_t fit = kSweepBytes / (panel_bytes + 1), most = fit < 1 ? 1 : fit < kSweep ? fit : kSweep;
  const int64_t panels = panel_end - panel, sweeps = (panels + most - 1) / most;
  for (int64_t s = 0; s < sweeps; ++s) {
    const int64_t begin = panel + panels * s / sweeps, end = panel + panels * (s + 1) / sweeps;
    for_blocks_of<Most>(row, row_end, [&]<int R>(int64_t first, int64_t block, int64_t blocks) {
      for (int64_t p = begin; p < end; ++p) {
        const char* at = static_cast<const char*>(weight) + p * panel_bytes;
        Ahead ahead = {at + kFarBytes, 128};
        // Of several blocks the first two fetch the halves of the next sweep: their own is in the cache.
        if (blocks > 1) {
          ahead = {at, 0};
          if (block < 2) ahead = {at + (end - begin) * panel_bytes + block * panel_bytes / 2, 64};
        }
        fn.template operator()<R>(first, p, ahead, sums + (p - begin) * kPanel);
      }
      store_rows(a, first, R, begin * kPanel, (end - begin) * kPanel, sums, kSweepColumns);
    });
  }
}

// A panel's columns of a block of rows, until its sweep is stored.
template <int R>
EW_INLINE void keep_sums(const F16 (&acc)[R][2], float* sums) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(sums + r * kSweepColumns, acc[r][0]);
    store(sums + r * kSweepColumns + 16, acc[r][1]);
  }
}

}  // namespace
}  // namespace ew
