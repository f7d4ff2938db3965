#include "session_threads.h"

#include <atomic>

namespace ew::ort {
namespace {

struct Region {
  std::atomic<int64_t> next{0};
  int64_t tasks;
  void (*fn)(void*, int64_t, int);
  void* data;
};

}  // namespace

// Each thread takes one task after the other, so that one which comes late costs no more than a task.
void SessionThreads::run(int64_t tasks, void (*fn)(void*, int64_t, int), void* data) {
  Region region{.tasks = tasks, .fn = fn, .data = data};
  const auto work = [](void* of, size_t worker) {
    Region& all = *static_cast<Region*>(of);
    for (int64_t task; (task = all.next.fetch_add(1, std::memory_order_relaxed)) < all.tasks;) {
      all.fn(all.data, task, static_cast<int>(worker));
    }
  };
  api_.parallel_for(context_, work, static_cast<size_t>(threads_), &region);
}

}  // namespace ew::ort
