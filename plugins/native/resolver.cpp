#include "resolver.h"

#include <algorithm>
#include <stdexcept>

#include "step_resolver.h"

namespace ew {
namespace {

[[noreturn]] void fail_operand(const std::string& subject, const Operand& operand,
                               const std::string& problem) {
  throw std::invalid_argument(subject + ": operand " + operand.name + " " + problem);
}

}  // namespace

StepResolver::StepResolver(const Program& program, const Memory& memory, const Sizes& sizes, size_t index)
    : program_(program),
      memory_(memory),
      sizes_(sizes),
      step_(program.steps()[index]),
      index_(index),
      title_(step_title(index, step_)) {
  in_.reserve(step_.inputs.size());
  out_.reserve(step_.outputs.size());
  for (const Operand& operand : step_.inputs) in_.push_back(place(operand));
  for (const Operand& operand : step_.outputs) {
    out_.push_back(place(operand));
    for (size_t i = 0; i < out_.back().shape.size(); ++i) {
      if (out_.back().shape[i] > 1 && out_.back().strides[i] < 1)
        fail_operand(title_, operand, "has no place for every element");
    }
  }
}

void StepResolver::fail_input(size_t i, const std::string& problem) const {
  fail_operand(title_, step_.inputs[i], problem);
}

void StepResolver::fail_output(size_t i, const std::string& problem) const {
  fail_operand(title_, step_.outputs[i], problem);
}

Place StepResolver::place(const Operand& operand) const {
  if (operand.kind == OperandKind::cache) return {};
  if (operand.kind == OperandKind::input) {
    Place result;
    result.data = reinterpret_cast<char*>(const_cast<int32_t*>(memory_.inputs[operand.index]));
    for (const Affine& size : operand.shape) result.shape.push_back(size.at(sizes_));
    result.strides.assign(result.shape.size(), 1);
    for (size_t i = result.shape.size(); i-- > 1;)
      result.strides[i - 1] = result.strides[i] * result.shape[i];
    return result;
  }
  // The kernels of bf16 and int8 take 2 and 4 values at a time, a row's last ones being padding.
  const int64_t padding = !step_.op->padded_rows         ? 1
                          : operand.dtype == Dtype::bf16 ? 2
                          : operand.dtype == Dtype::i8   ? 4
                                                         : 1;
  return locate(program_, memory_, sizes_, operand, title_, padding);
}

// Step inputs that are looked up are checked with the step: see Executor::check, and look_up and take_rows's
// verify.
IndexCheck StepResolver::index_check() const {
  const Indices& indices = step_.op->indices;
  if (indices.input < 0) return {};
  const size_t input = static_cast<size_t>(indices.input);
  if (indices.checked_with_inputs && step_.inputs[input].kind == OperandKind::input) return {};
  const Place& place = in_[input];
  return {indices.rule, indices.name,       rows<const int32_t>(place), outer(place),
          inner(place), place.shape.back(), indices.limit(*this)};
}

// Two buffers of the arena may share memory only while one of them is dead. A step that writes one and reads
// or writes the other sees both alive, unless both are the same view and the kernel allows that. (Views of
// one buffer are slices of it, interleaved at times; whether they overlap is not looked at, but where a
// kernel follows what it reads, since indices must not change while it runs, and for a linear's residual.)
void StepResolver::check_overlap() const {
  const auto buffer = [](const Operand& operand) { return operand.kind == OperandKind::buffer; };
  const auto clash = [](const Place& a, const Place& b) {
    return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
  };
  for (size_t o = 0; o < out_.size(); ++o) {
    const Operand& output = step_.outputs[o];
    for (size_t i = 0; i < in_.size(); ++i) {
      const Operand& input = step_.inputs[i];
      const bool index = static_cast<int>(i) == step_.op->indices.input;
      const bool residual = step_.attributes.has_residual && i + 1 == in_.size();
      const bool slices = input.index == output.index && !index && !residual;
      if (!buffer(input) || slices || !clash(in_[i], out_[o])) continue;
      const bool same =
          in_[i].data == out_[o].data && in_[i].shape == out_[o].shape && in_[i].strides == out_[o].strides;
      if (index || !same || !(residual || step_.op->in_place))
        fail_operand(title_, output, "overlaps operand " + input.name + " in the arena");
    }
    for (size_t p = 0; p < o; ++p) {
      const bool other = step_.op->separate_outputs || step_.outputs[p].index != output.index ||
                         out_[p].data == out_[o].data;
      if (other && clash(out_[p], out_[o]))
        fail_operand(title_, output, "overlaps operand " + step_.outputs[p].name + " in the arena");
    }
  }
}

View view(const Place& place, const Place& to) {
  View result;
  result.data = place.data;
  const size_t rank = place.shape.size();
  const size_t missing = to.shape.size() - rank;
  for (size_t i = 0; i < rank; ++i) {
    const bool repeated = place.shape[i] == 1 && to.shape[i + missing] != 1;
    result.stride[kMaxRank - rank + i] = repeated ? 0 : place.strides[i];
  }
  return result;
}

Place locate(const Program& program, const Memory& memory, const Sizes& sizes, const Operand& operand,
             const std::string& subject, int64_t padding) {
  Place result;
  bool empty = false;
  result.shape.reserve(operand.shape.size());
  result.strides.reserve(operand.strides.size());
  for (const Affine& size : operand.shape) {
    result.shape.push_back(size.at(sizes));
    if (result.shape.back() < 0) fail_operand(subject, operand, "has a negative size");
    empty |= result.shape.back() == 0;
  }
  for (const Affine& stride : operand.strides) result.strides.push_back(stride.at(sizes));
  if (operand.kind == OperandKind::weight && program.weights()[operand.index].layout != WeightLayout::rows) {
    const Weight& weight = program.weights()[operand.index];
    result.data = static_cast<char*>(const_cast<void*>(weight.data));
    result.bytes = weight.bytes();
    return result;
  }
  const int64_t element = element_bytes(operand.dtype);
  const int64_t offset = operand.offset.at(sizes);
  int64_t end = 1;  // elements from the first to behind the last
  for (size_t i = 0; i < result.shape.size() && !empty; ++i) {
    const bool last = i + 1 == result.shape.size();
    const int64_t size = last ? (result.shape[i] + padding - 1) / padding * padding : result.shape[i];
    int64_t reach = 0;
    const bool overflow = __builtin_mul_overflow(size - 1, result.strides[i], &reach) ||
                          __builtin_add_overflow(end, reach, &end) || end > (int64_t{1} << 60);
    if (result.strides[i] < 0 || overflow)
      fail_operand(subject, operand, "has a stride that is negative or too large");
  }
  char* base = nullptr;
  int64_t limit = 0;  // elements
  std::string holder;
  if (operand.kind == OperandKind::weight) {
    const Weight& weight = program.weights()[operand.index];
    base = static_cast<char*>(const_cast<void*>(weight.data));
    limit = weight.elements();
  } else {
    const Buffer& buffer = program.buffers()[operand.index];
    const int64_t at = buffer.offset.at(sizes), size = buffer.size.at(sizes);
    const auto& [start, room] =
        buffer.region ? memory.regions.at(buffer.region) : std::pair{memory.arena, memory.arena_bytes};
    if (at < 0 || size < 0 || at % element != 0 || at > room || size > room - at) {
      fail_operand(subject, operand, "is in buffer " + buffer.name + ", which is outside of the arena");
    }
    base = start + at;
    limit = size / element;
  }
  if (empty) return result;
  if (offset < 0 || offset > limit || end > limit - offset) {
    fail_operand(subject, operand,
                 "ends at element " + std::to_string(offset + end) + " of a " +
                     (operand.kind == OperandKind::weight ? "weight" : "buffer") + " of " +
                     std::to_string(limit));
  }
  result.data = base + offset * element;
  result.bytes = end * element;
  return result;
}

std::vector<ResolvedStep> resolve(const Program& program, const Memory& memory, const Sizes& sizes) {
  std::vector<ResolvedStep> resolved;
  resolved.reserve(program.steps().size());
  for (size_t index = 0; index < program.steps().size(); ++index) {
    const StepResolver step(program, memory, sizes, index);
    if (step.is_empty()) continue;
    step.check_overlap();
    resolved.push_back({static_cast<int>(index), step.index_check(), program.steps()[index].op->bind(step)});
  }
  return resolved;
}

}  // namespace ew
