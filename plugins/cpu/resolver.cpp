#include "resolver.h"

#include <algorithm>
#include <stdexcept>

#include "step_resolver.h"

namespace ew {
namespace {

bool may_alias(Op op) {
  switch (op) {
    case Op::elementwise:
    case Op::copy:
    case Op::rms_norm:
    case Op::layer_norm:
    case Op::add_rms_norm:
    case Op::add_layer_norm:
    case Op::rope:
      return true;
    default:
      return false;
  }
}

}  // namespace

void fail_operand(const std::string& subject, const Operand& operand, const std::string& problem) {
  throw std::invalid_argument(subject + ": operand " + operand.name + " " + problem);
}

StepResolver::StepResolver(const Program& program, const Memory& memory, const Sizes& sizes, size_t index)
    : program_(program),
      memory_(memory),
      sizes_(sizes),
      step_(program.steps()[index]),
      title_(step_title(index, step_)) {
  for (const Operand& operand : step_.inputs) in_.push_back(place(operand));
  for (const Operand& operand : step_.outputs) {
    out_.push_back(place(operand));
    for (size_t i = 0; i < out_.back().shape.size(); ++i) {
      if (out_.back().shape[i] > 1 && out_.back().strides[i] < 1)
        fail_operand(title_, operand, "has no place for every element");
    }
  }
}

// The kernels of bf16 and int8 take 2 and 4 values at a time, a row's last ones being padding.
int64_t StepResolver::padding(const Operand& operand) const {
  if (step_.op == Op::embedding) return 1;
  return operand.dtype == Dtype::bf16 ? 2 : operand.dtype == Dtype::i8 ? 4 : 1;
}

Place StepResolver::place(const Operand& operand) const {
  if (operand.kind == OperandKind::cache) return {};
  if (operand.kind == OperandKind::input) {
    Place result;
    result.data = reinterpret_cast<char*>(const_cast<int32_t*>(memory_.inputs[operand.index]));
    for (const Affine& size : operand.shape) result.shape.push_back(size.at(sizes_));
    result.strides.assign(result.shape.size(), 1);
    return result;
  }
  return locate(program_, memory_, sizes_, operand, title_, padding(operand));
}

// The input that holds indices which the kernel follows, or -1.
int StepResolver::index_operand() const {
  switch (step_.op) {
    case Op::embedding:
    case Op::quantized_embedding:
    case Op::route_experts:
      return 0;
    case Op::take_rows:
    case Op::grouped_linear:
    case Op::combine_experts:
    case Op::gather:
    case Op::scatter:
      return 1;
    case Op::quantized_grouped_linear:
      return 3;
    default:
      return -1;
  }
}

// Step inputs that are looked up are checked with the step: see Executor::check, and look_up and take_rows of
// the verifier.
IndexCheck StepResolver::index_check() const {
  const int index = index_operand();
  if (index < 0) return {};
  const bool looks_up =
      step_.op == Op::embedding || step_.op == Op::quantized_embedding || step_.op == Op::take_rows;
  if (looks_up && step_.inputs[static_cast<size_t>(index)].kind == OperandKind::input) return {};
  const Place& place = in_[static_cast<size_t>(index)];
  IndexCheck check{IndexRule::range, "indices",          rows<const int32_t>(place), outer(place),
                   inner(place),     place.shape.back(), in_[0].shape.back()};
  switch (step_.op) {
    case Op::embedding:
    case Op::quantized_embedding:
      check.name = "ids";
      check.limit = in_[1].shape[0];
      break;
    case Op::route_experts:
      check.name = "ids";
      check.limit = step_.attributes.experts;
      break;
    case Op::take_rows:
      check.name = "rows";
      check.limit = in_[0].shape[0];
      break;
    case Op::grouped_linear:
    case Op::quantized_grouped_linear:
      check.name = "starts";
      check.rule = IndexRule::starts;
      check.limit = in_[0].shape[0];
      break;
    case Op::combine_experts:
      check.name = "order";
      check.rule = IndexRule::permutation;
      check.limit = in_[0].shape[0];
      break;
    default:  // gather and scatter
      break;
  }
  return check;
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
      const bool index = static_cast<int>(i) == index_operand();
      const bool residual = step_.attributes.has_residual && i + 1 == in_.size();
      const bool slices = input.index == output.index && !index && !residual;
      if (!buffer(input) || slices || !clash(in_[i], out_[o])) continue;
      const bool same =
          in_[i].data == out_[o].data && in_[i].shape == out_[o].shape && in_[i].strides == out_[o].strides;
      if (index || !same || !(residual || may_alias(step_.op)))
        fail_operand(title_, output, "overlaps operand " + input.name + " in the arena");
    }
    for (size_t p = 0; p < o; ++p) {
      const bool other = step_.op == Op::route_experts || step_.outputs[p].index != output.index ||
                         out_[p].data == out_[o].data;
      if (other && clash(out_[p], out_[o]))
        fail_operand(title_, output, "overlaps operand " + step_.outputs[p].name + " in the arena");
    }
  }
}

Arguments StepResolver::arguments() const {
  switch (step_.op) {
    case Op::embedding:
      return embedding();
    case Op::linear:
      if (step_.inputs[1].dtype == Dtype::fp8) return linear_fp8(1);
      return step_.inputs[0].dtype == Dtype::bf16 ? Arguments(linear_bf16(1)) : Arguments(linear(1));
    case Op::rms_norm:
    case Op::layer_norm:
      return norm(false);
    case Op::add_rms_norm:
    case Op::add_layer_norm:
      return norm(true);
    case Op::rope_table:
      return rope_table();
    case Op::rope:
      return rope();
    case Op::gated_activation:
      return gated_activation();
    case Op::kv_write:
      return kv_write();
    case Op::paged_attention:
      return paged_attention();
    case Op::take_rows:
      return take_rows();
    case Op::elementwise:
      return elementwise();
    case Op::copy:
      return copy();
    case Op::reduce:
      return reduce();
    case Op::cast_bf16:
      return cast_bf16();
    case Op::quantize_activation:
      return quantize_activation();
    case Op::quantized_linear:
      return four_bits(step_.inputs[3].dtype) ? Arguments(linear_int4(3)) : Arguments(linear_int8(3));
    case Op::quantized_embedding:
      return quantized_embedding();
    case Op::grouped_linear:
      if (step_.inputs[2].dtype == Dtype::fp8) return grouped(linear_fp8(2), 1);
      if (step_.inputs[0].dtype == Dtype::bf16) return grouped(linear_bf16(2), 1);
      return grouped(linear(2), 1);
    case Op::quantized_grouped_linear:
      if (four_bits(step_.inputs[4].dtype)) return grouped(linear_int4(4), 3);
      return grouped(linear_int8(4), 3);
    case Op::route_experts:
      return route_experts();
    case Op::combine_experts:
      return combine_experts();
    case Op::top_k:
      return top_k();
    case Op::gather:
      return gather();
    case Op::scatter:
      return scatter();
    case Op::rms_norm_quantize:
    case Op::layer_norm_quantize:
      return norm_quantize(false);
    case Op::add_rms_norm_quantize:
    case Op::add_layer_norm_quantize:
      return norm_quantize(true);
    case Op::gated_activation_quantize:
      return gated_activation_quantize();
    case Op::rope_kv_write:
      return rope_kv_write();
  }
  return {};
}

Place locate(const Program& program, const Memory& memory, const Sizes& sizes, const Operand& operand,
             const std::string& subject, int64_t padding) {
  Place result;
  bool empty = false;
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
    if (at < 0 || size < 0 || at % element != 0 || at > memory.arena_bytes ||
        size > memory.arena_bytes - at) {
      fail_operand(subject, operand, "is in buffer " + buffer.name + ", which is outside of the arena");
    }
    base = memory.arena + at;
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
    resolved.push_back(
        {program.steps()[index].op, static_cast<int>(index), step.index_check(), step.arguments()});
  }
  return resolved;
}

}  // namespace ew
