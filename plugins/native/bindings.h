// Declarations that the files of the extension share: numpy arrays for results, and the inputs of a step.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "executor.h"

namespace ew {

namespace nb = nanobind;

// A new numpy array, uninitialised; `data` is set to its memory.
template <class T>
nb::object new_array(std::vector<size_t> shape, T** data) {
  size_t count = 1;
  for (const size_t size : shape) count *= size;
  auto memory = std::make_unique_for_overwrite<T[]>(count);
  *data = memory.get();
  nb::capsule owner(memory.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
  memory.release();
  return nb::cast(nb::ndarray<nb::numpy, T>(*data, shape.size(), shape.data(), owner));
}

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A step's arrays by the names of the program's ports, as spans; holds the arrays, and copies of those that
// aren't contiguous. Throws std::invalid_argument that names the array which is missing, of another type or
// unknown.
struct HeldArrays {
  HeldArrays(const Program& program, const nb::dict& arrays);

  StepArrays step;
  std::vector<nb::object> held;
};

// The bindings in other files. Exchange and Executor must be bound before these.
void bind_rank_link(nb::module_& m);  // rank_bindings.cpp
void bind_tvm_calls(nb::module_& m);  // ../tvm/kernels/bindings.cpp

}  // namespace ew
