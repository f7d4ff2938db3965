// Kernel arguments of norms, rope, attention and the plain ops; see step_resolver.h.
#include "step_resolver.h"

namespace ew {

// As rank 4 broadcast to the shape `to`; missing dimensions come first.
View StepResolver::view(const Place& place, const Place& to) {
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

NormArgs StepResolver::norm_of(bool add) const {
  NormArgs args{.outer = outer(in_[0]),
                .inner = inner(in_[0]),
                .size = in_[0].shape.back(),
                .x = rows<const float>(in_[0]),
                .residual = {},
                .weight = nullptr,
                .bias = nullptr,
                .eps = step_.attributes.eps,
                .normed = {},
                .sum = {}};
  size_t next = 1;
  if (add) args.residual = rows<const float>(in_[next++]);
  if (step_.attributes.has_weight) args.weight = pointer<float>(in_[next++]);
  if (step_.attributes.has_bias) args.bias = pointer<float>(in_[next]);
  return args;
}

NormArgs StepResolver::norm(bool add) const {
  NormArgs args = norm_of(add);
  args.normed = rows<float>(out_[0]);
  if (add) args.sum = rows<float>(out_[1]);
  return args;
}

RopeTableArgs StepResolver::rope_table() const {
  return {.tokens = out_[0].shape[0],
          .freqs = in_[1].shape[0],
          .positions = pointer<int32_t>(in_[0]),
          .inv_freq = pointer<float>(in_[1]),
          .scale = step_.attributes.scale,
          .out = pointer<float>(out_[0]),
          .out_stride = out_[0].strides[0]};
}

RopeArgs StepResolver::rope() const {
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

GatedActivationArgs StepResolver::gated_activation() const {
  return {.outer = outer(out_[0]),
          .inner = inner(out_[0]),
          .size = out_[0].shape.back(),
          .x = rows<const float>(in_[0]),
          .kind = step_.attributes.activation,
          .out = rows<float>(out_[0])};
}

KvWriteArgs StepResolver::kv_write() const {
  return {.tokens = in_[0].shape[0],
          .k = rows<const float>(in_[0]),
          .v = rows<const float>(in_[1]),
          .slots = pointer<int32_t>(in_[2]),
          .cache = memory_.caches[step_.inputs[3].index]};
}

PagedAttentionArgs StepResolver::paged_attention() const {
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
          .slopes =
              step_.attributes.has_slopes ? pointer<float>(in_[step_.attributes.has_sinks ? 6 : 5]) : nullptr,
          .scale = step_.attributes.scale,
          .window = step_.attributes.window,
          .softcap = step_.attributes.softcap,
          .out = rows<float>(out_[0]),
          .workspace = memory_.workspace};
}

TakeRowsArgs StepResolver::take_rows() const {
  return {.count = out_[0].shape[0],
          .inner = inner(out_[0]),
          .size = out_[0].shape.back(),
          .x = rows<const float>(in_[0]),
          .rows = pointer<int32_t>(in_[1]),
          .out = rows<float>(out_[0])};
}

ElementwiseArgs StepResolver::elementwise() const {
  ElementwiseArgs args;
  args.fn = step_.attributes.fn;
  set_shape(out_[0], args.shape);
  for (size_t i = 0; i < in_.size(); ++i) args.in[i] = view(in_[i], out_[0]);
  args.out = view(out_[0], out_[0]);
  args.integer = step_.inputs[0].dtype == Dtype::i32 && args.fn != ElementwiseFn::cast;
  args.has_scalar = step_.attributes.has_scalar;
  args.scalar_first = step_.attributes.scalar_first;
  args.scalar = step_.attributes.scalar;
  return args;
}

CopyArgs StepResolver::copy() const {
  CopyArgs args;
  set_shape(out_[0], args.shape);
  args.in = view(in_[0], out_[0]);
  args.out = view(out_[0], out_[0]);
  return args;
}

ReduceArgs StepResolver::reduce() const {
  ReduceArgs args;
  args.kind = step_.attributes.reduce;
  set_shape(in_[0], args.shape);
  args.in = view(in_[0], in_[0]);
  args.in.stride[kMaxRank - 1] = 1;
  args.out = view(out_[0], out_[0]);
  return args;
}

}  // namespace ew
