// How the kernels reach threads. Nothing here is inline but what has internal linkage: see kernels.h.
#pragma once

#include <cstdint>

#include "exported.h"
#include "tuning.h"

namespace ew {

// The threads that run a kernel's tasks. Each library that calls kernels has its own:
// ../../native/thread_pool.h for the extension, the session's in ../../onnx/kernels, and XLA's in
// ../../stablehlo/kernels.
class EW_EXPORTED Workers {
 public:
  virtual ~Workers();

  // fn(context, task, worker) for every task in 0 .. tasks-1, in any order; returns when all are done. Worker
  // is in 0 .. size()-1.
  virtual void run(int64_t tasks, void (*fn)(void* context, int64_t task, int worker), void* context) = 0;
  virtual int size() const = 0;
  virtual const Tuning& tuning() const = 0;
};

namespace {

// Work below this many units (about one multiply-add each, some 2 microseconds) isn't worth waking anybody
// for.
constexpr int64_t kSmallWork = 1 << 16;

// What was chosen for the machine, or else the kernel's own.
inline int64_t tuned(int64_t chosen, int64_t own) { return chosen > 0 ? chosen : own; }
inline int64_t small_work(const Workers& pool) { return tuned(pool.tuning().small_work, kSmallWork); }

// fn(task, worker) for every task; on the calling thread alone, in order, if `work` is small.
template <class F>
void run_tasks(Workers& pool, int64_t tasks, int64_t work, const F& fn) {
  if (tasks <= 1 || work < small_work(pool) || pool.size() == 1) {
    for (int64_t task = 0; task < tasks; ++task) fn(task, 0);
    return;
  }
  pool.run(
      tasks, [](void* context, int64_t task, int worker) { (*static_cast<const F*>(context))(task, worker); },
      const_cast<F*>(&fn));
}

// fn(begin, end), or fn(begin, end, worker), over pieces of 0 .. rows-1; `row_work` units of work a row.
template <class F>
void run_rows(Workers& pool, int64_t rows, int64_t row_work, const F& fn) {
  if (rows <= 0) return;
  const int64_t work = rows * row_work;
  int64_t tasks = work / (small_work(pool) / 4 + 1);
  const int64_t most = 4 * static_cast<int64_t>(pool.size());
  tasks = tasks > most ? most : tasks;
  tasks = tasks > rows ? rows : tasks < 1 ? 1 : tasks;
  run_tasks(pool, tasks, work, [&](int64_t task, int worker) {
    const int64_t begin = rows * task / tasks, end = rows * (task + 1) / tasks;
    if constexpr (requires { fn(begin, end, worker); }) {
      fn(begin, end, worker);
    } else {
      fn(begin, end);
    }
  });
}

}  // namespace
}  // namespace ew
