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
  quantized_rows(in(0).shape[0], size(in(0), 1));
}

void StepVerifier::quantized_rows(const Affine& rows, int64_t columns) {
  const int64_t group_size = group("group_size"), longest = group_size > 0 ? group_size : columns;
  step_.attributes.group_size = group_size;
  require(std::min(columns, longest) <= kLongestGroup, "a group of more than 2^16 values");
  matrix(out(0), Dtype::i8, rows, {columns});
  padded(out(0), 4);
  matrix(out(1), Dtype::f32, rows, {groups(columns, group_size)});
  matrix(out(2), Dtype::i32, rows, {groups(columns, group_size)});
}

// weight i8, i4 or u4 [N, K] or [E, N, K], its scales f16 [N, G] or [E, N, G], offsets like scales if u4
size_t StepVerifier::integers(size_t first, int64_t columns, int64_t group_size, bool grouped) {
  const Operand& weight = in(first);
  const bool offsets = step_.attributes.has_offsets;
  require(offsets == (weight.dtype == Dtype::u4),
          "operand " + weight.name + " is " + name_of(weight.dtype) + ", and attribute has_offsets is " +
              (offsets ? "true: weights with offsets are u4" : "false: u4 weights have offsets"));
  if (four_bits(weight.dtype)) {
    product_panels(weight, weight.dtype, WeightLayout::panel32x8, grouped);
    require(group_size > 0 && group_size % 8 == 0 && columns % group_size == 0,
            "groups of " + std::to_string(group_size) +
                ", where weights of 4 bits take a multiple of 8 that divides K = " + std::to_string(columns));
  } else {
    product_panels(weight, Dtype::i8, WeightLayout::panel32x4, grouped);
  }
  std::vector<Affine> of_groups = weight.shape;
  of_groups.back() = {groups(columns, group_size)};
  const size_t past = first + (offsets ? 3 : 2);
  for (size_t i = first + 1; i < past; ++i) {
    panels(in(i), Dtype::f16, WeightLayout::panel32, grouped);
    require(in(i).shape == of_groups,
            "operand " + shape_text(in(i)) + " has not the scales of " + shape_text(weight));
  }
  return past;
}

// weight fp8 [N, K] or [E, N, K], its scales f16 [N, G] or [E, N, G]
void StepVerifier::floats_of_8_bits(size_t first, int64_t group_size, bool grouped) const {
  const Operand &weight = in(first), &scales = in(first + 1);
  panels(weight, Dtype::fp8, WeightLayout::panel32, grouped);
  panels(scales, Dtype::f16, WeightLayout::panel32, grouped);
  std::vector<Affine> of_groups = weight.shape;
  of_groups.back() = {groups(weight.shape.back().constant, group_size)};
  require(scales.shape == of_groups,
          "operand " + shape_text(scales) + " has not the scales of " + shape_text(weight));
}

// values i8 [M, K], scales [M, Ga], sums i32 [M, Ga], starts [E + 1] if grouped, weight [N, K] or [E, N, K]
// with its scales and offsets, bias? [N] or [E, N], residual? [M, N] if not grouped -> [M, N]
void StepVerifier::quantized_linear(bool grouped) {
  Attributes& a = step_.attributes;
  const size_t w = grouped ? 4 : 3;
  a.has_offsets = flag("has_offsets", false);
  counts(w + 2 + a.has_offsets, w + 4 + a.has_offsets, 1);
  a.weight_group = group("weight_group");
  a.activation_group = group("activation_group");
  require(a.weight_group == 0 || a.activation_group == 0 || a.weight_group == a.activation_group,
          "attributes weight_group and activation_group differ");
  const Operand &values = in(0), &weight = in(w);
  require(!four_bits(weight.dtype) || a.weight_group == a.activation_group,
          "attributes weight_group and activation_group differ, which only 8 bits may");
  data(values, Dtype::i8, 2, 2);
  padded(values, 4);
  const int64_t columns = size(values, 1), longest = std::max(a.weight_group, a.activation_group);
  require(std::min(columns, longest > 0 ? longest : columns) <= kLongestGroup,
          "a group of more than 2^16 values");
  for (size_t i = 1; i < 3; ++i) {
    matrix(in(i), i == 1 ? Dtype::f32 : Dtype::i32, values.shape[0], {groups(columns, a.activation_group)});
  }
  const size_t past = integers(w, columns, a.weight_group, grouped);
  if (grouped) vector(in(3), {weight.shape[0].constant + 1}, Dtype::i32);
  require(weight.shape.back().is(columns),
          "operands " + shape_text(values) + ", " + shape_text(weight) + " differ in K");
  matrix(out(), Dtype::f32, values.shape[0], weight.shape[grouped ? 1 : 0]);
  epilogue(past, weight, grouped);
}

// ids [T], table [V, H] with its scales and offsets -> [T, H]
void StepVerifier::quantized_embedding() {
  Attributes& a = step_.attributes;
  a.has_offsets = flag("has_offsets", false);
  counts(a.has_offsets ? 4 : 3, a.has_offsets ? 4 : 3, 1);
  const Operand& table = in(1);
  a.group_size = group("group_size");
  require(table.rank() == 2, "operand " + table.name + " has rank " + std::to_string(table.rank()));
  integers(1, size(table, 1), a.group_size);
  require(!a.sparse, "operand " + table.name + " is sparse, which a table can't be");
  look_up(in(0), table.shape[0]);
  matrix(out(), Dtype::f32, in(0).shape[0], table.shape[1]);
}

}  // namespace ew
