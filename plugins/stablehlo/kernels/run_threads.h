// The workers of the kernels that this library calls: the threads of the XLA client that runs the module.
//
// Threads of our own would take the cores from XLA's, which run the rest of the module. See
// ../../onnx/kernels/session_threads.h, which does the same there.
#pragma once

#include <cstdint>

#include "../../cpu/kernels/parallel.h"
#include "call_frame.h"

namespace ew::xla {

class RunThreads final : public Workers {
 public:
  explicit RunThreads(const CallFrame& frame);

  void run(int64_t tasks, void (*fn)(void*, int64_t, int), void* data) override;
  int size() const override { return size_; }
  const Tuning& tuning() const override { return tuning_; }

 private:
  const CallFrame& frame_;
  int size_ = 1;  // the caller's thread among them
  const Tuning tuning_ = {};
};

}  // namespace ew::xla
