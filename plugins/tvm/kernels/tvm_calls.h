// What libraries that TVM compiled call: a step of a program by our kernels, and a parallel loop on our
// threads.
//
// Both are C functions of TVM's ABI, and neither takes who calls: `enter` says it for the calling thread.
#pragma once

#include <cstdint>
#include <string>

#include "../../native/executor.h"

namespace ew {

// As TVM's FFI has a value (TVMFFIAny of tvm/ffi/c_api.h), 16 bytes:
//
//   | type, 4 bytes | 0, 4 bytes | an integer, a float or a pointer, 8 bytes |
struct TvmValue {
  int32_t type;
  uint32_t zero;
  int64_t value;
};
static_assert(sizeof(TvmValue) == 16);

// As TVM's runtime has a parallel loop (tvm/runtime/c_backend_api.h): each task does the `task`-th of
// `tasks` parts of it.
struct TvmParts {
  void* unused;
  int32_t tasks;
};
using TvmLoop = int (*)(int task, TvmParts* parts, void* context);

// From now on the calling thread's calls run on this executor, which has begun a step.
void enter(Executor& executor);

// Runs a step of the executor's program: its number is the only argument. A packed function of TVM, called
// `enginewright.run_step`. What goes wrong is kept for `raise_problem`, and no further step runs: raising
// would need TVM's library here.
int run_step_for_tvm(void* self, const TvmValue* arguments, int32_t count, TvmValue* result);

// Runs a loop on the executor's threads, in the place of TVMBackendParallelLaunch. `tasks` is 0: as many as
// there are threads.
int run_loop_for_tvm(TvmLoop loop, void* context, int tasks);

// Throws std::invalid_argument with what went wrong since `enter`, if anything did.
void raise_problem();

}  // namespace ew
