// How a task of a linear goes over its panels: some panels at a time (a sweep), whose sums are kept in memory
// until they are stored together. So kSweep panels of a row of y are written together, and not
// one: the lines of y are often in another core's cache, and fetching a few here and a few there took longer
// than a short panel's products.
//
// One block of rows, or many (sweep_panels): all panels for each block, whose values are read once a sweep;
// the sweep's weights stay in the second-level cache.
//
//            sweep 0            sweep 1
//            p0  p1  p2  p3  |  p4  p5 ..
//   rows 0   1   2   3   4   |  9   10              the order of blocks; rows 0 are stored after 4, rows 1
//   rows 1   5   6   7   8   |  13  14              after 8
//
// A few blocks (sweep_tiles), whose products take about as long as reading the weights: a panel is tiled
// along K. Each tile stays in the first-level cache while all blocks use it; their sums are spilled in
// between (which changes no bit). So the weights come as one even stream, while all blocks work.
//
//            p0                       p1
//            k ..    k' ..   k'' ..   k ..
//   rows 0   1       3       5        7
//   rows 1   2       4       6        8             all are stored behind the last panel of the sweep
#pragma once

#include "kernels.h"
#include "linear_epilogue.h"
#include "linear_tasks.h"

namespace ew {
namespace {

constexpr int64_t kSweep = 4;                      // most panels
constexpr int64_t kSweepBytes = int64_t{1} << 18;  // of weights: a share of the second-level cache
constexpr int64_t kSweepColumns = kSweep * kPanel;
constexpr int64_t kNearBytes = 1024;
constexpr int64_t kTileBytes = 8192;  // of weights: with the next one, half of a first-level cache
constexpr int kPatientRows = 3;  // blocks of as many compute for longer than the second-level cache takes

// Prefetches for bf16, two lines for each 128 bytes of the panel. Few rows wait for memory alone, and have it
// in the first-level cache; more would fill that up, so it is the second, and the first soon before. (Linears
// of int8, whose values are fewer bytes, are faster with all of it in the first.)
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
        Ahead ahead = {at + kAheadBytes, 128};
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

// Groups along K of one call. Sums of a tile that isn't the first continue from those that were spilled.
struct KTile {
  int64_t begin, end;
};

// Whether panels are better tiled along K for rows row .. row_end-1.
template <int Most>
bool tiled_along_k(int64_t groups, int64_t row, int64_t row_end) {
  return kTileBlocks > 1 && groups > 1 && row_end - row > Most && row_end - row <= Most * kTileBlocks;
}

// Calls fn.template operator()<R>(first row, panel, tile, ahead, sums), as sweep_panels does, for two to
// kTileBlocks blocks and the tiles of panels of `groups` groups, of group_bytes each. fn prefetches one
// line for each 128 bytes of the panel.
template <int Most, class Linear, class F>
EW_INLINE void sweep_tiles(const Linear& a, const void* weight, int64_t groups, int64_t group_bytes,
                           int64_t panel, int64_t panel_end, int64_t row, int64_t row_end, const F& fn) {
  float sums[Most * kTileBlocks * kSweepColumns];
  const int64_t step = group_bytes < kTileBytes ? kTileBytes / group_bytes : 1;
  for (int64_t begin = panel; begin < panel_end; begin += kSweep) {
    const int64_t end = begin + kSweep < panel_end ? begin + kSweep : panel_end;
    for (int64_t p = begin; p < end; ++p) {
      for (int64_t g = 0; g < groups; g += step) {
        const KTile tile = {g, g + step < groups ? g + step : groups};
        const char* at = static_cast<const char*>(weight) + (p * groups + g) * group_bytes;
        for_blocks_of<Most>(row, row_end, [&]<int R>(int64_t first, int64_t block, int64_t) {
          // The first two fetch the halves of the next tile.
          const int64_t half = block < 2 ? block * step * group_bytes / 2 : 0;
          const Ahead ahead = {at + step * group_bytes + half, block < 2 ? 64 : 0};
          float* own = sums + (first - row) * kSweepColumns + (p - begin) * kPanel;
          fn.template operator()<R>(first, p, tile, ahead, own);
        });
      }
    }
    store_rows(a, row, row_end - row, begin * kPanel, (end - begin) * kPanel, sums, kSweepColumns);
  }
}

// Sums of a block of rows: zeros before the first tile of a panel, else what keep_sums kept.
template <int R>
EW_INLINE void begin_sums(F16 (&acc)[R][2], const KTile& tile, const float* sums) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  if (tile.begin == 0) return;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    acc[r][0] = load(sums + r * kSweepColumns);
    acc[r][1] = load(sums + r * kSweepColumns + 16);
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
