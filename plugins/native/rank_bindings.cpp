// RankLink in Python; _cpu.pyi documents it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <signal.h>
#include <sys/prctl.h>

#include <chrono>
#include <mutex>

#include "bindings.h"
#include "rank_link.h"
#include "rank_steps.h"

using namespace nanobind::literals;

namespace ew {
namespace {

std::chrono::nanoseconds seconds(double count) {
  return std::chrono::nanoseconds(static_cast<int64_t>(count * 1e9));
}

void post(RankLink& link, const Executor& executor, const nb::dict& arrays) {
  const HeldArrays inputs(executor.program(), arrays);
  const nb::gil_scoped_release release;
  post_step(link, inputs.step);
}

void run_steps(RankLink& link, Executor& executor) {
  const nb::gil_scoped_release release;
  const std::lock_guard<std::mutex> lock(executor.resources().mutex());
  run_posted_steps(link, executor);
}

nb::object pack(const Executor& executor, const nb::dict& arrays) {
  const HeldArrays inputs(executor.program(), arrays);
  uint8_t* bytes = nullptr;
  nb::object packed = new_array<uint8_t>({packed_bytes(inputs.step)}, &bytes);
  pack_step(inputs.step, reinterpret_cast<char*>(bytes));
  return packed;
}

void run_packed(const Vector<uint8_t>& bytes, Executor& executor) {
  const std::span<const char> packed(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const nb::gil_scoped_release release;
  const std::lock_guard<std::mutex> lock(executor.resources().mutex());
  executor.run(unpack_step(packed));
}

using Message = nb::ndarray<nb::numpy, uint8_t>;

Message message(std::span<char> bytes) {
  const size_t size = bytes.size();
  return Message(reinterpret_cast<uint8_t*>(bytes.data()), 1, &size);
}

void make_exchange(MessageExchange* self, int rank, nb::callable move) {
  new (self) MessageExchange(rank, [move](const MessageExchange::Messages& messages) {
    const nb::gil_scoped_acquire acquire;
    nb::list theirs;
    for (const std::span<char>& one : messages.theirs)
      theirs.append(message(one).cast(nb::rv_policy::reference));
    move(messages.to, message(messages.own).cast(nb::rv_policy::reference), messages.from, theirs);
  });
}

nb::object caches(nb::object self, int rank) {
  const RankLink& link = nb::cast<const RankLink&>(self);
  if (rank < 0 || rank >= link.ranks()) throw std::invalid_argument("rank is out of range");
  const size_t size = static_cast<size_t>(link.cache_bytes(rank));
  if (size > 0 && !link.cache_region(rank)) throw std::invalid_argument("another rank's caches are rank 0's");
  return nb::cast(nb::ndarray<nb::numpy, uint8_t>(link.cache_region(rank), 1, &size, self));
}

}  // namespace

void bind_rank_link(nb::module_& m) {
  nb::class_<RankLink, Exchange>(m, "RankLink")
      .def(
          "__init__",
          [](RankLink* self, int fd, int rank, const std::vector<int64_t>& cache_bytes, double spin,
             int in_flight) { new (self) RankLink(fd, rank, cache_bytes, seconds(spin), in_flight); },
          "fd"_a, "rank"_a, "cache_bytes"_a, "spin"_a, "in_flight"_a = 1)
      .def_prop_ro("fd", &RankLink::fd)
      .def_prop_ro("problem", &RankLink::problem)
      .def_prop_ro("progress", &RankLink::progress)
      .def_prop_ro("sleeps", &RankLink::sleeps)
      .def(
          "caches", [](nb::object self, int rank) { return caches(self, rank); }, "rank"_a)
      .def(
          "meet", [](RankLink& link) { link.meet({0, link.ranks()}); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("wait_done", &RankLink::wait_done, nb::call_guard<nb::gil_scoped_release>())
      .def("post", &post, "executor"_a, "arrays"_a)
      .def("begin_step", &RankLink::begin_step)
      .def("run_posted_steps", &run_steps, "executor"_a)
      .def("stop", &RankLink::stop)
      .def("release", &RankLink::release)
      .def("fail_step", &RankLink::fail_step, "problem"_a)
      .def("abandon", &RankLink::abandon, "problem"_a);
  nb::class_<MessageExchange, Exchange>(m, "MessageExchange")
      .def("__init__", &make_exchange, "rank"_a, "move"_a);
  m.def("pack_step", &pack, "executor"_a, "arrays"_a);
  m.def("run_packed_step", &run_packed, "step"_a.noconvert(), "executor"_a);
  m.attr("CACHE_ALIGN") = RankLink::kCacheAlign;
  m.def("die_with_parent", [] { prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0); });
}

}  // namespace ew
