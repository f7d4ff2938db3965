#include "decode_runs.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ew {
namespace {

[[noreturn]] void fail(const std::string& problem) {
  throw std::invalid_argument("a step with several runs: " + problem);
}

}  // namespace

DecodeArrays::DecodeArrays(const Program& program, const StepArrays& step)
    : step_(step), own_(step.ports.size()) {
  const std::vector<Port>& ports = program.ports();
  requests_ = step.ports[static_cast<size_t>(program.find_port(PortCheck::lengths))].values.size();
  for (size_t i = 0; i < ports.size(); ++i) {
    const Port& port = ports[i];
    const std::span<const int32_t> values = step.ports[i].values;
    if (port.check == PortCheck::table) continue;
    if (port.check == PortCheck::starts || port.check == PortCheck::row) {
      for (size_t b = 0; b < values.size(); ++b)
        if (values[b] != static_cast<int32_t>(b))
          fail("a request has several tokens, or one that isn't a row");
      if (port.check == PortCheck::row && values.size() != requests_) fail("a request has no row");
      continue;
    }
    own_[i].assign(values.begin(), values.end());
    step_.ports[i].values = own_[i];
    if (values.size() != requests_) fail("a request has several tokens");
    if (port.check == PortCheck::lengths) {
      lengths_ = &own_[i];
    } else if (port.check == PortCheck::slots) {
      const CacheGroup& group = program.groups()[static_cast<size_t>(port.group)];
      if (group.state_size > 0) fail("the program has states");
      const size_t table = static_cast<size_t>(program.find_port(PortCheck::table, port.group));
      slots_.push_back({&own_[i], step.ports[table], group.block_tokens});
    } else if (port.name == "ids") {
      ids_ = &own_[i];
    } else if (port.name == "positions") {
      positions_ = &own_[i];
    } else {
      fail("the program has " + port.name);
    }
  }
  if (!ids_ || !positions_) fail("the program lacks ids or positions");
}

void DecodeArrays::advance(std::span<const int32_t> tokens) {
  std::copy(tokens.begin(), tokens.end(), ids_->begin());
  for (int32_t& length : *lengths_) ++length;
  for (int32_t& position : *positions_) ++position;
  for (const Slots& slots : slots_) {
    for (size_t b = 0; b < requests_; ++b) {
      const int64_t position = (*positions_)[b], at = position / slots.block_tokens;
      const bool inside = at < slots.table.columns;
      const int64_t block =
          inside ? slots.table.values[b * static_cast<size_t>(slots.table.columns) + static_cast<size_t>(at)]
                 : -1;
      (*slots.values)[b] =
          block < 0 ? -1 : static_cast<int32_t>(block * slots.block_tokens + position % slots.block_tokens);
    }
  }
}

size_t decode_runs(Executor& executor, DecodeArrays& arrays, std::span<RowSampling> rows, size_t runs,
                   std::span<const int32_t> until, int32_t* tokens) {
  const size_t count = arrays.requests();
  const auto ends = [&](int32_t token) { return token == kNoToken || std::ranges::count(until, token) > 0; };
  for (size_t ran = 1;; ++ran, tokens += count) {
    executor.run(arrays.step());
    SampleResult result;
    result.tokens = tokens;
    executor.sample(rows.data(), result);
    const std::span<const int32_t> drawn(tokens, count);
    if (ran == runs || std::ranges::any_of(drawn, ends) || executor.take_interrupt()) return ran;
    arrays.advance(drawn);
    for (RowSampling& row : rows) ++row.counter;
  }
}

}  // namespace ew
