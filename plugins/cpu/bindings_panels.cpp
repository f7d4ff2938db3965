// Packing weights into the layouts that the kernels read, for Python. _cpu.pyi documents it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "bindings.h"
#include "kernels/operands.h"
#include "panels.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Of [N, K] or [E, N, K] with unit inner stride.
template <class T>
using Stack = nb::ndarray<const T, nb::device::cpu>;

template <class T>
ew::Matrices<T> matrices(const Stack<T>& rows) {
  const size_t rank = rows.ndim();
  if (rank != 2 && rank != 3) throw std::invalid_argument("rows of shape [N, K] or [E, N, K] are wanted");
  const auto size = [&](size_t i) { return static_cast<int64_t>(rows.shape(i)); };
  if (size(rank - 1) > 1 && rows.stride(rank - 1) != 1) {
    throw std::invalid_argument("the rows have no unit inner stride");
  }
  return {rows.data(),    rank == 3 ? size(0) : 1,        size(rank - 2),
          size(rank - 1), rank == 3 ? rows.stride(0) : 0, rows.stride(rank - 2)};
}

// pack(matrices, panels, pool) into a new array [.., ceil(N/32), `inner`..].
template <class U, class T, class Pack>
nb::object packed(const Stack<T>& rows, std::vector<size_t> inner, int threads, const Pack& pack) {
  const ew::Matrices<T> from = matrices(rows);
  const size_t panel = static_cast<size_t>(ew::kPanel);
  std::vector<size_t> shape{(static_cast<size_t>(from.n) + panel - 1) / panel};
  if (rows.ndim() == 3) shape.insert(shape.begin(), rows.shape(0));
  shape.insert(shape.end(), inner.begin(), inner.end());
  U* panels = nullptr;
  nb::object result = ew::new_array<U>(std::move(shape), &panels);
  nb::gil_scoped_release release;
  ew::ThreadPool pool(threads);
  pack(from, panels, pool);
  return result;
}

template <class T>
size_t width(const Stack<T>& rows, size_t step) {  // of panels that take `step` k at a time
  return rows.ndim() == 0 ? 0 : (rows.shape(rows.ndim() - 1) + step - 1) / step;
}

template <class T>
nb::object pack_panel32(const Stack<T>& rows, int threads) {
  return packed<T>(rows, {width(rows, 1), 32}, threads, &ew::pack_panel32<T>);
}
nb::object pack_panel32x2(const Stack<uint16_t>& rows, int threads) {
  return packed<uint16_t>(rows, {width(rows, 2), 32, 2}, threads, &ew::pack_panel32x2);
}
nb::object pack_panel32x4(const Stack<int8_t>& rows, int threads) {
  return packed<uint8_t>(rows, {width(rows, 4), 32, 4}, threads, &ew::pack_panel32x4);
}

template <class T>
using Panels = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;

template <class T, class U, class Unpack>
nb::object unpacked(const Panels<U>& panels, int64_t n, int64_t k, size_t step, const Unpack& unpack) {
  const size_t rows = static_cast<size_t>(n), columns = static_cast<size_t>(k);
  std::vector<size_t> shape{(rows + 31) / 32, (columns + step - 1) / step, 32};
  if (step > 1) shape.push_back(step);
  bool same = n >= 0 && k >= 0 && panels.ndim() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i) same = panels.shape(i) == shape[i];
  if (!same) throw std::invalid_argument("the panels are not those of a matrix [n, k]");
  T* to = nullptr;
  nb::object result = ew::new_array<T>({rows, columns}, &to);
  unpack(panels.data(), n, k, to);
  return result;
}

template <class T>
nb::object unpack_panel32(const Panels<T>& panels, int64_t n) {
  const int64_t k = panels.ndim() == 3 ? static_cast<int64_t>(panels.shape(1)) : -1;
  return unpacked<T>(panels, n, k, 1, &ew::unpack_panel32<T>);
}
nb::object unpack_panel32x2(const Panels<uint16_t>& panels, int64_t n, int64_t k) {
  return unpacked<uint16_t>(panels, n, k, 2, &ew::unpack_panel32x2);
}
nb::object unpack_panel32x4(const Panels<uint8_t>& panels, int64_t n, int64_t k) {
  return unpacked<int8_t>(panels, n, k, 4, &ew::unpack_panel32x4);
}

void define(nb::module_& m) {
  m.def("pack_panel32", &pack_panel32<float>, "rows"_a.noconvert(), "threads"_a = 1);
  m.def("pack_panel32", &pack_panel32<uint16_t>, "rows"_a.noconvert(), "threads"_a = 1);
  m.def("pack_panel32x2", &pack_panel32x2, "rows"_a.noconvert(), "threads"_a = 1);
  m.def("pack_panel32x4", &pack_panel32x4, "rows"_a.noconvert(), "threads"_a = 1);
  m.def("unpack_panel32", &unpack_panel32<float>, "panels"_a.noconvert(), "n"_a);
  m.def("unpack_panel32", &unpack_panel32<uint16_t>, "panels"_a.noconvert(), "n"_a);
  m.def("unpack_panel32x2", &unpack_panel32x2, "panels"_a.noconvert(), "n"_a, "k"_a);
  m.def("unpack_panel32x4", &unpack_panel32x4, "panels"_a.noconvert(), "n"_a, "k"_a);
}

}  // namespace

void ew::bind_panels(nb::module_& m) { define(m); }
