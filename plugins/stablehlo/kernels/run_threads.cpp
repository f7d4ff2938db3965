#include "run_threads.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "../../native/spin.h"

namespace ew::xla {
namespace {

constexpr int64_t kMostThreads = 1024;
constexpr auto kSpin = std::chrono::microseconds(50);  // as ThreadPool

// Of a call: whoever comes takes one task after the other. A thread may come when all is done and the call is
// over, so each of them holds the region.
struct Region {
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<int> workers{1};  // the caller is number 0
  std::atomic<int> over{0};     // 1 when all tasks are done; the caller sleeps on it
  int64_t tasks;
  void (*fn)(void*, int64_t, int);
  void* data;

  void work(int worker) {
    int64_t count = 0;
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks; ++count) {
      fn(data, task, worker);
    }
    if (count && done.fetch_add(count, std::memory_order_acq_rel) + count == tasks) {
      over.store(1, std::memory_order_release);
      over.notify_one();
    }
  }
};

// XLA's own, or null; an error is destroyed.
bool failed(const XlaFfiApi& api, XlaFfiError* error) {
  if (!error) return false;
  XlaFfiErrorDestroyArgs args = {sizeof(args), nullptr, error};
  api.destroy_error(&args);
  return true;
}

}  // namespace

RunThreads::RunThreads(const CallFrame& frame) : frame_(frame) {
  int64_t threads = 1;
  XlaFfiThreadsArgs args = {sizeof(args), nullptr, frame.context(), &threads};
  if (!failed(frame.api(), frame.api().threads(&args))) {
    size_ = static_cast<int>(std::clamp<int64_t>(threads, 1, kMostThreads));
  }
}

// The caller waits for tasks that others have begun, never for a thread that hasn't come.
void RunThreads::run(int64_t tasks, void (*fn)(void*, int64_t, int), void* data) {
  if (tasks <= 0) return;
  auto region = std::make_shared<Region>();
  region->tasks = tasks, region->fn = fn, region->data = data;
  const int64_t others = std::min<int64_t>(size_, tasks) - 1;
  for (int64_t i = 0; i < others; ++i) {
    auto held = std::make_unique<std::shared_ptr<Region>>(region);
    const auto work = [](void* of) {
      const std::unique_ptr<std::shared_ptr<Region>> own(static_cast<std::shared_ptr<Region>*>(of));
      (*own)->work((*own)->workers.fetch_add(1, std::memory_order_relaxed));
    };
    XlaFfiScheduleArgs args = {sizeof(args), nullptr, frame_.context(), work, held.get()};
    if (failed(frame_.api(), frame_.api().schedule(&args))) break;
    held.release();
  }
  region->work(0);
  const auto over = [&] { return region->over.load(std::memory_order_acquire) != 0; };
  if (!spin_until(over, kSpin)) region->over.wait(0, std::memory_order_acquire);
}

}  // namespace ew::xla
