// How the linears of packed weights are shared out: tasks of some panels (32 columns each) and a block of
// rows.
#pragma once

#include "kernels.h"
#include "linear_epilogue.h"
#include "microkernel.h"
#include "parallel.h"

namespace ew {
namespace {

constexpr int64_t kTaskRows = 96;      // most rows of a task: they stay in the second-level cache
constexpr int64_t kAheadBytes = 8192;  // that a prefetch is ahead of the only block of rows
// Of weights, in a task of a large one: its beginning isn't prefetched, which some 10 us of work compensate.
constexpr int64_t kTaskBytes = int64_t{1} << 18;

// fn(panel, panel_end, row, row_end), or with the worker behind them, for tasks that cover m rows and all
// panels of n columns. Tasks are of one size, as nearly as can be, and each thread gets as many: a small
// weight is read in some microseconds, where handing out more tasks than threads costs more than it evens
// out. Rows begin at multiples of `unit`, and are `most_rows` at most.
template <class F>
void linear_tasks(Workers& pool, int64_t m, int64_t n, int64_t k, int64_t panel_bytes, const F& fn,
                  int64_t unit = 1, int64_t most_rows = kTaskRows) {
  const int64_t threads = pool.size(), panels = (n + kPanel - 1) / kPanel;
  const Tuning& tuning = pool.tuning();
  const int64_t task_rows = tuned(tuning.task_rows, most_rows), row_blocks = (m + task_rows - 1) / task_rows;
  const int64_t least = 1 + tuned(tuning.task_bytes, kTaskBytes) / (panel_bytes + 1);  // panels of a task
  const int64_t tasks = tuned(tuning.thread_tasks, 8) * threads;
  const int64_t most = (tasks + row_blocks - 1) / row_blocks, small = (panels + 15) / 16;
  int64_t groups = panels / least < most ? panels / least : most;
  groups = groups < small ? small : groups;
  groups = (groups + threads - 1) / threads * threads;
  groups = groups < panels ? groups : panels;
  run_tasks(pool, groups * row_blocks, m * panels * kPanel * k, [&](int64_t task, int worker) {
    const int64_t group = task / row_blocks, block = task % row_blocks;
    const int64_t panel = panels * group / groups, panel_end = panels * (group + 1) / groups;
    const int64_t units = (m + unit - 1) / unit, row = units * block / row_blocks * unit;
    const int64_t next = units * (block + 1) / row_blocks * unit, row_end = next < m ? next : m;
    if constexpr (requires { fn(panel, panel_end, row, row_end, worker); }) {
      fn(panel, panel_end, row, row_end, worker);
    } else {
      fn(panel, panel_end, row, row_end);
    }
  });
}

// Splits rows .. rows_end-1 into near-equal blocks of at most Most, and calls
// fn.template operator()<R>(first row, which block, how many blocks) for each.
template <int Most, class F>
EW_INLINE void for_blocks_of(int64_t row, int64_t row_end, const F& fn) {
  const int64_t rows = row_end - row, blocks = (rows + Most - 1) / Most;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = row + rows * i / blocks, end = row + rows * (i + 1) / blocks;
    with_rows<Most>(end - begin, [&]<int R>() { fn.template operator()<R>(begin, i, blocks); });
  }
}

// The same for so many rows that every block has Most of them, or one less, which takes less code.
template <int Most>
constexpr bool evenly(int64_t rows) {
  return rows >= Most * (Most - 1);
}
template <int Most, class F>
EW_INLINE void for_even_blocks_of(int64_t row, int64_t row_end, const F& fn) {
  const int64_t rows = row_end - row, blocks = (rows + Most - 1) / Most;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = row + rows * i / blocks, end = row + rows * (i + 1) / blocks;
    if (end - begin == Most) {
      fn.template operator()<Most>(begin, i, blocks);
    } else {
      fn.template operator()<Most - 1>(begin, i, blocks);
    }
  }
}

// What a block of rows prefetches while it goes over a panel. The only block runs ahead of itself; of several
// the first two fetch the halves of the next panel, since what they read is in the cache but for the first.
struct Ahead {
  const char* at;
  int64_t step;  // bytes on for every 128 of the panel
};
EW_INLINE Ahead ahead_of(const void* panel, int64_t panel_bytes, int64_t block, int64_t blocks) {
  const char* at = static_cast<const char*>(panel);
  if (blocks == 1) return {at + kAheadBytes, 128};
  if (block < 2) return {at + panel_bytes + block * panel_bytes / 2, 64};
  return {at, 0};
}
template <int Lines = 2>
EW_INLINE void prefetch(Ahead& ahead) {
  __builtin_prefetch(ahead.at);
  if constexpr (Lines == 2) __builtin_prefetch(ahead.at + 64);
  ahead.at += ahead.step;
}

// A panel's columns of rows row .. row+R-1.
template <int R, class Linear>
EW_INLINE void store_panel(F16 (&acc)[R][2], const Linear& a, int64_t row, int64_t panel) {
  store_block<R, 2>(acc, a, row, panel * kPanel);
}

}  // namespace
}  // namespace ew
