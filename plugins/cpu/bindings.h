// Numpy arrays for what the extension gives back.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <vector>

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

}  // namespace ew
