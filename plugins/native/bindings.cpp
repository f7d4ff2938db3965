// The extension module `_cpu`: what executable.py needs of the interpreter. _cpu.pyi documents it.
#include "bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "bandwidth.h"
#include "decode_runs.h"
#include "executor.h"
#include "kv_cache.h"
#include "sampling_bindings.h"
#include "tuning.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ew::Affine;
using ew::Executor;
using ew::HeldArrays;
using ew::new_array;
using ew::Operand;
using ew::Program;
using ew::Vector;

Affine affine(nb::handle value) {
  const auto t = nb::cast<nb::tuple>(value);
  if (t.size() != 4) throw std::invalid_argument("an affine expression is (constant, T, B, R)");
  int64_t c[4];
  for (size_t i = 0; i < 4; ++i) {
    if (!nb::try_cast(t[i], c[i])) throw std::invalid_argument("a coefficient isn't an integer of 64 bits");
  }
  return {c[0], c[1], c[2], c[3]};
}

ew::Dtype dtype(const std::string& name) {
  ew::Dtype result = ew::Dtype::f32;
  if (ew::parse_dtype(name.c_str(), &result)) return result;
  throw std::invalid_argument(
      "dtype " + name +
      " is not one of f32, bf16, f16, i32, i8, i4, u4, fp8, i5, u5, i6, iq4, fp4, i3, u3, i2, u2");
}

Operand operand(nb::handle value) {
  const auto t = nb::cast<nb::tuple>(value);
  if (t.size() != 7) {
    throw std::invalid_argument("an operand is (kind, index, dtype, shape, strides, offset, name)");
  }
  Operand result;
  const auto kind = nb::cast<std::string>(t[0]);
  if (kind == "buffer") {
    result.kind = ew::OperandKind::buffer;
  } else if (kind == "weight") {
    result.kind = ew::OperandKind::weight;
  } else if (kind == "input") {
    result.kind = ew::OperandKind::input;
  } else if (kind == "cache") {
    result.kind = ew::OperandKind::cache;
  } else {
    throw std::invalid_argument("operand kind " + kind + " is not one of buffer, weight, input, cache");
  }
  result.index = nb::cast<int>(t[1]);
  // A cache operand's elements are its group's.
  if (result.kind != ew::OperandKind::cache) result.dtype = dtype(nb::cast<std::string>(t[2]));
  for (nb::handle size : t[3]) result.shape.push_back(affine(size));
  for (nb::handle stride : t[4]) result.strides.push_back(affine(stride));
  result.offset = affine(t[5]);
  result.name = nb::cast<std::string>(t[6]);
  return result;
}

std::vector<Operand> operands(const nb::sequence& list) {
  std::vector<Operand> result;
  for (nb::handle value : list) result.push_back(operand(value));
  return result;
}

int add_port(Program& program, const std::string& name, const nb::sequence& shape, const std::string& type,
             const std::string& check, int group) {
  ew::Port port{name, {}, dtype(type), ew::PortCheck::none, group};
  for (nb::handle size : shape) port.shape.push_back(affine(size));
  if (!ew::parse_check(check.c_str(), &port.check))
    throw std::invalid_argument("step input " + name + ": there is no check " + check);
  return program.add_port(std::move(port));
}

int add_weight(Program& program, const std::string& name, const std::string& type, std::vector<int64_t> shape,
               const std::string& layout, const Vector<uint8_t>& memory, int64_t offset, int64_t bytes) {
  ew::Weight weight{name, dtype(type), std::move(shape), ew::WeightLayout::rows, nullptr};
  if (!ew::parse_layout(layout.c_str(), &weight.layout)) {
    throw std::invalid_argument("weight " + name + ": layout " + layout +
                                " is not one of rows, panel32, panel32x2, panel32x4, panel32x8, planes32, "
                                "blocks8, blocks16, sparse32");
  }
  const int64_t size = static_cast<int64_t>(memory.size());
  if (offset < 0 || bytes < 0 || offset > size || bytes > size - offset) {
    throw std::invalid_argument("weight " + name + ": it ends outside of its memory of " +
                                std::to_string(size) + " bytes");
  }
  weight.data = memory.data() + offset;
  return program.add_weight(std::move(weight), bytes);
}

// Arrays over the arena, valid while the step is watched; None for what isn't a buffer.
nb::list watched_arrays(const Executor& executor, size_t index, bool inputs) {
  const ew::Step& step = executor.program().steps()[index];
  const std::vector<ew::Place> places = executor.places(index, inputs);
  nb::list arrays;
  for (size_t i = 0; i < places.size(); ++i) {
    const ew::Place& place = places[i];
    if (!place.data) {
      arrays.append(nb::none());
      continue;
    }
    const std::vector<size_t> shape(place.shape.begin(), place.shape.end());
    const auto view = [&]<class T>(std::type_identity<T>) {
      const nb::ndarray<nb::numpy, T> array(reinterpret_cast<T*>(place.data), shape.size(), shape.data(),
                                            nb::handle(), place.strides.data());
      arrays.append(nb::cast(array, nb::rv_policy::reference));
    };
    switch ((inputs ? step.inputs : step.outputs)[i].dtype) {
      case ew::Dtype::f32:
        view(std::type_identity<float>());
        break;
      case ew::Dtype::i32:
        view(std::type_identity<int32_t>());
        break;
      case ew::Dtype::bf16:
      case ew::Dtype::f16:
        view(std::type_identity<uint16_t>());
        break;
      default:  // i8; all others are of weights alone, which aren't buffers
        view(std::type_identity<int8_t>());
        break;
    }
  }
  return arrays;
}

// Rows of outputs by their names: the logits, of which a rank without them has no columns, and taps.
struct WantedRows {
  WantedRows(const Program& program, const std::vector<std::string>& names, size_t rows, size_t requests,
             nb::dict* output) {
    for (const std::string& name : names) {
      float* to = nullptr;
      if (name == "logits") {
        const size_t vocab = static_cast<size_t>(program.vocab_size());
        (*output)[name.c_str()] = new_array<float>({rows, vocab}, &logits);
        continue;
      }
      const auto& taps = program.taps();
      const auto tap =
          std::find_if(taps.begin(), taps.end(), [&](const ew::Tap& t) { return t.name == name; });
      if (tap == taps.end()) throw std::invalid_argument("the program has no output named " + name);
      const std::vector<ew::Affine>& shape = tap->operand.shape;
      const size_t width = static_cast<size_t>(shape[1].constant);
      (*output)[name.c_str()] = new_array<float>({shape[0] == ew::kRequests ? requests : rows, width}, &to);
      taken.push_back({static_cast<size_t>(tap - taps.begin()), to});
    }
  }

  float* logits = nullptr;
  std::vector<ew::TakenRows> taken;
};

nb::dict run(Executor& executor, const nb::dict& arrays, nb::object sampling, int logprobs,
             const std::vector<std::string>& outputs, bool profile, nb::object watch) {
  const HeldArrays inputs(executor.program(), arrays);
  const int row_port = executor.program().find_port(ew::PortCheck::row);
  const size_t count = inputs.step.ports[static_cast<size_t>(row_port)].values.size();
  const size_t vocab = static_cast<size_t>(executor.program().vocab_size());
  std::unique_ptr<ew::SamplingArrays> samples;
  if (!sampling.is_none()) {
    samples = std::make_unique<ew::SamplingArrays>(nb::cast<nb::dict>(sampling), count, logprobs,
                                                   executor.program().vocab_size());
  }
  nb::dict output;
  const int request_port = executor.program().find_port(ew::PortCheck::lengths);
  const size_t requests = inputs.step.ports[static_cast<size_t>(request_port)].values.size();
  const WantedRows wanted(executor.program(), outputs, count, requests, &output);
  std::vector<double> seconds;
  ew::RunOptions options{profile ? &seconds : nullptr, {}, wanted.taken};
  if (!watch.is_none()) {
    options.watch = [&](size_t step, bool before) {
      const nb::gil_scoped_acquire acquire;
      watch(step, before, watched_arrays(executor, step, before));
    };
  }
  {
    nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(executor.resources().mutex());
    executor.run(inputs.step, options);
    if (samples) samples->wait();
    if (samples && count > 0) executor.sample(samples->rows.data(), samples->result);
    for (size_t r = 0; wanted.logits && r < count; ++r) {
      std::copy_n(executor.logits() + static_cast<int64_t>(r) * executor.logits_stride(), vocab,
                  wanted.logits + r * vocab);
    }
  }
  if (samples) samples->put(output);
  if (profile) output["seconds"] = nb::cast(seconds);
  return output;
}

// The tokens of up to `runs` runs, [runs, R], and how many there were; see decode_runs.h.
nb::tuple decode(Executor& executor, const nb::dict& arrays, const nb::dict& sampling, size_t runs,
                 const std::vector<int32_t>& until) {
  const HeldArrays inputs(executor.program(), arrays);
  ew::DecodeArrays step(executor.program(), inputs.step);
  ew::SamplingArrays samples(sampling, step.requests(), -1, executor.program().vocab_size());
  int32_t* to = nullptr;
  nb::object tokens = new_array<int32_t>({runs, step.requests()}, &to);
  size_t ran = 0;
  {
    nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(executor.resources().mutex());
    ran = ew::decode_runs(executor, step, samples.rows, runs, until, to);
  }
  return nb::make_tuple(tokens, ran);
}

// A layer's cache, and how many blocks it has.
const ew::KvCache& find_cache(const Executor& executor, const std::string& group, int layer, size_t* blocks) {
  const int index = executor.program().find_cache(group, layer);
  if (index < 0) throw std::invalid_argument("there is no cache " + group + "/" + std::to_string(layer));
  const ew::Resources& resources = executor.resources();
  const int of_group = executor.program().caches()[static_cast<size_t>(index)].group;
  *blocks = static_cast<size_t>(resources.blocks(static_cast<size_t>(of_group)));
  return resources.caches()[static_cast<size_t>(index)];
}

// A layer's f32 cache: k [P, Nkv, D, 32] and v [P, Nkv, 32, Dv], for tests and tools. Of other formats, a
// copy of what they stand for.
nb::tuple cache_arrays(nb::object self, const std::string& group, int layer) {
  size_t blocks = 0;
  const ew::KvCache& cache = find_cache(nb::cast<const Executor&>(self), group, layer, &blocks);
  const size_t heads = static_cast<size_t>(cache.kv_heads), slots = static_cast<size_t>(ew::kBlock);
  if (cache.places) throw std::invalid_argument("cache " + group + ": some of its blocks aren't in memory");
  if (cache.state_size > 0) throw std::invalid_argument("cache " + group + " holds no keys and values");
  const std::vector<size_t> k_shape = {blocks, heads, static_cast<size_t>(cache.key_size), slots};
  const std::vector<size_t> v_shape = {blocks, heads, slots, static_cast<size_t>(cache.value_size)};
  if (cache.format == ew::KvFormat::f32 && !cache.summaries && !cache.values_in_keys) {
    return nb::make_tuple(nb::ndarray<nb::numpy, float>(cache.k, 4, k_shape.data(), self),
                          nb::ndarray<nb::numpy, float>(cache.v, 4, v_shape.data(), self));
  }
  float *k = nullptr, *v = nullptr;
  nb::object keys = new_array<float>(k_shape, &k), values = new_array<float>(v_shape, &v);
  ew::read_cache(cache, static_cast<int64_t>(blocks), k, v);
  return nb::make_tuple(keys, values);
}

// The bytes of a layer's keys and of its values, [P, Nkv, bytes of a block and head], summaries included.
nb::tuple cache_memory(nb::object self, const std::string& group, int layer) {
  size_t blocks = 0;
  const ew::KvCache& cache = find_cache(nb::cast<const Executor&>(self), group, layer, &blocks);
  const auto bytes = [&](void* data, int64_t piece) {
    const size_t shape[] = {blocks, static_cast<size_t>(cache.kv_heads), static_cast<size_t>(piece)};
    return nb::ndarray<nb::numpy, uint8_t>(data, 3, shape, self);
  };
  if (cache.places) throw std::invalid_argument("cache " + group + ": some of its blocks aren't in memory");
  return nb::make_tuple(bytes(cache.k, cache.key_bytes()), bytes(cache.v, cache.value_bytes()));
}

// [n, 2] for each thread: when, and what; see Mark.
nb::list trace(Executor& executor, bool on) {
  const std::lock_guard<std::mutex> lock(executor.resources().mutex());
  nb::list threads;
  for (const std::vector<ew::Mark>& marks : executor.resources().pool().trace(on)) {
    int64_t* to = nullptr;
    threads.append(new_array<int64_t>({marks.size(), 2}, &to));
    for (const ew::Mark& mark : marks) {
      *to++ = mark.at;
      *to++ = mark.what;
    }
  }
  return threads;
}

// Copies blocks of a cache group of which some layers have memory for some blocks alone. pairs: [n, 2], from
// and to.
void copy_offloaded(Executor& executor, const std::string& group,
                    const std::vector<std::pair<int32_t, int32_t>>& pairs) {
  const ew::Program& program = executor.program();
  ew::Resources& resources = executor.resources();
  const std::lock_guard<std::mutex> lock(resources.mutex());
  for (size_t i = 0; i < program.caches().size(); ++i) {
    ew::OffloadedLayer* layer = resources.offloaded()[i];
    const size_t number = static_cast<size_t>(program.caches()[i].group);
    if (program.groups()[number].name != group) continue;
    for (const auto& [from, to] : pairs) {
      if (std::min(from, to) < 0 || std::max(from, to) >= resources.blocks(number))
        throw std::invalid_argument("copies: a block isn't one of cache group " + group);
      if (layer) {
        layer->copy(from, to);
        continue;
      }
      const ew::KvCache& c = resources.caches()[i];
      for (const auto& [data, piece] : {std::pair{c.k, c.key_bytes()}, std::pair{c.v, c.value_bytes()}}) {
        char* memory = static_cast<char*>(data);
        const int64_t bytes = c.pieces(1) * piece;
        std::copy_n(memory + from * bytes, bytes, memory + to * bytes);
      }
    }
  }
}

}  // namespace

namespace ew {

HeldArrays::HeldArrays(const Program& program, const nb::dict& arrays) {
  const auto& ports = program.ports();
  step.ports.reserve(ports.size());
  held.reserve(ports.size());
  for (const Port& port : ports) {
    PyObject* const array = PyDict_GetItemString(arrays.ptr(), port.name.c_str());
    if (!array) throw std::invalid_argument(port.name + " is missing");
    const size_t rank = port.check == PortCheck::table ? 2 : port.shape.size();
    StepArray words;
    const auto read = [&]<class T>(nb::handle from, std::type_identity<T>) {
      nb::ndarray<const T, nb::c_contig, nb::device::cpu> values;
      if (!nb::try_cast(from, values, false) || values.ndim() != rank) return false;
      words = {{reinterpret_cast<const int32_t*>(values.data()), values.size()},
               rank > 1 ? static_cast<int64_t>(values.shape(1)) : 1};
      return true;
    };
    const auto as_its_type = [&](nb::handle from) {
      return port.dtype == Dtype::f32 ? read(from, std::type_identity<float>())
                                      : read(from, std::type_identity<int32_t>());
    };
    held.push_back(nb::borrow(array));
    if (!as_its_type(array)) {
      held.back() = nb::module_::import_("numpy").attr("ascontiguousarray")(nb::borrow(array));
      if (!as_its_type(held.back())) {
        const nb::object type = held.back().attr("dtype"), axes = held.back().attr("ndim");
        const char* const expected = port.dtype == Dtype::f32 ? "a float32" : "an int32";
        throw std::invalid_argument(port.name + " must be " + expected + " array of rank " +
                                    std::to_string(rank) + ", not " + nb::str(nb::handle(type)).c_str() +
                                    " of " + nb::str(nb::handle(axes)).c_str());
      }
    }
    step.ports.push_back(words);
  }
  if (arrays.size() == ports.size()) return;
  for (const auto& [name, array] : arrays) {
    const auto known = std::find_if(ports.begin(), ports.end(),
                                    [&](const Port& port) { return port.name == nb::str(name).c_str(); });
    if (known == ports.end())
      throw std::invalid_argument(std::string("the program takes no ") + nb::str(name).c_str());
  }
}

}  // namespace ew

NB_MODULE(_cpu, m) {
#ifdef NDEBUG
  // What a daemon thread holds at exit, or a thread that a forked child doesn't have, is never given back.
  nb::set_leak_warnings(false);
#endif
  m.def("isas", &ew::available_isas);
  m.def("ops", &ew::op_names);
  m.def("layout_depths", &ew::layout_depths);
  m.attr("PANEL") = ew::kPanel;
  m.def("measure_bandwidth", &ew::measure_bandwidth, "nbytes"_a, "threads"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("measure_peak", &ew::measure_peak, "dtype"_a, "threads"_a, "isa"_a,
        nb::call_guard<nb::gil_scoped_release>());

  // Its arguments are the problem, and the cache group and the block that are lost, or -1.
  PyObject* const offload_error = PyErr_NewException("_cpu.OffloadError", PyExc_RuntimeError, nullptr);
  m.attr("OffloadError") = nb::handle(offload_error);
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* type) {
        try {
          std::rethrow_exception(thrown);
        } catch (const ew::OffloadError& e) {
          PyErr_SetObject(static_cast<PyObject*>(type), nb::make_tuple(e.what(), e.group, e.lost).ptr());
        }
      },
      offload_error);

  ew::bind_row_sampler(m);

  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def(
          "add_cache_group",
          [](Program& program, const std::string& name, std::vector<int> layers, int64_t kv_heads,
             int64_t key_size, int64_t value_size, int64_t block_size, const std::string& format,
             bool summaries, int64_t state_size, bool values_in_keys) {
            ew::CacheGroup group{{kv_heads, key_size, value_size}, name, std::move(layers)};
            group.summaries = summaries;
            group.state_size = state_size;
            group.values_in_keys = values_in_keys;
            if (!ew::parse_kv_format(format.c_str(), &group.format)) {
              std::string known;
              for (const ew::KvFormatEntry& entry : ew::kKvFormats)
                known += (known.empty() ? "" : ", ") + std::string(entry.name);
              throw std::invalid_argument("cache group " + name + ": dtype " + format + " is not one of " +
                                          known);
            }
            return program.add_cache_group(std::move(group), block_size);
          },
          "name"_a, "layers"_a, "kv_heads"_a, "key_size"_a, "value_size"_a, "block_size"_a, "dtype"_a = "f32",
          "summaries"_a = false, "state_size"_a = 0, "values_in_keys"_a = false)
      .def("add_port", &add_port, "name"_a, "shape"_a, "dtype"_a = "i32", "check"_a = "none", "group"_a = -1)
      .def(
          "add_tap",
          [](Program& program, const std::string& name, size_t step, size_t output) {
            program.add_tap(name, step, output);
          },
          "name"_a, "step"_a, "output"_a)
      .def("add_weight", &add_weight, "name"_a, "dtype"_a, "shape"_a, "layout"_a, "memory"_a.noconvert(),
           "offset"_a, "nbytes"_a, nb::keep_alive<1, 6>())
      .def(
          "add_buffer",
          [](Program& program, const std::string& name, nb::tuple size, nb::tuple offset, int region) {
            return program.add_buffer({name, affine(size), affine(offset), region});
          },
          "name"_a, "size"_a, "offset"_a, "region"_a = 0)
      .def(
          "set_arena", [](Program& program, nb::tuple bytes) { program.set_arena(affine(bytes)); },
          "nbytes"_a)
      .def(
          "set_region",
          [](Program& program, int region, nb::tuple bytes) { program.set_region(region, affine(bytes)); },
          "region"_a, "nbytes"_a)
      .def(
          "set_ranks", [](Program& program, int first, int count) { program.set_ranks({first, count}); },
          "first"_a, "count"_a)
      .def(
          "add_step",
          [](Program& program, const std::string& op, const nb::sequence& inputs, const nb::sequence& outputs,
             const ew::AttributeMap& attributes, const std::string& where) {
            program.add_step(op, operands(inputs), operands(outputs), attributes, where);
          },
          "op"_a, "inputs"_a, "outputs"_a, "attributes"_a, "where"_a)
      .def(
          "set_logits", [](Program& program, nb::tuple value) { program.set_logits(operand(value)); },
          "operand"_a)
      .def(
          "add_output",
          [](Program& program, const std::string& name, nb::tuple value) {
            program.add_output(name, operand(value));
          },
          "name"_a, "operand"_a)
      .def("finish", &Program::finish)
      .def("find_cache", &Program::find_cache, "group"_a, "layer"_a);

  nb::class_<ew::Exchange>(m, "Exchange");
  nb::class_<ew::ThreadRanks>(m, "ThreadRanks")
      .def(nb::new_([](int ranks) { return std::make_shared<ew::ThreadRanks>(ranks); }), "ranks"_a)
      .def("abandon", &ew::ThreadRanks::abandon, "problem"_a);
  nb::class_<ew::ThreadExchange, ew::Exchange>(m, "ThreadExchange")
      .def(nb::init<std::shared_ptr<ew::ThreadRanks>, int>(), "ranks"_a, "rank"_a);

  nb::class_<Executor>(m, "Executor")
      .def(
          "__init__",
          [](Executor* self, const Program& program, std::vector<int64_t> blocks, int threads,
             const std::string& isa, const std::map<std::string, int64_t>& tuning, ew::Exchange* exchange,
             const std::string& folder, std::vector<int64_t> slots) {
            new (self) Executor(program, std::move(blocks), threads, isa, ew::parse_tuning(tuning), exchange,
                                {folder, std::move(slots)});
          },
          "program"_a, "blocks"_a, "threads"_a, "isa"_a, "tuning"_a, "exchange"_a.none() = nb::none(),
          "folder"_a = "", "slots"_a = std::vector<int64_t>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 7>())
      .def_prop_ro("isa", [](const Executor& e) { return e.resources().kernels().isa; })
      .def_prop_ro("threads", [](Executor& e) { return e.resources().pool().size(); })
      .def(
          "limit_cores", [](Executor& e, int cores) { e.resources().pool().limit_cores(cores); }, "cores"_a)
      .def_prop_ro("cache_bytes", [](const Executor& e) { return e.resources().cache_bytes(); })
      .def_prop_ro("offload_counts",
                   [](Executor& e) {
                     const ew::OffloadCounts* c = e.resources().offload_counts();
                     return c ? nb::make_tuple(c->found.load(), c->read.load(), c->written.load(),
                                               c->lost.load())
                              : nb::make_tuple(0, 0, 0, 0);
                   })
      .def_prop_ro("arena_bytes", [](const Executor& e) { return e.resources().arena_bytes(); })
      .def_prop_ro("ring_pairs",
                   [](const Executor& e) {
                     const auto& groups = e.program().groups();
                     const bool divided = std::any_of(groups.begin(), groups.end(),
                                                      [](const auto& g) { return g.owners > 1; });
                     const int ranks = divided ? e.program().ranks().count : 0;
                     return std::vector<int64_t>(e.ring().pairs, e.ring().pairs + ranks);
                   })
      .def("run", &run, "arrays"_a, "sampling"_a = nb::none(), "logprobs"_a = -1,
           "outputs"_a = std::vector<std::string>(), "profile"_a = false, "watch"_a = nb::none())
      .def("decode", &decode, "arrays"_a, "sampling"_a, "runs"_a, "until"_a)
      .def("interrupt", &Executor::interrupt);
  m.def(
      "expert_rows",
      [](const Executor& executor) {
        std::map<size_t, std::vector<int64_t>> found;
        for (const auto& [step, counts] : executor.expert_rows())
          for (const auto& count : counts) found[step].push_back(count.load(std::memory_order_relaxed));
        return found;
      },
      "executor"_a);
  ew::bind_tvm_calls(m);
  ew::bind_rank_link(m);
  m.def("cache_arrays", &cache_arrays, "executor"_a, "group"_a, "layer"_a);
  m.def("cache_memory", &cache_memory, "executor"_a, "group"_a, "layer"_a);
  m.def(
      "read_weights",
      [](Executor& executor) {
        const std::lock_guard<std::mutex> lock(executor.resources().mutex());
        ew::read_weights(executor);
      },
      "executor"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("trace", &trace, "executor"_a, "on"_a);
  m.def("copy_offloaded", &copy_offloaded, "executor"_a, "group"_a, "pairs"_a);
}
