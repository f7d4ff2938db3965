// Kernel arguments of fused ops; see step_resolver.h.
#include "step_resolver.h"

namespace ew {

QuantizeActivationArgs StepResolver::quantized_rows() const {
  return {.m = out_[0].shape[0],
          .k = out_[0].shape[1],
          .group_size = step_.attributes.group_size,
          .x = nullptr,
          .x_stride = 0,
          .values = pointer<int8_t>(out_[0]),
          .values_stride = out_[0].strides[0],
          .scales = pointer<float>(out_[1]),
          .scales_stride = out_[1].strides[0],
          .sums = pointer<int32_t>(out_[2]),
          .sums_stride = out_[2].strides[0]};
}

ThenQuantize<NormArgs> StepResolver::norm_quantize(bool add) const {
  NormArgs first = norm_of(add);
  if (add) first.sum = rows<float>(out_[3]);
  return {.first = first, .then = quantized_rows(), .workspace = memory_.workspace};
}

ThenQuantize<GatedActivationArgs> StepResolver::gated_activation_quantize() const {
  return {.first = {.outer = out_[0].shape[0],
                    .inner = 1,
                    .size = out_[0].shape[1],
                    .x = rows<const float>(in_[0]),
                    .kind = step_.attributes.activation,
                    .out = {}},
          .then = quantized_rows(),
          .workspace = memory_.workspace};
}

RopeKvWriteArgs StepResolver::rope_kv_write() const {
  const auto rotation = [&](const Place& x) {
    return RopeArgs{.tokens = x.shape[0],
                    .heads = x.shape[1],
                    .size = x.shape[2],
                    .freqs = in_[3].shape[1] / 2,
                    .x = rows<const float>(x),
                    .table = pointer<float>(in_[3]),
                    .table_stride = in_[3].strides[0],
                    .interleaved = step_.attributes.interleaved,
                    .out = {}};
  };
  RopeKvWriteArgs args{.query = rotation(in_[0]),
                       .key = rotation(in_[1]),
                       .write = {.tokens = in_[1].shape[0],
                                 .k = {},
                                 .v = rows<const float>(in_[2]),
                                 .slots = pointer<int32_t>(in_[4]),
                                 .cache = memory_.caches[step_.inputs[5].index]}};
  args.query.out = rows<float>(out_[0]);
  return args;
}

}  // namespace ew
