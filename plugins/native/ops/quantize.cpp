// cast_bf16 and quantize_activation: what linears of bf16 and of integers read.
#include "quantize.h"

#include <algorithm>

#include "op.h"

namespace ew {

void verify_quantized_rows(StepVerifier& v, const Affine& rows, int64_t columns) {
  const int64_t group_size = v.group("group_size"), longest = group_size > 0 ? group_size : columns;
  v.attributes().group_size = group_size;
  v.require(std::min(columns, longest) <= kLongestGroup, "a group of more than 2^16 values");
  v.matrix(v.out(0), Dtype::i8, rows, {columns});
  v.padded(v.out(0), 4);
  v.matrix(v.out(1), Dtype::f32, rows, {groups_of(columns, group_size)});
  v.matrix(v.out(2), Dtype::i32, rows, {groups_of(columns, group_size)});
}

QuantizeActivationArgs quantized_rows(const StepResolver& s) {
  return {.m = s.out(0).shape[0],
          .k = s.out(0).shape[1],
          .group_size = s.attributes().group_size,
          .x = nullptr,
          .x_stride = 0,
          .values = s.out(0).as<int8_t>(),
          .values_stride = s.out(0).strides[0],
          .scales = s.out(1).as<float>(),
          .scales_stride = s.out(1).strides[0],
          .sums = s.out(2).as<int32_t>(),
          .sums_stride = s.out(2).strides[0]};
}

namespace {

// x [M, K] -> bf16 [M, K]
void verify_cast_bf16(StepVerifier& v) {
  v.data(v.in(0), Dtype::f32, 2, 2);
  v.matrix(v.out(), Dtype::bf16, v.in(0).shape[0], v.in(0).shape[1]);
  v.padded(v.out(), 2);
}

Call bind_cast_bf16(const StepResolver& s) {
  return call(&KernelTable::cast_bf16, {.m = s.in(0).shape[0],
                                        .k = s.in(0).shape[1],
                                        .x = s.in(0).as<float>(),
                                        .x_stride = s.in(0).strides[0],
                                        .out = s.out().as<uint16_t>(),
                                        .out_stride = s.out().strides[0]});
}

// x [M, K] -> values i8 [M, K], scales [M, G], sums i32 [M, G]
void verify_quantize_activation(StepVerifier& v) {
  v.data(v.in(0), Dtype::f32, 2, 2);
  verify_quantized_rows(v, v.in(0).shape[0], v.size(v.in(0), 1));
}

Call bind_quantize_activation(const StepResolver& s) {
  QuantizeActivationArgs args = quantized_rows(s);
  args.x = s.in(0).as<float>();
  args.x_stride = s.in(0).strides[0];
  return call(&KernelTable::quantize_activation, args);
}

constexpr Op kOps[] = {
    {.name = "cast_bf16", .verify = verify_cast_bf16, .bind = bind_cast_bf16},
    {.name = "quantize_activation", .verify = verify_quantize_activation, .bind = bind_quantize_activation},
};

}  // namespace

std::span<const Op> quantize_ops() { return kOps; }

}  // namespace ew
