// What may be chosen for a machine and a model: how work is cut into tasks, and how long threads wait awake.
// None of it enters the order of a sum: results are the same bits for any choice (docs/inside/numerics.md).
#pragma once

#include <cstdint>

namespace ew {

// 0 takes the kernels' own choice, which stands where it is used.
struct Tuning {
  int64_t small_work = 0;         // multiply-adds below which nobody is woken (kernels/parallel.h)
  int64_t task_bytes = 0;         // of weights in a task of a linear, at least (kernels/linear_tasks.h)
  int64_t task_rows = 0;          // of a task of a linear, at most
  int64_t thread_tasks = 0;       // of a linear for each thread, about
  int64_t split_tiles = 0;        // attention with fewer tiles a thread splits its keys (kernels/attention.h)
  int64_t spin_microseconds = 0;  // that a thread without work stays awake (../../native/thread_pool.cpp)
};

}  // namespace ew
