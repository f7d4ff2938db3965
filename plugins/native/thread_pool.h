// A pool of threads for the kernels: a share of the tasks for each thread, stealing, and short waits.
//
// A step of a model has hundreds of short parallel regions. A region's tasks are cut into one contiguous
// share a thread. Each share is a cache line of its own that says all a worker needs to know: its thread
// spins on it, takes tasks from its front, and when it is empty, from the backs of the others' shares. So a
// region that is even costs one line there and one back, and no line is fought for.
//
//   share 0 | 0 1 2 3 |   share 1 | 4 5 6 7 |          thread 1 is done: it takes 3, while thread 0 is at 1
//             ^ thread 0 takes here      ^ thieves
//
// A worker that has nothing to do spins for some tens of microseconds before it sleeps, so that the next
// region costs no system call. Every spin is bounded: when another process holds a core, barriers that only
// spin lose a hundredfold. The caller takes what nobody has begun, and waits only for tasks that a worker has
// begun, never for a worker that has not woken up.
//
// Everything that is not a template lives in thread_pool.cpp, so that files compiled for a wider instruction
// set do not leave copies of it that the linker could pick for all.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "../cpu/kernels/parallel.h"
#include "../cpu/kernels/tuning.h"

namespace ew {

// Bound: worker w stays on the w-th of the cores that the process may use (in turn, if there are fewer). The
// caller's thread is the caller's own matter.
enum class Binding { none, cores };

class ThreadPool final : public Workers {
 public:
  static constexpr int kMaxThreads = 1024;

  // `threads` counts the caller, so `threads - 1` workers are started; values below 1 mean 1. Throws
  // std::invalid_argument above kMaxThreads, std::system_error if the system refuses a thread.
  explicit ThreadPool(int threads, Binding binding = Binding::none, const Tuning& tuning = {});
  // In a forked child, which has none of the workers, they are forgotten.
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const override { return size_; }
  const Tuning& tuning() const override { return tuning_; }

  // Wakes workers that sleep, so that they are there when the first region comes. Costs next to nothing if
  // none sleeps.
  void wake();

  // Calls fn(int64_t task, int worker) for every task in [0, tasks) and returns when all are done. Worker is
  // in [0, size()) and 0 is the caller. Of n threads number w begins with tasks * w / n, unless another has
  // taken that, and goes on in ascending order; what it then takes from others, it takes from their ends. fn
  // must not throw. A parallel_for within a task runs on that task's thread alone; what it keeps by worker is
  // the outer region's too, so it should keep nothing. Only one thread may use a pool at a time.
  template <class F>
  void parallel_for(int64_t tasks, const F& fn) {
    if (tasks <= 1 || size_ == 1) {
      for (int64_t task = 0; task < tasks; ++task) fn(task, 0);
      return;
    }
    run_shared(
        tasks,
        [](const void* context, int64_t task, int worker) {
          (*static_cast<const F*>(context))(task, worker);
        },
        &fn);
  }

  // The same for the kernels.
  void run(int64_t tasks, void (*fn)(void* context, int64_t task, int worker), void* context) override;

 private:
  using Call = void (*)(const void* context, int64_t task, int worker);

  // What `left` guards may be read by whoever has taken a task of the share, until it has counted that task
  // in finished_: the next region isn't published before.
  struct alignas(128) Share {       // two lines: some processors fetch them in pairs
    std::atomic<uint64_t> left{0};  // tasks that nobody has taken, see pack()
    Call call = nullptr;
    const void* context = nullptr;
    int64_t base = 0;  // of task 0
    int shares = 0;    // how many of the threads have one
  };

  void run_shared(int64_t tasks, Call call, const void* context);
  void run_region(uint32_t tasks, int64_t base, Call call, const void* context);
  uint32_t take_tasks(int worker);
  void work(int worker);
  void stop();

  const int size_;
  const int process_;  // that has the workers
  const Tuning tuning_;
  const std::chrono::nanoseconds spin_;  // of a worker without work
  std::unique_ptr<Share[]> shares_;
  alignas(128) std::atomic<uint32_t> finished_{
      0};  // tasks that workers have done, in all regions, modulo 2^32
  std::atomic<bool> caller_sleeps_{false};
  alignas(128) std::atomic<uint32_t> wake_{0};  // sleeping workers wait on it
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace ew
