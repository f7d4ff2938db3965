// What bf16 and int8 ops ask of their operands and attributes; see step_verifier.h.

#include <algorithm>

#include "step_verifier.h"

namespace ew {
namespace {

constexpr int64_t kLongestGroup = 1 << 16;  // 2^16 products of an int8 and a byte are below 2^31

int64_t groups(int64_t size, int64_t group) { return group > 0 ? (size + group - 1) / group : 1; }

}  // namespace

// x [M, K] -> bf16 [M, K]
void StepVerifier::cast_bf16() {
  counts(1, 1, 1);
  data(in(0), Dtype::f32, 2, 2);
  matrix(out(), Dtype::bf16, in(0).shape[0], in(0).shape[1]);
  padded(out(), 2);
}

// x [M, K] -> values i8 [M, K], scales [M, G], sums i32 [M, G]
void StepVerifier::quantize_activation() {
  counts(1, 1, 3);
  data(in(0), Dtype::f32, 2, 2);
  const int64_t group_size = group("group_size");
  step_.attributes.group_size = group_size;
  const Affine& rows = in(0).shape[0];
  const int64_t columns = size(in(0), 1), longest = group_size > 0 ? group_size : columns;
  require(std::min(columns, longest) <= kLongestGroup, "a group of more than 2^16 values");
  matrix(out(0), Dtype::i8, rows, {columns});
  padded(out(0), 4);
  matrix(out(1), Dtype::f32, rows, {groups(columns, group_size)});
  matrix(out(2), Dtype::i32, rows, {groups(columns, group_size)});
}

// values i8 [M, K], scales [M, Ga], sums i32 [M, Ga], starts [E + 1] if grouped, weight i8 [N, K] or
// [E, N, K], its scales f16 [N, Gw] or [E, N, Gw], bias? [N] or [E, N] -> [M, N]
void StepVerifier::quantized_linear(bool grouped) {
  Attributes& a = step_.attributes;
  const size_t w = grouped ? 4 : 3;
  counts(w + 2, w + 3, 1);
  a.weight_group = group("weight_group");
  a.activation_group = group("activation_group");
  require(a.weight_group == 0 || a.activation_group == 0 || a.weight_group == a.activation_group,
          "attributes weight_group and activation_group differ");
  const Operand &values = in(0), &weight = in(w), &scales = in(w + 1);
  data(values, Dtype::i8, 2, 2);
  padded(values, 4);
  const int64_t columns = size(values, 1), longest = std::max(a.weight_group, a.activation_group);
  require(std::min(columns, longest > 0 ? longest : columns) <= kLongestGroup,
          "a group of more than 2^16 values");
  for (size_t i = 1; i < 3; ++i) {
    matrix(in(i), i == 1 ? Dtype::f32 : Dtype::i32, values.shape[0], {groups(columns, a.activation_group)});
  }
  panels(weight, Dtype::i8, WeightLayout::panel32x4, grouped);
  panels(scales, Dtype::f16, WeightLayout::panel32, grouped);
  if (grouped) vector(in(3), {weight.shape[0].constant + 1}, Dtype::i32);
  std::vector<Affine> of_groups = weight.shape;
  of_groups.back() = {groups(columns, a.weight_group)};
  require(scales.shape == of_groups,
          "operand " + shape_text(scales) + " has not the scales of " + shape_text(weight));
  require(weight.shape.back().is(columns),
          "operands " + shape_text(values) + ", " + shape_text(weight) + " differ in K");
  matrix(out(), Dtype::f32, values.shape[0], weight.shape[grouped ? 1 : 0]);
  bias(w + 2, weight, grouped);
}

// ids [T], table i8 [V, H], scales f16 [V, G] -> [T, H]
void StepVerifier::quantized_embedding() {
  counts(3, 3, 1);
  const Operand &table = in(1), &scales = in(2);
  const int64_t group_size = group("group_size");
  step_.attributes.group_size = group_size;
  panels(table, Dtype::i8, WeightLayout::panel32x4);
  panels(scales, Dtype::f16, WeightLayout::panel32);
  require(
      scales.shape[0] == table.shape[0] && scales.shape[1].is(groups(table.shape[1].constant, group_size)),
      "operand " + shape_text(scales) + " has not the scales of " + shape_text(table));
  look_up(in(0), table.shape[0]);
  matrix(out(), Dtype::f32, in(0).shape[0], table.shape[1]);
}

}  // namespace ew
