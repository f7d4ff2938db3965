#include "rank_steps.h"

#include <cstring>
#include <stdexcept>

namespace ew {
namespace {

//   int64   T, B, R, groups, then each group's width
//   int32   ids [T], positions [T], q_start [B+1], kv_len [B], rows [R]; each group's slots [T] and table [B,
//   width]
constexpr size_t kSizes = 4;

struct Sizes64 {
  int64_t tokens, requests, rows, groups;
};

void append(char** at, std::span<const int32_t> values) {
  if (!values.empty()) std::memcpy(*at, values.data(), values.size_bytes());
  *at += values.size_bytes();
}

std::span<const int32_t> take(std::span<const char>* left, int64_t count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(int32_t);
  if (count < 0 || count > (int64_t{1} << 40) || bytes > left->size()) {
    throw std::runtime_error("the step that rank 0 sent is cut off");
  }
  const std::span<const int32_t> found(reinterpret_cast<const int32_t*>(left->data()),
                                       static_cast<size_t>(count));
  *left = left->subspan(bytes);
  return found;
}

}  // namespace

StepArrays unpack_step(std::span<const char> left) {
  int64_t sizes[kSizes];
  if (left.size() < sizeof sizes) throw std::runtime_error("the step that rank 0 sent is cut off");
  std::memcpy(sizes, left.data(), sizeof sizes);
  const auto [tokens, requests, rows, groups] = Sizes64{sizes[0], sizes[1], sizes[2], sizes[3]};
  left = left.subspan(sizeof sizes);
  std::vector<int64_t> widths(static_cast<size_t>(groups));
  if (left.size() < widths.size() * sizeof(int64_t))
    throw std::runtime_error("the step that rank 0 sent is cut off");
  std::memcpy(widths.data(), left.data(), widths.size() * sizeof(int64_t));
  left = left.subspan(widths.size() * sizeof(int64_t));
  StepArrays step;
  step.ids = take(&left, tokens);
  step.positions = take(&left, tokens);
  step.q_start = take(&left, requests + 1);
  step.kv_len = take(&left, requests);
  step.rows = take(&left, rows);
  for (const int64_t width : widths) {
    StepArrays::Group group;
    group.slots = take(&left, tokens);
    group.table = take(&left, requests * width);
    group.width = width;
    step.groups.push_back(group);
  }
  return step;
}

size_t packed_bytes(const StepArrays& step) {
  size_t bytes = (kSizes + step.groups.size()) * sizeof(int64_t);
  for (const auto& values : {step.ids, step.positions, step.q_start, step.kv_len, step.rows})
    bytes += values.size_bytes();
  for (const StepArrays::Group& group : step.groups)
    bytes += group.slots.size_bytes() + group.table.size_bytes();
  return bytes;
}

void pack_step(const StepArrays& step, char* at) {
  const auto append_size = [&](size_t size) {
    const int64_t value = static_cast<int64_t>(size);
    std::memcpy(at, &value, sizeof value);
    at += sizeof value;
  };
  append_size(step.ids.size());
  append_size(step.kv_len.size());
  append_size(step.rows.size());
  append_size(step.groups.size());
  for (const StepArrays::Group& group : step.groups) append_size(static_cast<size_t>(group.width));
  for (const auto& values : {step.ids, step.positions, step.q_start, step.kv_len, step.rows})
    append(&at, values);
  for (const StepArrays::Group& group : step.groups) {
    append(&at, group.slots);
    append(&at, group.table);
  }
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
