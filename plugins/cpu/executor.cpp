#include "executor.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace ew {
namespace {

constexpr size_t kMaxShapes = 32;                 // sizes whose resolved steps are kept
constexpr int64_t kMaxTokens = int64_t{1} << 20;  // of T, B and R, so that sizes cannot overflow
constexpr int64_t kTableRounding = 64;            // block tables grow in steps of this many entries

[[noreturn]] void fail(const std::string& problem) { throw std::invalid_argument(problem); }

std::string entry(const std::string& name, int64_t index) { return name + "[" + std::to_string(index) + "]"; }

// The values of an input must be in [0, limit).
void check_range(const std::string& name, std::span<const int32_t> values, int64_t limit) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0 || values[i] >= limit) {
      fail(entry(name, static_cast<int64_t>(i)) + " = " + std::to_string(values[i]) + " is not in [0, " +
           std::to_string(limit) + ")");
    }
  }
}

void check_length(const std::string& name, size_t length, int64_t wanted, const char* symbol) {
  if (static_cast<int64_t>(length) != wanted) {
    fail(name + " has " + std::to_string(length) + " entries, not " + symbol + " = " +
         std::to_string(wanted));
  }
}

}  // namespace

Executor::Executor(const Program& program, std::vector<int64_t> blocks, int threads, const std::string& isa,
                   const Tuning& tuning, Exchange* exchange, const OffloadPlan& offload)
    : program_(program),
      exchange_(exchange),
      resources_(program, std::move(blocks), threads, isa, tuning, exchange, offload) {
  if (!program.finished()) fail("the program is not finished");
  if (program.of_several_ranks() && !exchange)
    fail("the program is one of several ranks, and has no exchange");
  inputs_.resize(static_cast<size_t>(program.input_count()));
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

void Executor::check(const StepArrays& inputs) const {
  const int64_t tokens = static_cast<int64_t>(inputs.ids.size());
  const int64_t requests = static_cast<int64_t>(inputs.kv_len.size());
  if (tokens < 1 || tokens > kMaxTokens)
    fail("ids has " + std::to_string(tokens) + " entries, not 1 to 2^20");
  if (requests < 1 || requests > kMaxTokens) {
    fail("kv_len has " + std::to_string(requests) + " entries, not 1 to 2^20");
  }
  if (static_cast<int64_t>(inputs.rows.size()) > kMaxTokens) fail("rows has more than 2^20 entries");
  check_length("positions", inputs.positions.size(), tokens, "T");
  check_length("q_start", inputs.q_start.size(), requests + 1, "B + 1");
  if (inputs.q_start[0] != 0) fail("q_start[0] is not 0");
  for (int64_t b = 0; b < requests; ++b) {
    if (inputs.q_start[b + 1] < inputs.q_start[b])
      fail(entry("q_start", b + 1) + " is less than the one before");
  }
  if (inputs.q_start[requests] != tokens) {
    fail("q_start ends with " + std::to_string(inputs.q_start[requests]) +
         ", not T = " + std::to_string(tokens));
  }
  for (int64_t b = 0; b < requests; ++b) {
    const int32_t own = inputs.q_start[b + 1] - inputs.q_start[b];
    if (inputs.kv_len[b] < own) {
      fail(entry("kv_len", b) + " = " + std::to_string(inputs.kv_len[b]) + " is less than the request's " +
           std::to_string(own) + " tokens of this step");
    }
  }
  check_range("ids", inputs.ids, program_.input_limit(kIds));
  check_range("positions", inputs.positions, program_.input_limit(kPositions));
  check_range("rows", inputs.rows, tokens);
  if (inputs.groups.size() != program_.groups().size())
    fail("slots and block_tables must name every cache group");
  for (size_t g = 0; g < inputs.groups.size(); ++g) check_group(inputs, g);
}

// The table must give a block of the pool for every key that is read, and the slot of a token must be the
// place in it where attention will look for the token. Blocks that lie before the window of a request's first
// token aren't read.
void Executor::check_group(const StepArrays& inputs, size_t g) const {
  const StepArrays::Group& group = inputs.groups[g];
  const std::string slots = program_.input_name(slots_input(static_cast<int>(g)));
  const std::string table = program_.input_name(table_input(static_cast<int>(g)));
  const int64_t requests = static_cast<int64_t>(inputs.kv_len.size());
  const int64_t blocks = resources_.blocks(g);
  const int64_t window = program_.groups()[g].attention_window;
  check_length(slots, group.slots.size(), static_cast<int64_t>(inputs.ids.size()), "T");
  check_length(table, group.table.size(), requests * group.width, "B * width");
  check_range(slots, group.slots, blocks * kBlock);
  if (program_.groups()[g].layers.empty()) return;
  for (int64_t b = 0; b < requests; ++b) {
    const int32_t* row = group.table.data() + b * group.width;
    const int64_t length = inputs.kv_len[b];
    const int64_t begin = inputs.q_start[b], end = inputs.q_start[b + 1];
    if (begin == end) continue;
    if (length > group.width * kBlock) {
      fail(table + " has " + std::to_string(group.width) + " blocks a request, too few for " +
           entry("kv_len", b) + " = " + std::to_string(length));
    }
    const int64_t first = length - (end - begin);
    const int64_t oldest = window > 0 ? std::max<int64_t>(0, first - window + 1) : 0;
    const int64_t owners = program_.groups()[g].owners, split_blocks = kSplit / kBlock;
    for (int64_t i = oldest / kBlock; i <= (length - 1) / kBlock; ++i) {
      if (row[i] < 0 || row[i] >= blocks) {
        fail(table + "[" + std::to_string(b) + ", " + std::to_string(i) + "] = " + std::to_string(row[i]) +
             " is not in [0, " + std::to_string(blocks) + ")");
      }
      if (owners > 1 && i > oldest / kBlock && i % split_blocks != 0 &&
          row[i] % owners != row[i - 1] % owners) {
        fail(table + "[" + std::to_string(b) + ", " + std::to_string(i) + "] = " + std::to_string(row[i]) +
             " is of another owner than " + std::to_string(row[i - 1]) + " before it, of the same " +
             std::to_string(kSplit) + " keys");
      }
    }
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position = first + t - begin;
      const int64_t wanted = row[position / kBlock] * kBlock + position % kBlock;
      if (group.slots[t] != wanted) {
        fail(entry(slots, t) + " = " + std::to_string(group.slots[t]) + " is not where " + table +
             " has it, " + std::to_string(wanted));
      }
    }
  }
}

// Copies the inputs to where the resolved steps expect them. As soon as something moves, the resolved steps
// are forgotten: what comes behind it may run out of memory, and nobody would know at the next step.
void Executor::copy_inputs(const StepArrays& inputs) {
  const auto place = [this](int index) {
    if (memory_.inputs[index] != inputs_[index].data()) shapes_.clear();
    memory_.inputs[index] = inputs_[index].data();
  };
  const auto copy = [&](int index, std::span<const int32_t> values) {
    inputs_[index].assign(values.begin(), values.end());
    place(index);
  };
  copy(kIds, inputs.ids);
  copy(kPositions, inputs.positions);
  copy(kQStart, inputs.q_start);
  copy(kKvLen, inputs.kv_len);
  copy(kRowsInput, inputs.rows);
  for (size_t g = 0; g < inputs.groups.size(); ++g) {
    const StepArrays::Group& group = inputs.groups[g];
    copy(slots_input(static_cast<int>(g)), group.slots);
    int64_t& stride = memory_.table_strides[g];
    if (group.width > stride) {
      stride = (group.width + kTableRounding - 1) / kTableRounding * kTableRounding;
      shapes_.clear();
    }
    const int index = table_input(static_cast<int>(g));
    std::vector<int32_t>& table = inputs_[index];
    table.resize(inputs.kv_len.size() * static_cast<size_t>(stride));
    for (size_t b = 0; b < inputs.kv_len.size(); ++b) {
      const auto row =
          group.table.subspan(b * static_cast<size_t>(group.width), static_cast<size_t>(group.width));
      std::copy(row.begin(), row.end(), table.begin() + static_cast<int64_t>(b) * stride);
    }
    place(index);
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
  step.call({resources_.kernels(), resources_.pool(), inverse_.data(), exchange_, &ring_});
}

void Executor::begin(const StepArrays& inputs) {
  check(inputs);
  sizes_ = {static_cast<int64_t>(inputs.ids.size()), static_cast<int64_t>(inputs.kv_len.size()),
            static_cast<int64_t>(inputs.rows.size())};
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
    if (options.watch) options.watch(static_cast<size_t>(step.index), true);
    if (options.seconds) {
      const auto start = std::chrono::steady_clock::now();
      execute(step);
      (*options.seconds)[step.index] =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    } else {
      execute(step);
    }
    if (options.watch) options.watch(static_cast<size_t>(step.index), false);
  }
}

void Executor::sample(const RowSampling* parameters, const SampleResult& result) {
  resources_.sampler().sample(logits_, sizes_.rows, program_.vocab_size(), logits_stride_, parameters, result,
                              resources_.pool());
}

}  // namespace ew
