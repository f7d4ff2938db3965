// The workers of the kernels that this library calls: the threads of the session that calls an operator.
//
// Those of ../../native/thread_pool.h aren't used here: they and onnxruntime's, which stay awake for a while
// too, would take the cores from each other.
#pragma once

#include <cstdint>

#include "../../cpu/kernels/parallel.h"
#include "api.h"

namespace ew::ort {

class SessionThreads final : public Workers {
 public:
  // `threads`: how many the session has, its caller's among them.
  SessionThreads(const Api& api, const OrtKernelContext* context, int threads)
      : api_(api), context_(context), threads_(threads) {}

  void run(int64_t tasks, void (*fn)(void*, int64_t, int), void* data) override;
  int size() const override { return threads_; }
  const Tuning& tuning() const override { return tuning_; }

 private:
  const Api& api_;
  const OrtKernelContext* context_;
  const int threads_;
  const Tuning tuning_ = {};
};

}  // namespace ew::ort
