#include "resolver.h"

#include <algorithm>
#include <stdexcept>

namespace ew {
namespace {

[[noreturn]] void fail(const std::string& subject, const Operand& operand, const std::string& problem) {
  throw std::invalid_argument(subject + ": operand " + operand.name + " " + problem);
}

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

class StepResolver {
 public:
  StepResolver(const Program& program, const Memory& memory, const Sizes& sizes, size_t index)
      : program_(program),
        memory_(memory),
        sizes_(sizes),
        step_(program.steps()[index]),
        title_(step_title(index, step_)) {
    for (const Operand& operand : step_.inputs) in_.push_back(place(operand));
    for (const Operand& operand : step_.outputs) out_.push_back(place(operand));
  }

  bool is_empty() const { return !out_.empty() && out_[0].bytes == 0; }

  void check_overlap() const;
  int64_t lookup_limit() const {
    const bool computed = step_.op == Op::embedding && step_.inputs[0].kind != OperandKind::input;
    return computed ? step_.inputs[1].shape[0].constant : 0;
  }

  Arguments arguments() const {
    switch (step_.op) {
      case Op::embedding:
        return embedding();
      case Op::linear:
        return linear();
      case Op::rms_norm:
        return norm(false);
      case Op::layer_norm:
        return norm(false);
      case Op::add_rms_norm:
        return norm(true);
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
    }
    return {};
  }

 private:
  Place place(const Operand& operand) const {
    if (operand.kind == OperandKind::cache) return {};
    if (operand.kind == OperandKind::input) {
      Place result;
      result.data = reinterpret_cast<char*>(const_cast<int32_t*>(memory_.inputs[operand.index]));
      for (const Affine& size : operand.shape) result.shape.push_back(size.at(sizes_));
      result.strides.assign(result.shape.size(), 1);
      return result;
    }
    return locate(program_, memory_, sizes_, operand, title_);
  }

  template <class T>
  static T* pointer(const Place& place) {
    return reinterpret_cast<T*>(place.data);
  }
  // A tensor of rank 1 to 3 as [outer, inner, C].
  template <class T>
  static Rows<T> rows(const Place& place) {
    const size_t rank = place.shape.size();
    return {pointer<T>(place), rank > 1 ? place.strides[0] : 0, rank > 2 ? place.strides[1] : 0};
  }
  static int64_t outer(const Place& place) { return place.shape.size() > 1 ? place.shape[0] : 1; }
  static int64_t inner(const Place& place) { return place.shape.size() > 2 ? place.shape[1] : 1; }

  // As rank 4 broadcast to the shape `to`; missing dimensions come first.
  static View view(const Place& place, const Place& to) {
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
  static void set_shape(const Place& place, int64_t* shape) {
    std::copy(place.shape.begin(), place.shape.end(), shape + kMaxRank - place.shape.size());
  }

  EmbeddingArgs embedding() const {
    return {.tokens = out_[0].shape[0],
            .hidden = out_[0].shape[1],
            .ids = pointer<int32_t>(in_[0]),
            .weight = pointer<float>(in_[1]),
            .layout = program_.weights()[step_.inputs[1].index].layout,
            .out = pointer<float>(out_[0]),
            .out_stride = out_[0].strides[0]};
  }
  LinearArgs linear() const {
    return {.m = out_[0].shape[0],
            .n = out_[0].shape[1],
            .k = in_[0].shape[1],
            .x = pointer<float>(in_[0]),
            .x_stride = in_[0].strides[0],
            .weight = pointer<float>(in_[1]),
            .bias = step_.attributes.has_bias ? pointer<float>(in_[2]) : nullptr,
            .y = pointer<float>(out_[0]),
            .y_stride = out_[0].strides[0]};
  }
  NormArgs norm(bool add) const {
    NormArgs args{.outer = outer(in_[0]),
                  .inner = inner(in_[0]),
                  .size = in_[0].shape.back(),
                  .x = rows<const float>(in_[0]),
                  .residual = {},
                  .weight = nullptr,
                  .bias = nullptr,
                  .eps = step_.attributes.eps,
                  .normed = rows<float>(out_[0]),
                  .sum = {}};
    size_t next = 1;
    if (add) {
      args.residual = rows<const float>(in_[next++]);
      args.sum = rows<float>(out_[1]);
    }
    if (step_.attributes.has_weight) args.weight = pointer<float>(in_[next++]);
    if (step_.attributes.has_bias) args.bias = pointer<float>(in_[next]);
    return args;
  }
  RopeTableArgs rope_table() const {
    return {.tokens = out_[0].shape[0],
            .freqs = in_[1].shape[0],
            .positions = pointer<int32_t>(in_[0]),
            .inv_freq = pointer<float>(in_[1]),
            .scale = step_.attributes.scale,
            .out = pointer<float>(out_[0]),
            .out_stride = out_[0].strides[0]};
  }
  RopeArgs rope() const {
    return {.tokens = out_[0].shape[0],
            .heads = out_[0].shape[1],
            .size = out_[0].shape[2],
            .freqs = in_[1].shape[1] / 2,
            .x = rows<const float>(in_[0]),
            .table = pointer<float>(in_[1]),
            .table_stride = in_[1].strides[0],
            .interleaved = step_.attributes.interleaved,
            .out = rows<float>(out_[0])};
  }
  GatedActivationArgs gated_activation() const {
    return {.outer = outer(out_[0]),
            .inner = inner(out_[0]),
            .size = out_[0].shape.back(),
            .x = rows<const float>(in_[0]),
            .kind = step_.attributes.activation,
            .out = rows<float>(out_[0])};
  }
  KvWriteArgs kv_write() const {
    return {.tokens = in_[0].shape[0],
            .k = rows<const float>(in_[0]),
            .v = rows<const float>(in_[1]),
            .slots = pointer<int32_t>(in_[2]),
            .cache = memory_.caches[step_.inputs[3].index]};
  }
  PagedAttentionArgs paged_attention() const {
    const int group = program_.caches()[step_.inputs[1].index].group;
    return {.requests = sizes_.requests,
            .query_heads = in_[0].shape[1],
            .q = rows<const float>(in_[0]),
            .cache = memory_.caches[step_.inputs[1].index],
            .block_table = pointer<int32_t>(in_[2]),
            .block_table_stride = memory_.table_strides[group],
            .q_start = pointer<int32_t>(in_[3]),
            .kv_len = pointer<int32_t>(in_[4]),
            .sinks = step_.attributes.has_sinks ? pointer<float>(in_[5]) : nullptr,
            .scale = step_.attributes.scale,
            .window = step_.attributes.window,
            .softcap = step_.attributes.softcap,
            .out = rows<float>(out_[0]),
            .workspace = memory_.workspace};
  }
  TakeRowsArgs take_rows() const {
    return {.count = out_[0].shape[0],
            .inner = inner(out_[0]),
            .size = out_[0].shape.back(),
            .x = rows<const float>(in_[0]),
            .rows = pointer<int32_t>(in_[1]),
            .out = rows<float>(out_[0])};
  }
  ElementwiseArgs elementwise() const {
    ElementwiseArgs args;
    args.fn = step_.attributes.fn;
    set_shape(out_[0], args.shape);
    for (size_t i = 0; i < in_.size(); ++i) args.in[i] = view(in_[i], out_[0]);
    args.out = view(out_[0], out_[0]);
    args.integer = step_.outputs[0].dtype == Dtype::i32;
    args.has_scalar = step_.attributes.has_scalar;
    args.scalar_first = step_.attributes.scalar_first;
    args.scalar = step_.attributes.scalar;
    return args;
  }
  CopyArgs copy() const {
    CopyArgs args;
    set_shape(out_[0], args.shape);
    args.in = view(in_[0], out_[0]);
    args.out = view(out_[0], out_[0]);
    return args;
  }
  ReduceArgs reduce() const {
    ReduceArgs args;
    args.kind = step_.attributes.reduce;
    set_shape(in_[0], args.shape);
    args.in = view(in_[0], in_[0]);
    args.in.stride[kMaxRank - 1] = 1;
    args.out = view(out_[0], out_[0]);
    return args;
  }

  const Program& program_;
  const Memory& memory_;
  const Sizes& sizes_;
  const Step& step_;
  const std::string title_;
  std::vector<Place> in_, out_;
};

// Two buffers of the arena may share memory only while one of them is dead. A step that writes one and reads
// or writes the other sees both alive, unless both are the same view and the kernel allows that. (Views of
// one buffer are slices of it, interleaved at times; whether they overlap is not looked at.)
void StepResolver::check_overlap() const {
  const auto buffer = [](const Operand& operand) { return operand.kind == OperandKind::buffer; };
  const auto clash = [](const Place& a, const Place& b) {
    return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
  };
  for (size_t o = 0; o < out_.size(); ++o) {
    const Operand& output = step_.outputs[o];
    for (size_t i = 0; i < in_.size(); ++i) {
      const Operand& input = step_.inputs[i];
      if (!buffer(input) || input.index == output.index || !clash(in_[i], out_[o])) continue;
      const bool same =
          in_[i].data == out_[o].data && in_[i].shape == out_[o].shape && in_[i].strides == out_[o].strides;
      if (!same || !may_alias(step_.op))
        fail(title_, output, "overlaps operand " + input.name + " in the arena");
    }
    for (size_t p = 0; p < o; ++p) {
      const bool other = step_.outputs[p].index != output.index || out_[p].data == out_[o].data;
      if (other && clash(out_[p], out_[o]))
        fail(title_, output, "overlaps operand " + step_.outputs[p].name + " in the arena");
    }
  }
}

}  // namespace

Place locate(const Program& program, const Memory& memory, const Sizes& sizes, const Operand& operand,
             const std::string& subject) {
  Place result;
  bool empty = false;
  for (const Affine& size : operand.shape) {
    result.shape.push_back(size.at(sizes));
    if (result.shape.back() < 0) fail(subject, operand, "has a negative size");
    empty |= result.shape.back() == 0;
  }
  for (const Affine& stride : operand.strides) result.strides.push_back(stride.at(sizes));
  if (operand.kind == OperandKind::weight &&
      program.weights()[operand.index].layout == WeightLayout::panel32) {
    const Weight& weight = program.weights()[operand.index];
    result.data = static_cast<char*>(const_cast<void*>(weight.data));
    result.bytes = weight.elements() * kElementBytes;
    return result;
  }
  const int64_t offset = operand.offset.at(sizes);
  int64_t end = 1;  // elements from the first to behind the last
  for (size_t i = 0; i < result.shape.size() && !empty; ++i) {
    int64_t reach = 0;
    const bool overflow = __builtin_mul_overflow(result.shape[i] - 1, result.strides[i], &reach) ||
                          __builtin_add_overflow(end, reach, &end) || end > (int64_t{1} << 60);
    if (result.strides[i] < 0 || overflow)
      fail(subject, operand, "has a stride that is negative or too large");
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
    if (at < 0 || size < 0 || at % kElementBytes != 0 || at > memory.arena_bytes ||
        size > memory.arena_bytes - at) {
      fail(subject, operand, "is in buffer " + buffer.name + ", which is outside of the arena");
    }
    base = memory.arena + at;
    limit = size / kElementBytes;
  }
  if (empty) return result;
  if (offset < 0 || offset > limit || end > limit - offset) {
    fail(subject, operand,
         "ends at element " + std::to_string(offset + end) + " of a " +
             (operand.kind == OperandKind::weight ? "weight" : "buffer") + " of " + std::to_string(limit));
  }
  result.data = base + offset * kElementBytes;
  result.bytes = end * kElementBytes;
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
        {program.steps()[index].op, static_cast<int>(index), step.lookup_limit(), step.arguments()});
  }
  return resolved;
}

}  // namespace ew
