#include "executor.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "cores.h"

namespace ew {
namespace {

constexpr size_t kMaxShapes = 32;                 // sizes whose resolved steps are kept
constexpr int64_t kMaxTokens = int64_t{1} << 20;  // of T, B and R, so that sizes cannot overflow
constexpr int64_t kFewRows = 8;                   // tokens of a step that waits for weights
constexpr int64_t kTableRounding = 64;            // block tables grow in steps of this many entries

[[noreturn]] void fail(const std::string& problem) { throw std::invalid_argument(problem); }

std::string entry(const std::string& name, int64_t index) { return name + "[" + std::to_string(index) + "]"; }

// The values of an input must be in [first, limit).
void check_range(const std::string& name, std::span<const int32_t> values, int64_t limit, int64_t first = 0) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < first || values[i] >= limit) {
      fail(entry(name, static_cast<int64_t>(i)) + " = " + std::to_string(values[i]) + " is not in [" +
           std::to_string(first) + ", " + std::to_string(limit) + ")");
    }
  }
}

void check_length(const std::string& name, size_t length, int64_t wanted, const std::string& symbol) {
  if (static_cast<int64_t>(length) != wanted) {
    fail(name + " has " + std::to_string(length) + " entries, not " + symbol + " = " +
         std::to_string(wanted));
  }
}

// The values of an input must not fall.
void check_order(const std::string& name, std::span<const int32_t> values) {
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i] < values[i - 1])
      fail(entry(name, static_cast<int64_t>(i)) + " is less than the one before");
  }
}

// Not by _Float16: its conversion is in GCC 12's libgcc, which the systems that wheels are for lack.
float to_float(uint16_t bits, Dtype dtype) {
  uint32_t wide = uint32_t{bits} << 16;
  if (dtype == Dtype::f16) {
    const uint32_t sign = wide & 0x80000000u, rest = bits & 0x7fffu;
    if (rest < 0x400u) return (sign ? -0x1p-24f : 0x1p-24f) * static_cast<float>(rest);  // zero and subnormal
    wide = sign | ((rest << 13) + (rest < 0x7c00u ? 112u << 23 : 224u << 23));  // 224: infinity and NaN
  }
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

}  // namespace

Executor::Executor(const Program& program, std::vector<int64_t> blocks, int threads, const std::string& isa,
                   const Tuning& tuning, Exchange* exchange, const OffloadPlan& offload)
    : program_(program),
      exchange_(exchange),
      streams_(program, threads),
      resources_(program, std::move(blocks), threads, isa, tuning, exchange, offload) {
  if (!program.finished()) fail("the program is not finished");
  if (program.of_several_ranks() && !exchange)
    fail("the program is one of several ranks, and has no exchange");
  starts_ = static_cast<size_t>(program.find_port(PortCheck::starts));
  lengths_ = static_cast<size_t>(program.find_port(PortCheck::lengths));
  rows_ = static_cast<size_t>(program.find_port(PortCheck::row));
  inputs_.resize(program.ports().size());
  memory_.inputs.resize(inputs_.size(), nullptr);
  memory_.table_strides.resize(program.groups().size(), 0);
  memory_.caches = resources_.caches();
  memory_.offloaded = resources_.offloaded();
  memory_.workspace = &resources_.workspace();
  memory_.expert_rows = &expert_rows_;
  for (size_t i = 0; i < program.steps().size(); ++i) {
    const int64_t experts = program.steps()[i].attributes.experts;
    if (experts > 0) expert_rows_.try_emplace(i, static_cast<size_t>(experts));
  }
}

// For the next product a thread fetches a share of a core's second-level cache; while the caller prepares the
// next step, the others fetch a share of the third together.
Executor::Streams::Streams(const Program& program, int threads) {
  const int64_t near = cache_bytes(2) / 4, far = cache_bytes(3) / 4 / std::max(threads - 1, 1);
  std::vector<size_t> first;  // of those behind each step
  for (const Step& step : program.steps()) {
    if (step.op_name == "linear" || step.op_name == "quantized_linear") {
      Stream& stream = all_.emplace_back();
      size_t arrays = 0;
      for (const Operand& operand : step.inputs) {
        if (operand.kind != OperandKind::weight || arrays == std::size(stream.arrays)) continue;
        const Weight& weight = program.weights()[static_cast<size_t>(operand.index)];
        if (weight.layout == WeightLayout::rows) continue;  // a bias
        stream.parts = (weight.shape.front() + kPanel - 1) / kPanel;
        stream.arrays[arrays++] = {static_cast<const char*>(weight.data), weight.bytes() / stream.parts};
      }
    }
    first.push_back(all_.size());
  }
  const size_t once = all_.size();
  for (size_t i = 0; i < once; ++i) all_.push_back(all_[i]);
  for (const size_t at : first)
    behind_.push_back({std::span(all_).subspan(at), at == once ? far : near, at == once});
}

// Sizes first, then values: each input is as long as the step's T, B and R make it.
Sizes Executor::check(const StepArrays& inputs) const {
  const std::vector<Port>& ports = program_.ports();
  if (inputs.ports.size() != ports.size()) fail("a step must have the arrays of its program");
  Sizes sizes;
  sizes.requests = static_cast<int64_t>(inputs.ports[lengths_].values.size());
  sizes.rows = static_cast<int64_t>(inputs.ports[rows_].values.size());
  const size_t first = static_cast<size_t>(
      std::find_if(ports.begin(), ports.end(), [](const Port& p) { return p.shape[0] == kTokens; }) -
      ports.begin());
  sizes.tokens = static_cast<int64_t>(inputs.ports[first].values.size()) / inputs.ports[first].columns;
  if (sizes.tokens < 1 || sizes.tokens > kMaxTokens)
    fail(ports[first].name + " has " + std::to_string(sizes.tokens) + " entries, not 1 to 2^20");
  if (sizes.requests < 1 || sizes.requests > kMaxTokens) {
    fail(ports[lengths_].name + " has " + std::to_string(sizes.requests) + " entries, not 1 to 2^20");
  }
  if (sizes.rows > kMaxTokens) fail(ports[rows_].name + " has more than 2^20 entries");
  for (size_t i = 0; i < ports.size(); ++i) {
    const StepArray& array = inputs.ports[i];
    const int64_t columns = ports[i].shape.size() > 1 ? ports[i].shape[1].constant : array.columns;
    const std::string symbol = ports[i].shape[0].text() + (array.columns == 1 ? "" : " * width");
    check_length(ports[i].name, array.values.size(), ports[i].shape[0].at(sizes) * columns, symbol);
  }
  check_values(inputs, starts_, sizes);
  check_values(inputs, lengths_, sizes);
  for (size_t i = 0; i < ports.size(); ++i) {
    if (i != starts_ && i != lengths_) check_values(inputs, i, sizes);
  }
  return sizes;
}

void Executor::check_values(const StepArrays& inputs, size_t index, const Sizes& sizes) const {
  const Port& port = program_.ports()[index];
  const std::span<const int32_t> values = inputs.ports[index].values;
  const std::span<const int32_t> starts = inputs.ports[starts_].values;
  switch (port.check) {
    case PortCheck::none:
      break;
    case PortCheck::index:
      check_range(port.name, values, port.limit);
      break;
    case PortCheck::row:
      check_range(port.name, values, sizes.tokens);
      break;
    case PortCheck::segments:
      check_range(port.name, values, sizes.tokens + 1);
      check_order(port.name, values);
      break;
    case PortCheck::starts:
      if (values[0] != 0) fail(entry(port.name, 0) + " is not 0");
      check_order(port.name, values);
      if (values.back() != sizes.tokens) {
        fail(port.name + " ends with " + std::to_string(values.back()) +
             ", not T = " + std::to_string(sizes.tokens));
      }
      break;
    case PortCheck::lengths:
      for (int64_t b = 0; b < sizes.requests; ++b) {
        const int32_t own = starts[b + 1] - starts[b];
        if (values[b] < own) {
          fail(entry(port.name, b) + " = " + std::to_string(values[b]) + " is less than the request's " +
               std::to_string(own) + " tokens of this step");
        }
      }
      break;
    case PortCheck::slots: {
      const size_t g = static_cast<size_t>(port.group);
      const CacheGroup& group = program_.groups()[g];
      const int64_t places = resources_.blocks(g) * group.block_tokens;
      check_range(port.name, values, places, group.state_size > 0 ? -1 : 0);  // -1: no snapshot of a state
      break;
    }
    case PortCheck::table:
      check_table(inputs, index);
      break;
  }
}

// The table must give a block of the pool for every key that is read, and the slot of a token must be the
// place in it where attention will look for the token. Blocks that lie before the window of a request's first
// token aren't read.
void Executor::check_table(const StepArrays& inputs, size_t index) const {
  const std::vector<Port>& ports = program_.ports();
  const size_t g = static_cast<size_t>(ports[index].group);
  const CacheGroup& group = program_.groups()[g];
  if (group.layers.empty()) return;
  const size_t written = static_cast<size_t>(program_.find_port(PortCheck::slots, static_cast<int>(g)));
  const std::string &table = ports[index].name, &slots = ports[written].name;
  const std::span<const int32_t> starts = inputs.ports[starts_].values,
                                 lengths = inputs.ports[lengths_].values;
  const std::span<const int32_t> places = inputs.ports[written].values;
  const int64_t width = inputs.ports[index].columns, blocks = resources_.blocks(g);
  const int64_t window = group.attention_window, block = group.block_tokens;
  for (int64_t b = 0; b < static_cast<int64_t>(lengths.size()); ++b) {
    const int32_t* row = inputs.ports[index].values.data() + b * width;
    const int64_t length = lengths[b];
    const int64_t begin = starts[b], end = starts[b + 1];
    if (begin == end) continue;
    if (length > width * block) {
      fail(table + " has " + std::to_string(width) + " blocks a request, too few for " +
           entry(ports[lengths_].name, b) + " = " + std::to_string(length));
    }
    const int64_t first = length - (end - begin);
    const int64_t oldest = window > 0 ? std::max<int64_t>(0, first - window + 1) : 0;
    const int64_t owners = group.owners, split_blocks = kSplit / kBlock;
    for (int64_t i = 0; i <= (length - 1) / block; ++i) {
      if (i * block >= group.first_tokens) i = std::max(i, oldest / block);
      if (row[i] < 0 || row[i] >= blocks) {
        fail(table + "[" + std::to_string(b) + ", " + std::to_string(i) + "] = " + std::to_string(row[i]) +
             " is not in [0, " + std::to_string(blocks) + ")");
      }
      if (owners > 1 && i > oldest / block && i % split_blocks != 0 &&
          row[i] % owners != row[i - 1] % owners) {
        fail(table + "[" + std::to_string(b) + ", " + std::to_string(i) + "] = " + std::to_string(row[i]) +
             " is of another owner than " + std::to_string(row[i - 1]) + " before it, of the same " +
             std::to_string(kSplit) + " keys");
      }
    }
    if (group.state_size > 0) continue;  // the slots of states are those of snapshots
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = first + t - begin;
      const int64_t wanted = row[position / block] * block + position % block;
      if (places[t] != wanted) {
        fail(entry(slots, t) + " = " + std::to_string(places[t]) + " is not where " + table + " has it, " +
             std::to_string(wanted));
      }
    }
  }
}

// Copies the inputs to where the resolved steps expect them. As soon as something moves, the resolved steps
// are forgotten: what comes behind it may run out of memory, and nobody would know at the next step.
void Executor::copy_inputs(const StepArrays& inputs) {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const StepArray& array = inputs.ports[i];
    const Port& port = program_.ports()[i];
    if (port.check != PortCheck::table) {
      inputs_[i].assign(array.values.begin(), array.values.end());
    } else {
      int64_t& stride = memory_.table_strides[static_cast<size_t>(port.group)];
      if (array.columns > stride) {
        stride = (array.columns + kTableRounding - 1) / kTableRounding * kTableRounding;
        shapes_.clear();
      }
      const size_t columns = static_cast<size_t>(array.columns),
                   rows = array.values.size() / std::max<size_t>(columns, 1);
      inputs_[i].resize(rows * static_cast<size_t>(stride));
      for (size_t b = 0; b < rows; ++b) {
        const auto row = array.values.subspan(b * columns, columns);
        std::copy(row.begin(), row.end(), inputs_[i].begin() + static_cast<int64_t>(b) * stride);
      }
    }
    if (memory_.inputs[i] != inputs_[i].data()) shapes_.clear();
    memory_.inputs[i] = inputs_[i].data();
  }
}

// Rows of an output of the step that has just run.
void Executor::take(const TakenRows& taken) const {
  const Tap& tap = program_.taps()[taken.tap];
  const Operand& operand = tap.operand;
  const Place place = locate(program_, memory_, sizes_, operand, "output " + tap.name);
  const bool of_tokens = operand.shape[0] == kTokens;
  const int64_t width = place.shape[1], rows = of_tokens ? sizes_.rows : place.shape[0];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (of_tokens ? inputs_[rows_][static_cast<size_t>(r)] : r) * place.strides[0];
    float* to = taken.to + r * width;
    for (int64_t i = 0; i < width; ++i) {
      const int64_t from = at + i * place.strides[1];
      to[i] = operand.dtype == Dtype::f32 ? place.as<const float>()[from]
                                          : to_float(place.as<const uint16_t>()[from], operand.dtype);
    }
  }
}

// Sets steps_: the resolved steps for sizes_, with an arena large enough for them. What was resolved holds as
// long as the arena lies where it did.
void Executor::prepare() {
  steps_ = nullptr;
  const int64_t needed = std::max<int64_t>(program_.arena_bytes().at(sizes_), 0);
  if (needed > resources_.arena().bytes()) {
    logits_ = nullptr;
    resources_.reserve_arena(needed + needed / 4);
  }
  const ZeroedMemory& arena = resources_.arena();
  if (memory_.arena != arena.data()) shapes_.clear();
  memory_.arena = static_cast<char*>(arena.data());
  memory_.arena_bytes = needed;
  if (arena.bytes() > 0) arena.limit(needed);
  for (const auto& [region, size] : program_.regions()) {
    const int64_t bytes = std::max<int64_t>(size.at(sizes_), 0);
    char* const start = exchange_->memory(region, bytes);
    if (memory_.regions[region].first != start) shapes_.clear();
    memory_.regions[region] = {start, bytes};
  }
  ++clock_;
  auto shape =
      std::find_if(shapes_.begin(), shapes_.end(), [this](const Shape& s) { return s.sizes == sizes_; });
  if (shape == shapes_.end()) {
    Shape resolved{sizes_, resolve(program_, memory_, sizes_), nullptr, 0, clock_};
    if (program_.vocab_size() > 0) {
      const Place logits = locate(program_, memory_, sizes_, program_.logits(), "output logits");
      resolved.logits = reinterpret_cast<const float*>(logits.data);
      resolved.logits_stride = logits.strides[0];
    }
    if (shapes_.size() < kMaxShapes) {
      shape = shapes_.insert(shapes_.end(), std::move(resolved));
    } else {
      shape = std::min_element(shapes_.begin(), shapes_.end(),
                               [](const Shape& a, const Shape& b) { return a.used < b.used; });
      *shape = std::move(resolved);
    }
  }
  shape->used = clock_;
  logits_ = shape->logits;
  logits_stride_ = shape->logits_stride;
  steps_ = &shape->steps;
}

std::vector<Place> Executor::places(size_t index, bool inputs) const {
  const Step& step = program_.steps()[index];
  std::vector<Place> result;
  for (const Operand& operand : inputs ? step.inputs : step.outputs) {
    const bool buffer = operand.kind == OperandKind::buffer;
    result.push_back(buffer ? locate(program_, memory_, sizes_, operand, step_title(index, step)) : Place());
  }
  return result;
}

void Executor::execute(const ResolvedStep& step) {
  if (step.check.rule != IndexRule::none) {
    const size_t index = static_cast<size_t>(step.index);
    check_indices(step.check, step_title(index, program_.steps()[index]), inverse_);
  }
  ThreadPool& pool = resources_.pool();
  const bool waits = sizes_.tokens <= kFewRows;  // for weights
  pool.fetch_next(waits ? streams_.behind(static_cast<size_t>(step.index)) : nullptr);
  step.call({resources_.kernels(), pool, inverse_.data(), exchange_, &ring_});
}

void Executor::begin(const StepArrays& inputs) {
  sizes_ = check(inputs);
  copy_inputs(inputs);
  if (program_.of_several_ranks())
    exchange_->begin(program_.ranks());  // nobody still reads the last step's values
  ring_.rounds = 0;
  resources_.pool().wake();  // they are awake when the first large kernel comes
  prepare();
}

void Executor::run_step(int64_t step) {
  if (!steps_) fail("no run has begun");
  const auto found = std::lower_bound(steps_->begin(), steps_->end(), step,
                                      [](const ResolvedStep& s, int64_t index) { return s.index < index; });
  if (found != steps_->end() && found->index == step) execute(*found);
}

void Executor::run(const StepArrays& inputs, const RunOptions& options) {
  begin(inputs);
  if (options.seconds) options.seconds->assign(program_.steps().size(), 0.0);
  for (const ResolvedStep& step : *steps_) {
    resources_.pool().mark(0, step.index);
    if (options.watch) options.watch(static_cast<size_t>(step.index), true);
    if (options.seconds) {
      const auto start = std::chrono::steady_clock::now();
      execute(step);
      (*options.seconds)[step.index] =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    } else {
      execute(step);
    }
    for (const TakenRows& taken : options.taken) {
      if (program_.taps()[taken.tap].step == static_cast<size_t>(step.index)) take(taken);
    }
    if (options.watch) options.watch(static_cast<size_t>(step.index), false);
  }
  resources_.pool().mark(0, static_cast<int32_t>(program_.steps().size()));
  for (const TakenRows& taken : options.taken) {
    if (program_.taps()[taken.tap].step == program_.steps().size()) take(taken);
  }
}

void Executor::sample(const RowSampling* parameters, const SampleResult& result) {
  resources_.sampler().sample(logits_, sizes_.rows, program_.vocab_size(), logits_stride_, parameters, result,
                              resources_.pool());
  resources_.pool().mark(0, static_cast<int32_t>(program_.steps().size()) + 1);
}

}  // namespace ew
