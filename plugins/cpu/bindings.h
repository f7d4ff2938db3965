// What the files of the extension have in common: numpy arrays for what it gives back, and the inputs of a
// step.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
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
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span(const Vector<T>& array) {
  return {array.data(), array.size()};
}

using Groups = std::vector<std::pair<Vector<int32_t>, Matrix<int32_t>>>;

inline StepArrays step_arrays(const Vector<int32_t>& ids, const Vector<int32_t>& positions,
                              const Vector<int32_t>& q_start, const Vector<int32_t>& kv_len,
                              const Vector<int32_t>& rows, const Groups& groups) {
  StepArrays inputs{span(ids), span(positions), span(q_start), span(kv_len), span(rows), {}};
  for (const auto& [slots, table] : groups) {
    if (table.shape(0) != kv_len.size())
      throw std::invalid_argument("a block table must have B = " + std::to_string(kv_len.size()) + " rows");
    inputs.groups.push_back(
        {span(slots), {table.data(), table.size()}, static_cast<int64_t>(table.shape(1))});
  }
  return inputs;
}

void bind_rank_link(nb::module_& m);  // rank_bindings.cpp; after Exchange and Executor

}  // namespace ew
