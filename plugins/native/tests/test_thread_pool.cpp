// The thread pool: every task once, memory ordering, uneven work, many regions, start and stop. Run it under
// TSan.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <ctime>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"
#include "cores.h"
#include "thread_pool.h"

namespace {

using ew::ThreadPool;

const int kSizes[] = {1, 2, 3, 8};

void every_task_runs_once() {
  for (const int size : kSizes) {
    ThreadPool pool(size);
    CHECK(pool.size() == size);
    for (const int64_t tasks : {0, 1, 2, 7, 64, 1000}) {
      std::vector<int> runs(static_cast<size_t>(tasks),
                            0);  // plain ints: TSan sees it if two threads share one
      std::vector<int64_t> by_worker(static_cast<size_t>(size) * 16, 0);
      pool.parallel_for(tasks, [&](int64_t task, int worker) {
        ++runs[task];
        ++by_worker[static_cast<size_t>(worker) * 16];
      });
      for (const int count : runs) CHECK(count == 1);
      CHECK(std::accumulate(by_worker.begin(), by_worker.end(), int64_t{0}) == tasks);
    }
  }
}

// All threads are in tasks that hand out tasks: whoever waited for another would wait for ever.
void tasks_within_tasks_run_where_they_are() {
  for (const int size : kSizes) {
    ThreadPool pool(size), other(2);
    std::vector<int> runs(64 * 8, 0);
    pool.parallel_for(64, [&](int64_t outer, int worker) {
      if (outer == 0) other.parallel_for(2, [](int64_t, int) {});  // which must not make the thread forget
      pool.parallel_for(8, [&](int64_t inner, int inner_worker) {
        CHECK(inner_worker == worker);
        ++runs[outer * 8 + inner];
      });
    });
    for (const int count : runs) CHECK(count == 1);
  }
}

void sizes_below_one_mean_one() {
  CHECK(ThreadPool(0).size() == 1);
  CHECK(ThreadPool(-3).size() == 1);
}

// A pool that can't be had throws, and leaves no thread behind: one that isn't joined would end the process.
void too_many_threads_are_refused() {
  CHECK_THROWS(ThreadPool(ThreadPool::kMaxThreads + 1), std::invalid_argument);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need address space themselves
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{256 << 20, 256 << 20};  // stacks for a few of them
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    try {
      const ThreadPool pool(ThreadPool::kMaxThreads);
    } catch (const std::system_error&) {
      _exit(0);
    }
    _exit(1);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(status == 0) << status;
#endif
}

// A forked child has none of the workers, and its own may have got their stacks.
void a_forked_child_forgets_the_workers() {
#if !defined(__SANITIZE_THREAD__)  // which starts no threads after a fork
  auto pool = std::make_unique<ThreadPool>(4);
  const pid_t child = fork();
  if (child == 0) {
    ThreadPool own(4);
    pool.reset();
    int64_t sum[4] = {};
    own.parallel_for(100, [&](int64_t task, int worker) { sum[worker] += task; });
    _exit(sum[0] + sum[1] + sum[2] + sum[3] == 4950 ? 0 : 1);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(status == 0) << status;
#endif
}

// What one region writes, the next one reads on other threads, without atomics.
void regions_see_each_other() {
  for (const int size : kSizes) {
    ThreadPool pool(size);
    std::vector<int64_t> values(97, 1);
    std::vector<int64_t> next(values.size());
    const int64_t count = static_cast<int64_t>(values.size());
    for (int round = 0; round < 300; ++round) {
      pool.parallel_for(count,
                        [&](int64_t i, int) { next[i] = (values[i] + values[(i + 1) % count]) % 1009; });
      values.swap(next);
    }
    std::vector<int64_t> expected(values.size(), 1);
    for (int round = 0; round < 300; ++round) {
      for (size_t i = 0; i < expected.size(); ++i)
        next[i] = (expected[i] + expected[(i + 1) % expected.size()]) % 1009;
      expected.swap(next);
    }
    CHECK(values == expected) << "size " << size;
  }
}

void one_slow_task_holds_nobody_else() {
  ThreadPool pool(2);
  std::vector<int> worker_of(200, -1);
  pool.parallel_for(200, [&](int64_t task, int worker) {
    if (task == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    worker_of[task] = worker;
  });
  int others = 0;
  for (const int worker : worker_of) others += worker != worker_of[0];
  CHECK(others >= 150) << others;
}

// Waits for ready(), and not for ever: false after half a minute.
template <class Ready>
bool comes(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!ready()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

// A thread is held by its first task until all others are done: so what is left of its share was taken from
// it.
void what_one_does_not_get_to_others_take() {
  for (const int size : {2, 3, 8}) {
    ThreadPool pool(size);
    const int64_t count = 40 * size;
    std::atomic<int64_t> begun{0};
    bool all_begun = false;
    pool.parallel_for(count, [&](int64_t task, int) {
      begun.fetch_add(1);
      if (task == 0) all_begun = comes([&] { return begun.load() == count; });
    });
    CHECK(all_begun) << "size " << size;
  }
}

// Waking is a hint, and may come at any time.
void a_pool_may_be_woken() {
  for (const int size : kSizes) {
    ThreadPool pool(size);
    for (int round = 0; round < 20; ++round) {
      if (round % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      pool.wake();
      std::vector<int> runs(30, 0);
      pool.parallel_for(30, [&](int64_t task, int) { ++runs[task]; });
      for (const int count : runs) CHECK(count == 1);
    }
  }
}

void bound_workers_stay_on_their_core() {
  const std::vector<int> cores = ew::usable_cores();
  CHECK(!cores.empty());
  for (const int size : {2, 5}) {
    ThreadPool pool(size, ew::Binding::cores);
    std::vector<std::vector<int>> cores_of(static_cast<size_t>(size));
    std::atomic<int> arrived{0};
    pool.parallel_for(size, [&](int64_t, int worker) {
      arrived.fetch_add(1);
      comes([&] { return arrived.load() == size; });  // so that each thread has just one task
      cores_of[static_cast<size_t>(worker)] = ew::usable_cores();
    });
    CHECK(cores_of[0] == cores);  // the caller's thread is left as it is
#if defined(__linux__)
    for (size_t worker = 1; worker < cores_of.size(); ++worker) {
      CHECK(cores_of[worker] == std::vector<int>{cores[worker % cores.size()]}) << worker;
    }
#endif
  }
}

// Whatever threads fetch while they wait, tasks run once each; and a pool may go while they fetch.
void threads_fetch_while_they_wait() {
  const std::vector<char> memory(6 << 20, 1);
  const ew::Stream some{7, {{memory.data(), 9000}, {memory.data() + (4 << 20), 100}}};
  const std::vector<ew::Stream> streams = {
      some, {}, {3, {{memory.data() + 5, 1}}}, {1, {{memory.data(), 4 << 20}}}};
  std::vector<ew::Upcoming> upcoming;
  for (size_t first = 0; first <= streams.size(); ++first) {
    for (const int64_t bytes : {int64_t{1} << 10, int64_t{1} << 17, int64_t{1} << 24}) {
      for (const bool busy : {false, true})
        upcoming.push_back({std::span(streams).subspan(first), bytes, busy});
    }
  }
  for (const int size : kSizes) {
    for (int round = 0; round < 60; ++round) {
      ThreadPool pool(size);
      const auto region = [&](const ew::Upcoming* next) {
        pool.fetch_next(next);
        std::vector<int> runs(5, 0);
        pool.parallel_for(5, [&](int64_t task, int) { ++runs[task]; });
        for (const int count : runs) CHECK(count == 1);
      };
      for (const ew::Upcoming& next : upcoming) region(&next);
      region(round % 2 == 0 ? nullptr : &upcoming.back());
    }
  }
}

// A thread's share of each stream, part by part of all arrays, and no more than it may.
void a_thread_fetches_its_own_share() {
  const std::vector<char> memory(1 << 16, 1);
  const std::vector<ew::Stream> streams = {{6, {{memory.data(), 1024}, {memory.data(), 64}}},
                                           {1, {{memory.data(), 512}}}};
  const auto calls = [&](const ew::Upcoming& next, int worker, int threads) {
    ew::Fetching fetching;
    fetching.expect(&next, worker, threads);
    int count = 0;
    while (fetching.some()) ++count;
    return count;
  };
  CHECK(calls({streams, 1 << 20}, 0, 2) == 3 * 3);      // half of the first: 2 calls and 1 a part
  CHECK(calls({streams, 1 << 20}, 1, 2) == 3 * 3 + 1);  // the second has one part, which is the last thread's
  CHECK(calls({streams, 1 << 20}, 0, 1) == 6 * 3 + 1);
  CHECK(calls({streams, 1 << 10}, 0, 1) == 2);
  CHECK(calls({streams, 1 << 20, true}, 0, 2) == 0);
  CHECK(calls({streams, 1 << 20, true}, 1, 2) == 6 * 3 + 1);
  CHECK(calls({{}, 1 << 20}, 0, 1) == 0);
  const ew::Upcoming all{streams, 1 << 20};
  ew::Fetching fetching;
  for (int round = 0; round < 3; ++round) {
    fetching.expect(&all, 0, 1);  // the same again: it goes on
    CHECK(fetching.some());
  }
  int rest = 0;
  while (fetching.some()) ++rest;
  CHECK(rest == 6 * 3 + 1 - 3);
  fetching.expect(nullptr, 0, 1);
  CHECK(!fetching.some());
}

// Marks of a thread are in order, and each begin of tasks has its end.
void marks_say_when_tasks_run() {
  ThreadPool pool(2);
  pool.parallel_for(4, [](int64_t, int) {});
  pool.trace(true);
  for (int round = 0; round < 50; ++round) {
    pool.mark(0, round);
    pool.parallel_for(4, [](int64_t, int) {});
  }
  const std::vector<std::vector<ew::Mark>> marks = pool.trace(false);
  pool.parallel_for(4, [](int64_t, int) {});
  CHECK(marks.size() == 2 && marks[0].size() == 50 * 4 && marks[1].size() % 2 == 0);
  for (const std::vector<ew::Mark>& thread : marks) {
    for (size_t i = 0; i < thread.size(); ++i) {
      CHECK(i == 0 || thread[i].at >= thread[i - 1].at);
      const int32_t before = i == 0 ? 0 : thread[i - 1].what;
      CHECK((thread[i].what == ew::Mark::kTasksEnd) == (before == ew::Mark::kTasksBegin));
    }
  }
  CHECK(pool.trace(false)[0].empty());
}

void sleeping_workers_wake_up() {
  ThreadPool pool(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // longer than they spin
    std::vector<int> runs(30, 0);
    pool.parallel_for(30, [&](int64_t task, int) {
      ++runs[task];
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
    for (const int count : runs) CHECK(count == 1);
  }
}

void pools_start_and_stop() {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(1 + round % 4);
    std::atomic<int> total{0};
    if (round % 3)
      pool.parallel_for(10, [&](int64_t, int) { total.fetch_add(1, std::memory_order_relaxed); });
    CHECK(total == (round % 3 ? 10 : 0));
  }
}

// More threads than cores, so that some are always descheduled: spinning must give way. A barrier that only
// spins takes minutes for this.
void crowds_get_through() {
  ThreadPool first(8);
  std::atomic<bool> stop{false};
  std::thread rival([&] {
    ThreadPool second(8);
    while (!stop) second.parallel_for(16, [](int64_t, int) {});
  });
  int64_t total = 0;
  for (int round = 0; round < 2000; ++round) {
    int64_t part[16] = {};
    first.parallel_for(16, [&](int64_t task, int) { part[task] = task; });
    total += std::accumulate(part, part + 16, int64_t{0});
  }
  stop = true;
  rival.join();
  CHECK(total == 2000 * 120);
}

#if defined(__linux__) && !defined(__SANITIZE_THREAD__)  // which hands a signal over later

int64_t nanoseconds(clockid_t clock) {
  timespec now;
  CHECK(clock_gettime(clock, &now) == 0);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

// CPU time that the process needs while this thread sleeps for a fifth of a second. Other processes don't
// count.
int64_t time_of_a_pause() {
  const int64_t before = nanoseconds(CLOCK_PROCESS_CPUTIME_ID);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - before;
}
constexpr int64_t kNoTime = 20'000'000;

// The longest that can be chosen: a thread that spins is seen by the time that it takes.
constexpr ew::Tuning kSpinsLong{.spin_microseconds = 1'000'000};

// Stops threads: whoever gets the signal waits in its handler until it is over. One at a time.
class Stopped {
 public:
  Stopped() {
    CHECK(pipe(ends_) == 0);
    arrived_ = 0;
    signal(SIGUSR1, [](int) {
      char byte;
      arrived_ = 1;
      while (read(ends_[0], &byte, 1) != 1) {
      }
      arrived_ = 0;
    });
  }
  ~Stopped() {
    go_on();
    close(ends_[0]);
    close(ends_[1]);
    signal(SIGUSR1, SIG_DFL);
  }
  void stop(pthread_t thread) {
    CHECK(pthread_kill(thread, SIGUSR1) == 0);
    CHECK(comes([] { return arrived_.load() == 1; }));
  }
  void go_on() {
    if (arrived_.load() == 0) return;
    CHECK(write(ends_[1], "x", 1) == 1);
    CHECK(comes([] { return arrived_.load() == 0; }));
  }

 private:
  static inline int ends_[2];
  static inline std::atomic<int> arrived_{0};
};

// The pool's threads by worker, each of which gets one task of a region.
std::vector<pthread_t> threads_of(ThreadPool& pool) {
  std::vector<pthread_t> threads(static_cast<size_t>(pool.size()));
  std::atomic<int> arrived{0};
  pool.parallel_for(pool.size(), [&](int64_t, int worker) {
    threads[static_cast<size_t>(worker)] = pthread_self();
    arrived.fetch_add(1);
    comes([&] { return arrived.load() == pool.size(); });
  });
  CHECK(arrived.load() == pool.size());
  return threads;
}

void region_is_right(ThreadPool& pool) {
  std::vector<int> runs(100, 0);
  pool.parallel_for(100, [&](int64_t task, int) { ++runs[static_cast<size_t>(task)]; });
  for (const int count : runs) CHECK(count == 1);
}

// In the middle of a task: the others do all the rest, and then whoever waits for that task sleeps.
void a_thread_stopped_in_a_task_keeps_that_task_alone() {
  for (const int size : {2, 3, 8}) {
    ThreadPool pool(size);
    Stopped stopped;
    const int64_t count = 40 * size;
    std::vector<int> runs(static_cast<size_t>(count), 0);
    std::atomic<int64_t> finished{0};
    std::atomic<bool> first{true};
    std::thread observer([&] {
      CHECK(comes([&] { return finished.load() == count - 1; })) << "size " << size;
      CHECK(comes([] { return time_of_a_pause() < kNoTime; })) << "size " << size;
      stopped.go_on();
    });
    pool.parallel_for(count, [&](int64_t task, int worker) {
      if (worker != 0 && first.exchange(false)) {
        raise(SIGUSR1);
      } else if (worker == 0 && first.load()) {
        comes([&] { return !first.load(); });  // so that a worker gets one
      }
      ++runs[static_cast<size_t>(task)];
      finished.fetch_add(1);
    });
    observer.join();
    for (const int times : runs) CHECK(times == 1) << "size " << size;
    region_is_right(pool);
  }
}

// Between two tasks, spinning or asleep: regions don't need it.
void a_thread_stopped_without_a_task_is_not_waited_for() {
  for (const ew::Tuning& tuning : {ew::Tuning{}, kSpinsLong}) {
    ThreadPool pool(3, ew::Binding::none, tuning);
    const std::vector<pthread_t> threads = threads_of(pool);
    for (size_t worker = 1; worker < threads.size(); ++worker) {
      Stopped stopped;
      stopped.stop(threads[worker]);
      for (int round = 0; round < 200; ++round) {
        pool.wake();
        region_is_right(pool);
      }
    }
    region_is_right(pool);
  }
}

// The thread that runs the step: no worker spins until it comes back.
void workers_sleep_while_the_caller_is_stopped() {
  ThreadPool pool(3);
  Stopped stopped;
  std::atomic<bool> stop{false};
  std::atomic<int> rounds{0};
  std::thread caller([&] {
    while (!stop) {
      region_is_right(pool);
      rounds.fetch_add(1);
    }
  });
  CHECK(comes([&] { return rounds.load() > 10; }));
  stopped.stop(caller.native_handle());
  CHECK(comes([] { return time_of_a_pause() < kNoTime; }));
  stop = true;
  stopped.go_on();
  caller.join();
}

void idle_threads_sleep() {
  ThreadPool pool(8);
  region_is_right(pool);
  CHECK(comes([] { return time_of_a_pause() < kNoTime; }));
}

// A worker holds its task while the caller has nothing left to do. Returns the CPU time of all threads
// meanwhile and after the region.
int64_t time_of_waiting(ThreadPool& pool) {
  const int64_t before = nanoseconds(CLOCK_PROCESS_CPUTIME_ID);
  std::atomic<bool> taken{false};
  pool.wake();
  pool.parallel_for(pool.size(), [&](int64_t, int worker) {
    if (worker == 0) {
      while (!taken.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else if (!taken.exchange(true)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - before;
}

void threads_do_not_spin_where_cores_are_too_few() {
  const int cores = static_cast<int>(ew::usable_cores().size());
  ThreadPool crowd(cores + 1, ew::Binding::none, kSpinsLong);
  CHECK(time_of_waiting(crowd) < 2 * kNoTime);
  ThreadPool pool(2, ew::Binding::none, kSpinsLong);
  pool.limit_cores(1);  // as with a quota of 1.5
  threads_of(pool);
  CHECK(time_of_waiting(pool) < 2 * kNoTime);
  region_is_right(pool);
}

void bind(const std::vector<pthread_t>& threads, const cpu_set_t& cores) {
  for (const pthread_t thread : threads) CHECK(pthread_setaffinity_np(thread, sizeof cores, &cores) == 0);
}

// While a pool is in use its cores become one, and then all again.
void cores_may_change() {
  cpu_set_t all, one;
  CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
  CPU_ZERO(&one);
  CPU_SET(static_cast<size_t>(ew::usable_cores().front()), &one);
  ThreadPool pool(2, ew::Binding::none, kSpinsLong);
  for (int round = 0; round < 2; ++round) {
    const std::vector<pthread_t> threads = threads_of(pool);
    bind(threads, one);
    pool.wake();
    threads_of(pool);  // spins that began before end here
    CHECK(time_of_waiting(pool) < 2 * kNoTime);
    bind(threads, all);
    pool.wake();
    region_is_right(pool);
  }
}

// The same in the middle of regions, again and again.
void cores_may_change_within_a_region() {
  cpu_set_t all;
  CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
  const std::vector<int> cores = ew::usable_cores();
  ThreadPool pool(3);
  const std::vector<pthread_t> threads = threads_of(pool);
  std::atomic<bool> stop{false};
  std::atomic<int> changes{0};
  std::thread changer([&] {
    while (!stop) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(static_cast<size_t>(cores[static_cast<size_t>(changes.load()) % cores.size()]), &one);
      bind(threads, one);
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      bind(threads, all);
      changes.fetch_add(1);
    }
  });
  while (changes.load() < 50) {
    pool.wake();
    region_is_right(pool);
  }
  stop = true;
  changer.join();
}

#endif

}  // namespace

int main() {
  RUN(every_task_runs_once);
  RUN(tasks_within_tasks_run_where_they_are);
  RUN(sizes_below_one_mean_one);
  RUN(too_many_threads_are_refused);
  RUN(a_forked_child_forgets_the_workers);
  RUN(regions_see_each_other);
  RUN(one_slow_task_holds_nobody_else);
  RUN(what_one_does_not_get_to_others_take);
  RUN(a_pool_may_be_woken);
  RUN(bound_workers_stay_on_their_core);
  RUN(threads_fetch_while_they_wait);
  RUN(a_thread_fetches_its_own_share);
  RUN(marks_say_when_tasks_run);
  RUN(sleeping_workers_wake_up);
  RUN(pools_start_and_stop);
  RUN(crowds_get_through);
#if defined(__linux__) && !defined(__SANITIZE_THREAD__)
  RUN(a_thread_stopped_in_a_task_keeps_that_task_alone);
  RUN(a_thread_stopped_without_a_task_is_not_waited_for);
  RUN(workers_sleep_while_the_caller_is_stopped);
  RUN(idle_threads_sleep);
  RUN(threads_do_not_spin_where_cores_are_too_few);
  RUN(cores_may_change);
  RUN(cores_may_change_within_a_region);
#endif
  return ew::check::result();
}
