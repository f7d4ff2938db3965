#include "tvm_calls.h"

#include <atomic>
#include <stdexcept>
#include <utility>

namespace ew {
namespace {

thread_local Executor* entered = nullptr;
thread_local std::string problem;

}  // namespace

void enter(Executor& executor) {
  entered = &executor;
  problem.clear();
}

int run_step_for_tvm(void*, const TvmValue* arguments, int32_t count, TvmValue* result) {
  *result = {};
  if (!problem.empty()) return 0;
  try {
    if (!entered || count != 1) throw std::invalid_argument("a library called a step outside of a run");
    entered->run_step(arguments[0].value);
  } catch (const std::exception& e) {
    problem = e.what();
  }
  return 0;
}

int run_loop_for_tvm(TvmLoop loop, void* context, int tasks) {
  if (!entered) return -1;
  ThreadPool& pool = entered->resources().pool();
  TvmParts parts{nullptr, tasks > 0 ? tasks : pool.size()};
  std::atomic<int> result{0};
  pool.parallel_for(parts.tasks, [&](int64_t task, int) {
    TvmParts own = parts;
    const int code = loop(static_cast<int>(task), &own, context);
    if (code != 0) result.store(code, std::memory_order_relaxed);
  });
  return result.load(std::memory_order_relaxed);
}

void raise_problem() {
  if (problem.empty()) return;
  throw std::invalid_argument(std::exchange(problem, {}));
}

}  // namespace ew
