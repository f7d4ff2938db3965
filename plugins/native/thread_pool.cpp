#include "thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "cores.h"
#include "spin.h"

namespace ew {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kNoticed = std::chrono::microseconds(1);
constexpr int64_t kMostTasks = int64_t{1} << 30;  // of a region, so that two numbers of tasks fit in 64 bits

// The pool whose task this thread is in the middle of, and as which worker.
thread_local const ThreadPool* running_pool = nullptr;
thread_local int running_worker = 0;

// Tasks begin .. end-1 of a share.
constexpr uint64_t pack(uint32_t begin, uint32_t end) { return uint64_t{end} << 32 | begin; }
constexpr uint32_t begin_of(uint64_t left) { return static_cast<uint32_t>(left); }
constexpr uint32_t end_of(uint64_t left) { return static_cast<uint32_t>(left >> 32); }
constexpr bool is_empty(uint64_t left) { return begin_of(left) >= end_of(left); }

// Takes one task, from the front or from the back; false if there is none. Acquire: what the caller wrote
// before it published the region is visible to whoever takes one of its tasks. That a share may have been
// filled anew in the meantime does no harm: then it is a task of the new region that was taken.
template <bool Front>
bool take(std::atomic<uint64_t>& share, uint32_t* task) {
  uint64_t left = share.load(std::memory_order_relaxed);
  while (!is_empty(left)) {
    const uint32_t begin = begin_of(left), end = end_of(left);
    const uint64_t rest = Front ? pack(begin + 1, end) : pack(begin, end - 1);
    if (share.compare_exchange_weak(left, rest, std::memory_order_acquire, std::memory_order_relaxed)) {
      *task = Front ? begin : end - 1;
      return true;
    }
  }
  return false;
}

std::chrono::nanoseconds spin_of(const Tuning& tuning) {
  return tuning.spin_microseconds > 0 ? std::chrono::microseconds(tuning.spin_microseconds) : kSpin;
}

int checked(int threads) {
  if (threads > ThreadPool::kMaxThreads) {
    throw std::invalid_argument("threads = " + std::to_string(threads) + " is above " +
                                std::to_string(ThreadPool::kMaxThreads));
  }
  return std::max(threads, 1);
}

}  // namespace

void Fetching::expect(const Upcoming* next, int worker, int threads) {
  if (next == next_) return;
  next_ = next;
  left_ = 0;
  if (next == nullptr || (next->caller_busy && worker == 0)) return;
  streams_ = next->streams;
  left_ = next->bytes;
  worker_ = worker - next->caller_busy;
  threads_ = threads - next->caller_busy;
  at_ = end_ = nullptr;
  part_ = -1;
}

bool Fetching::some() {
  if (left_ <= 0) return false;
  while (at_ == end_) {
    if (streams_.empty()) return false;
    const Stream& stream = streams_.front();
    if (part_ < 0) part_ = stream.parts * worker_ / threads_, array_ = 0;
    if (part_ == stream.parts * (worker_ + 1) / threads_) {
      streams_ = streams_.subspan(1);
      part_ = -1;
      continue;
    }
    const Stream::Array& array = stream.arrays[array_];
    at_ = array.data + part_ * array.part_bytes;
    end_ = at_ + array.part_bytes;
    if (++array_ == std::size(stream.arrays)) array_ = 0, ++part_;
  }
  for (int line = 0; line < 8 && at_ < end_; ++line, at_ += 64) __builtin_prefetch(at_, 0, 2);
  at_ = std::min(at_, end_);
  left_ -= 512;
  return true;
}

ThreadPool::ThreadPool(int threads, Binding binding, const Tuning& tuning)
    : size_(checked(threads)),
      process_(getpid()),
      tuning_(tuning),
      shares_(new Share[static_cast<size_t>(size_)]),
      fetching_(new OwnFetching[static_cast<size_t>(size_)]),
      marks_(static_cast<size_t>(size_)) {
  count_cores();
  const std::vector<int> cores = binding == Binding::cores ? usable_cores() : std::vector<int>();
  workers_.reserve(static_cast<size_t>(size_ - 1));
  try {
    for (int worker = 1; worker < size_; ++worker) {
      workers_.emplace_back([this, worker] { work(worker); });
      if (!cores.empty()) bind_to_core(workers_.back(), cores[static_cast<size_t>(worker) % cores.size()]);
    }
  } catch (...) {  // no destructor runs, and a thread that is not joined ends the process
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

// In a forked child a join would be for whichever thread has a worker's stack by now, and shares_ may be in
// the middle of a region: both are left as they are, for good.
void ThreadPool::stop() {
  if (getpid() != process_) {
    new std::vector<std::thread>(std::move(workers_));
    return;
  }
  stop_.store(true, std::memory_order_release);
  wake_.fetch_add(1, std::memory_order_release);
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

// With more threads than cores a thread that spins holds the core that another needs to make work.
void ThreadPool::count_cores() {
  const bool crowded = size_ > std::min(count_usable_cores(), most_cores_);
  spin_.store(crowded ? std::chrono::nanoseconds(0) : spin_of(tuning_), std::memory_order_relaxed);
  if (crowded) next_ = nullptr;
}

void ThreadPool::limit_cores(int cores) {
  most_cores_ = cores;
  count_cores();
}

void ThreadPool::wake() {
  if (size_ > 1) count_cores();
  if (sleepers_.load(std::memory_order_relaxed) == 0) return;
  wake_.fetch_add(1, std::memory_order_release);
  wake_.notify_all();
}

std::vector<std::vector<Mark>> ThreadPool::trace(bool on) {
  tracing_.store(on, std::memory_order_relaxed);  // who takes a task of a later region sees it
  return std::exchange(marks_, std::vector<std::vector<Mark>>(static_cast<size_t>(size_)));
}

void ThreadPool::keep_mark(int worker, int32_t what) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  marks_[static_cast<size_t>(worker)].push_back(
      {std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), what});
}

void ThreadPool::run(int64_t tasks, void (*fn)(void*, int64_t, int), void* context) {
  parallel_for(tasks, [fn, context](int64_t task, int worker) { fn(context, task, worker); });
}

void ThreadPool::run_shared(int64_t tasks, Call call, const void* context) {
  if (running_pool == this) {  // waiting for others from within a task could be waiting for oneself
    for (int64_t task = 0; task < tasks; ++task) call(context, task, running_worker);
    return;
  }
  for (int64_t base = 0; base < tasks; base += kMostTasks) {
    run_region(static_cast<uint32_t>(std::min(tasks - base, kMostTasks)), base, call, context);
  }
}

// No fence between publishing and looking for sleepers: it would wait for the lines of all shares. A worker
// that goes to sleep just then may miss the region, whose tasks then are done by others; the next one wakes
// it.
void ThreadPool::run_region(uint32_t tasks, int64_t base, Call call, const void* context) {
  const uint32_t before = finished_.load(std::memory_order_relaxed);
  const int shares = static_cast<int>(std::min<int64_t>(tasks, size_));
  for (int worker = shares - 1; worker >= 0; --worker) {
    Share& share = shares_[static_cast<size_t>(worker)];
    share.call = call;
    share.context = context;
    share.base = base;
    share.shares = shares;
    share.next = next_;
    const uint64_t begin = uint64_t{tasks} * static_cast<uint64_t>(worker) / static_cast<uint64_t>(shares);
    const uint64_t end = uint64_t{tasks} * static_cast<uint64_t>(worker + 1) / static_cast<uint64_t>(shares);
    // The caller's first task is never in its share: taking it there would wait until the others' lines came.
    share.left.store(pack(static_cast<uint32_t>(begin) + (worker == 0), static_cast<uint32_t>(end)),
                     std::memory_order_release);
  }
  wake();
  const uint32_t expected = before + tasks - take_tasks(0);
  const auto done = [&] { return finished_.load(std::memory_order_acquire) == expected; };
  fetch_until(0, done);
  if (!spin_until(done, spin())) {
    caller_sleeps_.store(true);
    for (uint32_t now; (now = finished_.load()) != expected;) finished_.wait(now);
    caller_sleeps_.store(false, std::memory_order_relaxed);
  }
  mark(0, Mark::kRegionEnd);
}

// Does what is left of the worker's share, then of the others'; returns how many tasks that were. A worker
// counts them as finished, and must not touch the region after that.
uint32_t ThreadPool::take_tasks(int worker) {
  Share& own = shares_[static_cast<size_t>(worker)];
  uint32_t task = 0, done = 0;
  bool given = worker == 0;                           // task 0
  const ThreadPool* const outer_pool = running_pool;  // a task of that pool may have called this one
  const int outer_worker = running_worker;
  running_pool = this;
  running_worker = worker;
  while (std::exchange(given, false) || take<true>(own.left, &task)) {
    if (done == 0) mark(worker, Mark::kTasksBegin);
    own.call(own.context, own.base + task, worker);
    ++done;
  }
  // Without a task of its own it may not read the share: the region may be over. The caller's is stable.
  const int shares = done > 0 || worker == 0 ? own.shares : 0;
  for (int i = 1; i < shares; ++i) {
    Share& other = shares_[static_cast<size_t>((worker + i) % shares)];
    while (take<false>(other.left, &task)) {
      other.call(other.context, other.base + task, worker);
      ++done;
    }
  }
  if (done > 0) {
    fetching_[static_cast<size_t>(worker)].own.expect(own.next, worker, size_);
    mark(worker, Mark::kTasksEnd);
  }
  running_pool = outer_pool;
  running_worker = outer_worker;
  if (worker != 0 && done > 0) {
    finished_.fetch_add(done);  // in one order with caller_sleeps_: one of the two sees the other
    if (caller_sleeps_.load()) finished_.notify_one();
  }
  return done;
}

template <class Ready>
void ThreadPool::fetch_until(int worker, const Ready& ready) {
  Fetching& fetching = fetching_[static_cast<size_t>(worker)].own;
  while (!ready() && fetching.some()) {
  }
}

void ThreadPool::work(int worker) {
  const Share& own = shares_[static_cast<size_t>(worker)];
  const auto called = [&] {
    return !is_empty(own.left.load(std::memory_order_relaxed)) || stop_.load(std::memory_order_relaxed);
  };
  while (!stop_.load(std::memory_order_acquire)) {
    if (take_tasks(worker) > 0) fetch_until(worker, called);
    if (spin_until(called, spin())) continue;
    const uint32_t seen = wake_.load(std::memory_order_acquire);
    sleepers_.fetch_add(1);
    // Once more for a microsecond: what a caller published who didn't see the sleeper is visible by then.
    if (!spin_until(called, kNoticed)) wake_.wait(seen, std::memory_order_acquire);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace ew
