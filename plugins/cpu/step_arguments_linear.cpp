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

Arguments StepResolver::embedding() const {
  const int64_t tokens = out_[0].shape[0], hidden = out_[0].shape[1];
  if (step_.inputs[1].dtype == Dtype::bf16) {
    return EmbeddingBf16Args{.tokens = tokens,
                             .hidden = hidden,
                             .ids = pointer<int32_t>(in_[0]),
                             .weight = pointer<uint16_t>(in_[1]),
                             .layout = layout(1),
                             .out = pointer<float>(out_[0]),
                             .out_stride = out_[0].strides[0]};
  }
  if (step_.inputs[1].dtype == Dtype::fp8) {
    return EmbeddingFp8Args{.tokens = tokens,
                            .hidden = hidden,
                            .group_size = step_.attributes.group_size,
                            .ids = pointer<int32_t>(in_[0]),
                            .weight = pointer<uint8_t>(in_[1]),
                            .scales = pointer<uint16_t>(in_[2]),
                            .out = pointer<float>(out_[0]),
                            .out_stride = out_[0].strides[0]};
  }
  return EmbeddingArgs{.tokens = tokens,
                       .hidden = hidden,
                       .ids = pointer<int32_t>(in_[0]),
                       .weight = pointer<float>(in_[1]),
                       .layout = layout(1),
                       .out = pointer<float>(out_[0]),
                       .out_stride = out_[0].strides[0]};
}

Arguments StepResolver::quantized_embedding() const {
  const int64_t tokens = out_[0].shape[0], hidden = out_[0].shape[1];
  if (four_bits(step_.inputs[1].dtype)) {
    return EmbeddingInt4Args{.tokens = tokens,
                             .hidden = hidden,
                             .group_size = step_.attributes.group_size,
                             .ids = pointer<int32_t>(in_[0]),
                             .weight = pointer<uint8_t>(in_[1]),
                             .scales = pointer<uint16_t>(in_[2]),
                             .offsets = step_.attributes.has_offsets ? pointer<uint16_t>(in_[3]) : nullptr,
                             .out = pointer<float>(out_[0]),
                             .out_stride = out_[0].strides[0]};
  }
  return EmbeddingInt8Args{.tokens = tokens,
                           .hidden = hidden,
                           .group_size = step_.attributes.group_size,
                           .ids = pointer<int32_t>(in_[0]),
                           .weight = pointer<uint8_t>(in_[1]),
                           .scales = pointer<uint16_t>(in_[2]),
                           .out = pointer<float>(out_[0]),
                           .out_stride = out_[0].strides[0]};
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

LinearArgs StepResolver::linear(size_t weight) const {
  return {.m = out_[0].shape[0],
          .n = out_[0].shape[1],
          .k = in_[0].shape[1],
          .x = pointer<float>(in_[0]),
          .x_stride = in_[0].strides[0],
          .weight = pointer<float>(in_[weight]),
          .bias = bias(weight + 1),
          .y = pointer<float>(out_[0]),
          .y_stride = out_[0].strides[0],
          .epilogue = epilogue(),
          .sparse = step_.attributes.sparse};
}

LinearBf16Args StepResolver::linear_bf16(size_t weight) const {
  return {.m = out_[0].shape[0],
          .n = out_[0].shape[1],
          .k = in_[0].shape[1],
          .x = pointer<uint16_t>(in_[0]),
          .x_stride = in_[0].strides[0],
          .weight = pointer<uint16_t>(in_[weight]),
          .bias = bias(weight + 1),
          .y = pointer<float>(out_[0]),
          .y_stride = out_[0].strides[0],
          .epilogue = epilogue(),
          .sparse = step_.attributes.sparse};
}

LinearFp8Args StepResolver::linear_fp8(size_t weight) const {
  return {.m = out_[0].shape[0],
          .n = out_[0].shape[1],
          .k = in_[0].shape[1],
          .group = step_.attributes.weight_group,
          .x = pointer<float>(in_[0]),
          .x_stride = in_[0].strides[0],
          .weight = pointer<uint8_t>(in_[weight]),
          .weight_scales = pointer<uint16_t>(in_[weight + 1]),
          .bias = bias(weight + 2),
          .y = pointer<float>(out_[0]),
          .y_stride = out_[0].strides[0],
          .epilogue = epilogue()};
}

LinearInt8Args StepResolver::linear_int8(size_t weight) const {
  return {.m = out_[0].shape[0],
          .n = out_[0].shape[1],
          .k = in_[0].shape[1],
          .weight_group = step_.attributes.weight_group,
          .activation_group = step_.attributes.activation_group,
          .values = pointer<int8_t>(in_[0]),
          .values_stride = in_[0].strides[0],
          .scales = pointer<float>(in_[1]),
          .scales_stride = in_[1].strides[0],
          .sums = pointer<int32_t>(in_[2]),
          .sums_stride = in_[2].strides[0],
          .weight = pointer<uint8_t>(in_[weight]),
          .weight_scales = pointer<uint16_t>(in_[weight + 1]),
          .bias = bias(weight + 2),
          .y = pointer<float>(out_[0]),
          .y_stride = out_[0].strides[0],
          .epilogue = epilogue(),
          .sparse = step_.attributes.sparse,
          .workspace = memory_.workspace};
}

LinearInt4Args StepResolver::linear_int4(size_t weight) const {
  const bool offsets = step_.attributes.has_offsets;
  return {.m = out_[0].shape[0],
          .n = out_[0].shape[1],
          .k = in_[0].shape[1],
          .group = step_.attributes.weight_group,
          .values = pointer<int8_t>(in_[0]),
          .values_stride = in_[0].strides[0],
          .scales = pointer<float>(in_[1]),
          .scales_stride = in_[1].strides[0],
          .sums = pointer<int32_t>(in_[2]),
          .sums_stride = in_[2].strides[0],
          .weight = pointer<uint8_t>(in_[weight]),
          .weight_scales = pointer<uint16_t>(in_[weight + 1]),
          .weight_offsets = offsets ? pointer<uint16_t>(in_[weight + 2]) : nullptr,
          .bias = bias(weight + (offsets ? 3 : 2)),
          .y = pointer<float>(out_[0]),
          .y_stride = out_[0].strides[0],
          .epilogue = epilogue(),
          .sparse = step_.attributes.sparse,
          .workspace = memory_.workspace};
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
