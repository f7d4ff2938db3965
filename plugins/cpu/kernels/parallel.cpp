#include "parallel.h"

#include "../thread_pool.h"

namespace ew {

void pool_run(ThreadPool& pool, int64_t tasks, void (*fn)(void*, int64_t, int), void* context) {
  pool.parallel_for(tasks, [fn, context](int64_t task, int worker) { fn(context, task, worker); });
}

int pool_size(const ThreadPool& pool) { return pool.size(); }

const Tuning& pool_tuning(const ThreadPool& pool) { return pool.tuning(); }

}  // namespace ew
