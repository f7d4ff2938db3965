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
// A worker that has nothing to do fetches what it will read next, if the caller has said what that is; then
// it spins for some tens of microseconds before it sleeps, so that the next region costs no system call.
// Every spin is bounded: when another process holds a core, barriers that only spin lose a hundredfold. The
// caller takes what nobody has begun, and waits only for tasks that a worker has begun, never for a worker
// that has not woken up.
//
// Everything that is not a template lives in thread_pool.cpp, so that files compiled for a wider instruction
// set do not leave copies of it that the linker could pick for all.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "../cpu/kernels/parallel.h"
#include "../cpu/kernels/tuning.h"

namespace ew {

// Bound: worker w stays on the w-th of the cores that the process may use (in turn, if there are fewer). The
// caller's thread is the caller's own matter.
enum class Binding { none, cores };

// When a thread did what, for measurements: nanoseconds of the steady clock, and a number of the caller's
// from 0 on, or one of these.
struct Mark {
  static constexpr int32_t kTasksBegin = -1, kTasksEnd = -2, kRegionEnd = -3;
  int64_t at;
  int32_t what;
};

// Memory that tasks will read part by part, each of one size in each of some arrays: of n threads number w
// begins at part parts * w / n.
struct Stream {
  struct Array {
    const char* data = nullptr;
    int64_t part_bytes = 0;
  };
  int64_t parts = 0;
  Array arrays[3] = {};
};

// The memory that waiting threads fetch. Each fetches its share of each stream into its caches, up to
// `bytes`. With caller_busy the caller doesn't wait, so that the others fetch its share too, into a cache of
// all.
struct Upcoming {
  std::span<const Stream> streams;
  int64_t bytes = 0;
  bool caller_busy = false;
};

// A thread's progress in that.
class Fetching {
 public:
  // Goes on where it was if it is the same.
  void expect(const Upcoming* next, int worker, int threads);
  bool some();  // fetches a few lines; false if there is nothing left to fetch

 private:
  const Upcoming* next_ = nullptr;
  std::span<const Stream> streams_;  // left of it
  int64_t left_ = 0;                 // bytes, of all streams
  int worker_ = 0, threads_ = 1;
  int64_t part_ = -1;  // of the first of streams_; -1: it hasn't begun
  size_t array_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
};

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

  // Wakes workers that sleep, so that they are there when the first region comes, and counts the cores of the
  // caller's affinity, which may have changed. Costs a system call if none sleeps.
  void wake();

  // The process has a quota of CPU time of so many cores, on whichever cores it runs.
  void limit_cores(int cores);

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

  // Sets the memory that threads fetch while they wait in later regions, or behind them; null: none. The
  // caller keeps it as long as the pool. Where there are more threads than cores, nothing is fetched.
  void fetch_next(const Upcoming* next) {
    if (spin().count() > 0) next_ = next;
  }

  // From now on marks are kept, or no longer. Returns those that were, by worker. No region may be running.
  std::vector<std::vector<Mark>> trace(bool on);
  void mark(int worker, int32_t what) {
    if (tracing_.load(std::memory_order_relaxed)) keep_mark(worker, what);
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
    const Upcoming* next = nullptr;
  };
  struct alignas(128) OwnFetching {
    Fetching own;
  };

  void run_shared(int64_t tasks, Call call, const void* context);
  void run_region(uint32_t tasks, int64_t base, Call call, const void* context);
  uint32_t take_tasks(int worker);
  template <class Ready>
  void fetch_until(int worker, const Ready& ready);  // or until there is nothing left to fetch
  void work(int worker);
  void stop();
  void keep_mark(int worker, int32_t what);
  void count_cores();
  std::chrono::nanoseconds spin() const { return spin_.load(std::memory_order_relaxed); }

  const int size_;
  const int process_;  // that has the workers
  const Tuning tuning_;
  int most_cores_ = kMaxThreads;                  // by a quota
  std::atomic<std::chrono::nanoseconds> spin_{};  // of a thread without work
  std::unique_ptr<Share[]> shares_;
  std::unique_ptr<OwnFetching[]> fetching_;  // each is its thread's alone
  const Upcoming* next_ = nullptr;
  alignas(128) std::atomic<uint32_t> finished_{
      0};  // tasks that workers have done, in all regions, modulo 2^32
  std::atomic<bool> caller_sleeps_{false};
  alignas(128) std::atomic<uint32_t> wake_{0};  // sleeping workers wait on it
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> tracing_{false};
  std::vector<std::vector<Mark>> marks_;
  std::vector<std::thread> workers_;
};

}  // namespace ew
