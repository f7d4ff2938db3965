// A pool of threads for the kernels: spin briefly, then sleep.
//
// A step of a model has hundreds of short parallel regions, so a worker that has just finished one spins for
// some tens of microseconds before it sleeps, and the next region costs no system call. Every spin is
// bounded: when another process holds a core, barriers that only spin lose a hundredfold. The caller takes
// tasks itself and waits only for tasks that a worker has begun, never for a worker that has not woken up.
//
// Everything that is not a template lives in thread_pool.cpp, so that files compiled for a wider instruction
// set do not leave copies of it that the linker could pick for all.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace ew {

class ThreadPool {
 public:
  static constexpr int kMaxThreads = 1024;

  // `threads` counts the caller, so `threads - 1` workers are started; values below 1 mean 1. Throws
  // std::invalid_argument above kMaxThreads, std::system_error if the system refuses a thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Calls fn(int64_t task, int worker) for every task in [0, tasks) and returns when all are done. Tasks are
  // handed out in ascending order; worker is in [0, size()) and 0 is the caller. fn must not throw. A
  // parallel_for within a task runs on that task's thread alone; what it keeps by worker is the outer
  // region's too, so it should keep nothing. Only one thread may use a pool at a time.
  template <class F>
  void parallel_for(int64_t tasks, const F& fn) {
    if (tasks <= 1 || size_ == 1) {
      for (int64_t task = 0; task < tasks; ++task) fn(task, 0);
      return;
    }
    run(
        tasks,
        [](const void* context, int64_t task, int worker) {
          (*static_cast<const F*>(context))(task, worker);
        },
        &fn);
  }

 private:
  using Call = void (*)(const void* context, int64_t task, int worker);

  void run(int64_t tasks, Call call, const void* context);
  bool take_tasks(int worker);
  void work(int worker);
  void stop();

  const int size_;
  // How many tasks of the present region are not yet taken. A worker that decrements it has a task, and until
  // that task is done the caller does not return, so the region's fields below are stable while they are
  // read.
  alignas(64) std::atomic<int64_t> untaken_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};  // changes with every region; sleeping workers wait on it
  std::atomic<bool> stop_{false};
  Call call_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  std::vector<std::thread> workers_;
};

}  // namespace ew
