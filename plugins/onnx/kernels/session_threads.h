// The kernels' ThreadPool in this library: the threads of the session that calls an operator.
//
// The kernels know the class by its name alone (../cpu/kernels/parallel.h), and ../cpu/thread_pool.h has
// nothing to do with this library: its threads and onnxruntime's, which stay awake for a while too, would
// take the cores from each other.
#pragma once

#include <cstdint>

#include "../../cpu/tuning.h"
#include "api.h"

namespace ew {

class ThreadPool {
 public:
  // `threads`: how many the session has, its caller's among them.
  ThreadPool(const ort::Api& api, const OrtKernelContext* context, int threads)
      : api_(api), context_(context), threads_(threads) {}

  void run(int64_t tasks, void (*fn)(void*, int64_t, int), void* data);
  int size() const { return threads_; }
  const Tuning& tuning() const { return tuning_; }

 private:
  const ort::Api& api_;
  const OrtKernelContext* context_;
  const int threads_;
  const Tuning tuning_ = {};
};

}  // namespace ew
