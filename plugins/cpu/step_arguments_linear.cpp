// Kernel arguments of linears and embeddings in every format; see step_resolver.h.
#include "step_resolver.h"

namespace ew {

int64_t StepResolver::expert_stride(size_t input) const {
  const Weight& weight = program_.weights()[step_.inputs[input].index];
  return weight.bytes() / element_bytes(weight.dtype) / weight.shape[0];
}

Epilogue StepResolver::epilogue() const {
  Epilogue result{.activation = step_.attributes.linear_activation};
  if (step_.attributes.has_residual) {
    result.residual = pointer<float>(in_.back());
    result.residual_stride = in_.back().strides[0];
  }
  return result;
}

// What embeddings in every format have.
template <class Embedding>
Embedding StepResolver::embedding_of() const {
  Embedding args;
  args.tokens = out_[0].shape[0];
  args.hidden = out_[0].shape[1];
  args.ids = pointer<int32_t>(in_[0]);
  set(args.weight, in_[1]);
  args.out = pointer<float>(out_[0]);
  args.out_stride = out_[0].strides[0];
  if constexpr (requires { args.layout; }) args.layout = layout(1);
  if constexpr (requires { args.scales; }) {
    args.group_size = step_.attributes.group_size;
    args.scales = pointer<uint16_t>(in_[2]);
  }
  return args;
}

Arguments StepResolver::embedding() const {
  switch (step_.inputs[1].dtype) {
    case Dtype::bf16:
      return embedding_of<EmbeddingBf16Args>();
    case Dtype::fp8:
      return embedding_of<EmbeddingFp8Args>();
    default:
      return embedding_of<EmbeddingArgs>();
  }
}

Arguments StepResolver::quantized_embedding() const {
  if (!four_bits(step_.inputs[1].dtype)) return embedding_of<EmbeddingInt8Args>();
  auto args = embedding_of<EmbeddingInt4Args>();
  if (step_.attributes.has_offsets) args.offsets = pointer<uint16_t>(in_[3]);
  return args;
}

CastBf16Args StepResolver::cast_bf16() const {
  return {.m = in_[0].shape[0],
          .k = in_[0].shape[1],
          .x = pointer<float>(in_[0]),
          .x_stride = in_[0].strides[0],
          .out = pointer<uint16_t>(out_[0]),
          .out_stride = out_[0].strides[0]};
}

QuantizeActivationArgs StepResolver::quantize_activation() const {
  return {.m = in_[0].shape[0],
          .k = in_[0].shape[1],
          .group_size = step_.attributes.group_size,
          .x = pointer<float>(in_[0]),
          .x_stride = in_[0].strides[0],
          .values = pointer<int8_t>(out_[0]),
          .values_stride = out_[0].strides[0],
          .scales = pointer<float>(out_[1]),
          .scales_stride = out_[1].strides[0],
          .sums = pointer<int32_t>(out_[2]),
          .sums_stride = out_[2].strides[0]};
}

// What linears in every format have; `bias_input` is where a bias is, if there is one.
template <class Linear>
Linear StepResolver::linear_of(size_t weight, size_t bias_input) const {
  Linear args;
  args.m = out_[0].shape[0];
  args.n = out_[0].shape[1];
  args.k = in_[0].shape[1];
  set(args.weight, in_[weight]);
  args.bias = bias(bias_input);
  args.y = pointer<float>(out_[0]);
  args.y_stride = out_[0].strides[0];
  args.epilogue = epilogue();
  if constexpr (requires { args.x; }) {
    set(args.x, in_[0]);
    args.x_stride = in_[0].strides[0];
  }
  if constexpr (requires { args.values; }) {
    args.values = pointer<int8_t>(in_[0]);
    args.values_stride = in_[0].strides[0];
    args.scales = pointer<float>(in_[1]);
    args.scales_stride = in_[1].strides[0];
    args.sums = pointer<int32_t>(in_[2]);
    args.sums_stride = in_[2].strides[0];
    args.workspace = memory_.workspace;
  }
  if constexpr (requires { args.weight_scales; }) args.weight_scales = pointer<uint16_t>(in_[weight + 1]);
  if constexpr (requires { args.group; }) args.group = step_.attributes.weight_group;
  if constexpr (requires { args.sparse; }) args.sparse = step_.attributes.sparse;
  return args;
}

LinearArgs StepResolver::linear(size_t weight) const { return linear_of<LinearArgs>(weight, weight + 1); }

LinearBf16Args StepResolver::linear_bf16(size_t weight) const {
  return linear_of<LinearBf16Args>(weight, weight + 1);
}

LinearFp8Args StepResolver::linear_fp8(size_t weight) const {
  return linear_of<LinearFp8Args>(weight, weight + 2);
}

LinearInt8Args StepResolver::linear_int8(size_t weight) const {
  auto args = linear_of<LinearInt8Args>(weight, weight + 2);
  args.weight_group = step_.attributes.weight_group;
  args.activation_group = step_.attributes.activation_group;
  return args;
}

LinearInt4Args StepResolver::linear_int4(size_t weight) const {
  const bool offsets = step_.attributes.has_offsets;
  auto args = linear_of<LinearInt4Args>(weight, weight + (offsets ? 3 : 2));
  if (offsets) args.weight_offsets = pointer<uint16_t>(in_[weight + 2]);
  return args;
}

// The weight, its scales and offsets if it is quantized, and the bias follow `starts`.
template <class Linear>
Grouped<Linear> StepResolver::grouped(const Linear& all, size_t starts) const {
  const bool scaled = requires { all.weight_scales; };
  const size_t bias = starts + (scaled ? 3 : 2) + (step_.attributes.has_offsets ? 1 : 0);
  return {.all = all,
          .experts = in_[starts].shape[0] - 1,
          .starts = pointer<int32_t>(in_[starts]),
          .weight_stride = expert_stride(starts + 1),
          .scales_stride = scaled ? expert_stride(starts + 2) : 0,
          .bias_stride = step_.attributes.has_bias ? in_[bias].strides[0] : 0};
}
template Grouped<LinearArgs> StepResolver::grouped(const LinearArgs&, size_t) const;
template Grouped<LinearBf16Args> StepResolver::grouped(const LinearBf16Args&, size_t) const;
template Grouped<LinearFp8Args> StepResolver::grouped(const LinearFp8Args&, size_t) const;
template Grouped<LinearInt8Args> StepResolver::grouped(const LinearInt8Args&, size_t) const;
template Grouped<LinearInt4Args> StepResolver::grouped(const LinearInt4Args&, size_t) const;

}  // namespace ew
