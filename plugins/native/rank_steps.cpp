#include "rank_steps.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

namespace ew {
namespace {

//   int64   the number of arrays, then of each its number of words and of columns
//   int32   the arrays, in the order of the program's ports, which is the same on all ranks
constexpr size_t kMostPorts = 1 << 16;

void check_bytes(size_t needed, size_t there) {
  if (needed > there) throw std::runtime_error("the step that rank 0 sent is cut off");
}

void append(char** at, int64_t value) {
  std::memcpy(*at, &value, sizeof value);
  *at += sizeof value;
}

void append(char** at, std::span<const int32_t> values) {
  if (!values.empty()) std::memcpy(*at, values.data(), values.size_bytes());
  *at += values.size_bytes();
}

int64_t take_number(std::span<const char>* left) {
  int64_t value;
  check_bytes(sizeof value, left->size());
  std::memcpy(&value, left->data(), sizeof value);
  *left = left->subspan(sizeof value);
  return value;
}

std::span<const int32_t> take(std::span<const char>* left, int64_t count) {
  check_bytes(
      count < 0 || count > (int64_t{1} << 40) ? SIZE_MAX : static_cast<size_t>(count) * sizeof(int32_t),
      left->size());
  const std::span<const int32_t> values(reinterpret_cast<const int32_t*>(left->data()),
                                        static_cast<size_t>(count));
  *left = left->subspan(values.size_bytes());
  return values;
}

}  // namespace

StepArrays unpack_step(std::span<const char> left) {
  const size_t count = static_cast<size_t>(take_number(&left));
  check_bytes(count > kMostPorts ? SIZE_MAX : 2 * count * sizeof(int64_t), left.size());
  std::vector<std::pair<int64_t, int64_t>> sizes(count);
  for (auto& [words, columns] : sizes) words = take_number(&left), columns = take_number(&left);
  StepArrays step;
  for (const auto& [words, columns] : sizes) step.ports.push_back({take(&left, words), columns});
  return step;
}

size_t packed_bytes(const StepArrays& step) {
  size_t bytes = (1 + 2 * step.ports.size()) * sizeof(int64_t);
  for (const StepArray& array : step.ports) bytes += array.values.size_bytes();
  return bytes;
}

void pack_step(const StepArrays& step, char* at) {
  append(&at, static_cast<int64_t>(step.ports.size()));
  for (const StepArray& array : step.ports) {
    append(&at, static_cast<int64_t>(array.values.size()));
    append(&at, array.columns);
  }
  for (const StepArray& array : step.ports) append(&at, array.values);
}

void post_step(RankLink& link, const StepArrays& step) {
  const int64_t bytes = static_cast<int64_t>(packed_bytes(step));
  pack_step(step, link.inbox(bytes));
  link.post(bytes);
}

void run_posted_steps(RankLink& link, Executor& executor) {
  std::span<const char> inputs;
  while (link.wait_step(&inputs)) {
    try {
      executor.run(unpack_step(inputs));
    } catch (const std::exception& e) {
      if (!link.problem().empty()) throw;
      link.fail_step(e.what());
    }
    link.finish_step();
  }
}

}  // namespace ew
