#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace ew {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

// The pool whose task this thread is in the middle of, and as which worker.
thread_local const ThreadPool* running_pool = nullptr;
thread_local int running_worker = 0;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() or the limit; returns whether it is ready. The clock is read once in a few dozen
// pauses.
template <class Ready>
bool spin_until(const Ready& ready) {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    pause();
  }
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

int checked(int threads) {
  if (threads > ThreadPool::kMaxThreads) {
    throw std::invalid_argument("threads = " + std::to_string(threads) + " is above " +
                                std::to_string(ThreadPool::kMaxThreads));
  }
  return std::max(threads, 1);
}

}  // namespace

ThreadPool::ThreadPool(int threads) : size_(checked(threads)) {
  workers_.reserve(static_cast<size_t>(size_ - 1));
  try {
    for (int worker = 1; worker < size_; ++worker) workers_.emplace_back([this, worker] { work(worker); });
  } catch (...) {  // no destructor runs, and a thread that is not joined ends the process
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stop_.store(true, std::memory_order_release);
  wake_.fetch_add(1, std::memory_order_release);
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t tasks, Call call, const void* context) {
  if (running_pool == this) {  // waiting for others from within a task could be waiting for oneself
    for (int64_t task = 0; task < tasks; ++task) call(context, task, running_worker);
    return;
  }
  count_ = tasks;
  call_ = call;
  context_ = context;
  unfinished_.store(tasks, std::memory_order_relaxed);
  untaken_.store(tasks, std::memory_order_release);  // publishes the fields above
  wake_.fetch_add(1, std::memory_order_release);
  wake_.notify_all();  // a system call only if someone sleeps
  take_tasks(0);
  const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  if (spin_until(finished)) return;
  for (int64_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) {
    unfinished_.wait(left, std::memory_order_acquire);
  }
}

bool ThreadPool::take_tasks(int worker) {
  int64_t done = 0;
  int64_t left = untaken_.load(std::memory_order_relaxed);
  const ThreadPool* const outer_pool = running_pool;  // a task of that pool may have called this one
  const int outer_worker = running_worker;
  running_pool = this;
  running_worker = worker;
  while (left > 0) {
    // Acquire: what the caller wrote before it published this region is visible to whoever takes one of its
    // tasks.
    if (!untaken_.compare_exchange_weak(left, left - 1, std::memory_order_acquire, std::memory_order_relaxed))
      continue;
    call_(context_, count_ - left, worker);
    ++done;
    left = untaken_.load(std::memory_order_relaxed);
  }
  running_pool = outer_pool;
  running_worker = outer_worker;
  if (done == 0) return false;
  if (unfinished_.fetch_sub(done, std::memory_order_acq_rel) == done && worker != 0) unfinished_.notify_one();
  return true;
}

void ThreadPool::work(int worker) {
  while (true) {
    const uint32_t seen = wake_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_acquire)) return;
    if (take_tasks(worker)) continue;
    const auto called = [this, seen] { return wake_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(called)) wake_.wait(seen, std::memory_order_acquire);
  }
}

}  // namespace ew
