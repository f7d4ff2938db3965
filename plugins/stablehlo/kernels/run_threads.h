// The kernels' ThreadPool in this library: the threads of the XLA client that runs the module.
//
// Threads of our own would take the cores from XLA's, which run the rest of the module. See
// ../../onnx/kernels/session_threads.h, which does the same there.
#pragma once

#include <cstdint>

#include "../../cpu/tuning.h"
#include "call_frame.h"

namespace ew {

class ThreadPool {
 public:
  explicit ThreadPool(const xla::CallFrame& frame);

  void run(int64_t tasks, void (*fn)(void*, int64_t, int), void* data);
  int size() const { return size_; }
  const Tuning& tuning() const { return tuning_; }

 private:
  const xla::CallFrame& frame_;
  int size_ = 1;  // the caller's thread among them
  const Tuning tuning_ = {};
};

}  // namespace ew
