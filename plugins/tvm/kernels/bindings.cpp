// The part of the extension module that libraries compiled by TVM need.
#include "../../native/bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "tvm_calls.h"

using namespace nanobind::literals;

namespace ew {
namespace {

// Begins a step whose calls the calling thread makes. Returns the executor's arena as bytes.
nb::object begin(nb::object self, const nb::dict& arrays) {
  Executor& executor = nb::cast<Executor&>(self);
  executor.begin(HeldArrays(executor.program(), arrays).step);
  enter(executor);
  const ZeroedMemory& arena = executor.resources().arena();
  const size_t size = static_cast<size_t>(arena.bytes()) & ~size_t{3};  // in whole floats
  return nb::cast(nb::ndarray<nb::numpy, uint8_t>(arena.data(), 1, &size, self));
}

}  // namespace

void bind_tvm_calls(nb::module_& m) {
  m.def("begin_for_tvm", &begin, "executor"_a, "arrays"_a);
  m.def("end_for_tvm", &raise_problem);
  m.attr("RUN_STEP_FOR_TVM") = reinterpret_cast<uintptr_t>(&run_step_for_tvm);
  m.attr("RUN_LOOP_FOR_TVM") = reinterpret_cast<uintptr_t>(&run_loop_for_tvm);
}

}  // namespace ew
