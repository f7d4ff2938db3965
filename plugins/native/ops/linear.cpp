// Linears, those of experts, and embeddings, in every format of a weight.
#include <algorithm>

#include "op.h"
#include "quantize.h"

namespace ew {
namespace {

// A whole weight [N, K] of that layout, or [E, N, K] with `grouped`.
void verify_panels(const StepVerifier& v, const Operand& operand, Dtype dtype, WeightLayout layout,
                   bool grouped) {
  v.require(operand.kind == OperandKind::weight && operand.dtype == dtype && v.layout(operand) == layout &&
                operand.rank() == (grouped ? 3 : 2),
            "operand " + operand.name + " must be " +
                (dtype == Dtype::bf16 || without_sign(dtype) ? "a " : "an ") + name_of(dtype) +
                " weight of layout " + name_of(layout) + (grouped ? " and rank 3" : ""));
}

// The same for the weight of a product, which may be sparse if it isn't grouped; sets attribute `sparse`.
void verify_product_panels(StepVerifier& v, const Operand& operand, Dtype dtype, WeightLayout layout,
                           bool grouped) {
  bool& sparse = v.attributes().sparse;
  sparse = !grouped && operand.kind == OperandKind::weight && v.layout(operand) == WeightLayout::sparse32;
  verify_panels(v, operand, dtype, sparse ? WeightLayout::sparse32 : layout, grouped);
}

// The scales f16 [N, G] or [E, N, G] of a weight, or its offsets; with `block`, which integers may have,
// bytes in blocks of so many groups behind an f16.
void verify_scales(const StepVerifier& v, const Operand& scales, const Operand& weight, int64_t group_size,
                   bool grouped, int64_t block = 0) {
  const WeightLayout blocks = block == 16 ? WeightLayout::blocks16 : WeightLayout::blocks8;
  verify_panels(v, scales, block == 0 ? Dtype::f16 : Dtype::i8, block == 0 ? WeightLayout::panel32 : blocks,
                grouped);
  std::vector<Affine> of_groups = weight.shape;
  const int64_t groups = groups_of(weight.shape.back().constant, group_size);
  v.require(block == 0 || groups % block == 0, "operand " + scales.name + " has blocks of " +
                                                   std::to_string(block) + " groups, of " +
                                                   std::to_string(groups));
  of_groups.back() = {block == 0 ? groups : groups / block * (block + 2)};
  v.require(scales.shape == of_groups,
            "operand " + shape_text(scales) + " has not the scales of " + shape_text(weight));
}

// Input `first`: weight fp8 [N, K] or [E, N, K]; behind it its scales.
void verify_fp8(const StepVerifier& v, size_t first, int64_t group_size, bool grouped = false) {
  verify_panels(v, v.in(first), Dtype::fp8, WeightLayout::panel32, grouped);
  verify_scales(v, v.in(first + 1), v.in(first), group_size, grouped);
}

// Input `first`: weight of integers [N, K] or [E, N, K], with K = `columns`; behind it its scales, and its
// offsets if it has any. Gives the index of the input behind them; sets attribute `scale_block`.
size_t verify_integers(StepVerifier& v, size_t first, int64_t columns, int64_t group_size,
                       bool grouped = false) {
  const Operand& weight = v.in(first);
  const bool offsets = v.attributes().has_offsets;
  v.require(offsets == without_sign(weight.dtype),
            "operand " + weight.name + " is " + name_of(weight.dtype) + ", and attribute has_offsets is " +
                (offsets ? "true: weights with offsets are u2, u3, u4 or u5"
                         : "false: u2, u3, u4 and u5 have offsets"));
  const int64_t bits = few_bits(weight.dtype);
  if (bits > 0) {
    const int64_t multiple = bits == 4 ? 8 : 16;
    if (bits == 4) {
      verify_product_panels(v, weight, weight.dtype, WeightLayout::panel32x8, grouped);
    } else {
      verify_panels(v, weight, weight.dtype, WeightLayout::planes32, grouped);
    }
    v.require(group_size > 0 && group_size % multiple == 0 && columns % group_size == 0,
              "groups of " + std::to_string(group_size) + ", where weights of " + std::to_string(bits) +
                  " bits take a multiple of " + std::to_string(multiple) +
                  " that divides K = " + std::to_string(columns));
  } else {
    verify_product_panels(v, weight, Dtype::i8, WeightLayout::panel32x4, grouped);
  }
  v.require(weight.shape.back().is(columns),
            "operands " + shape_text(v.in(0)) + ", " + shape_text(weight) + " differ in K");
  const size_t past = first + (offsets ? 3 : 2);
  int64_t& block = v.attributes().scale_block;
  block = 0;
  const Operand& scales = v.in(first + 1);
  if (scales.kind == OperandKind::weight && scales.dtype == Dtype::i8)
    block = v.layout(scales) == WeightLayout::blocks16 ? 16 : 8;
  v.require(block == 0 || (group_size > 0 && !v.attributes().sparse),
            "operand " + scales.name + " has blocks of scales, where the weight is sparse or has no groups");
  for (size_t i = first + 1; i < past; ++i) verify_scales(v, v.in(i), weight, group_size, grouped, block);
  return past;
}

// A linear's bias, input `first` if it is there, residual and activation.
void verify_epilogue(StepVerifier& v, size_t first, const Operand& weight, bool grouped) {
  Attributes& a = v.attributes();
  a.has_residual = !grouped && v.flag("has_residual", false);
  v.counts(first + a.has_residual, first + a.has_residual + 1, 1);
  a.has_bias = v.inputs() > first + a.has_residual;
  if (a.has_bias && grouped) v.matrix(v.in(first), Dtype::f32, weight.shape[0], weight.shape[1]);
  if (a.has_bias && !grouped) v.vector(v.in(first), weight.shape[0]);
  v.require(!v.has("has_bias") || v.flag("has_bias") == a.has_bias,
            "attribute has_bias contradicts the inputs");
  if (a.has_residual) v.matrix(v.in(v.inputs() - 1), Dtype::f32, v.out().shape[0], v.out().shape[1]);
  const std::string kind = v.string("activation", "");
  v.require(kind.empty() || parse_linear_activation(kind.c_str(), &a.linear_activation),
            "attribute activation: no activation " + kind);
}

// x [M, K], starts [E + 1] if grouped, weight [N, K] or [E, N, K], its scales if it is fp8, bias? [N] or
// [E, N], residual? [M, N] if not grouped -> [M, N]
template <bool Grouped>
void verify_linear(StepVerifier& v) {
  const size_t w = Grouped ? 2 : 1;
  const Operand& weight = v.in(w);
  const bool scaled = weight.dtype == Dtype::fp8;
  v.counts(w + 1 + scaled, w + 3 + scaled, 1);
  const bool narrow = v.in(0).dtype == Dtype::bf16;
  v.data(v.in(0), narrow ? Dtype::bf16 : Dtype::f32, 2, 2);
  v.data(v.out(), Dtype::f32, 2, 2);
  if (scaled) {
    v.require(!narrow, "operand " + v.in(0).name + " is bf16, where fp8 weights meet f32");
    v.attributes().weight_group = v.group("weight_group");
    verify_fp8(v, w, v.attributes().weight_group, Grouped);
  } else {
    verify_product_panels(v, weight, v.in(0).dtype, narrow ? WeightLayout::panel32x2 : WeightLayout::panel32,
                          Grouped);
  }
  if (narrow) v.padded(v.in(0), 2);
  if (Grouped) v.vector(v.in(1), {weight.shape[0].constant + 1}, Dtype::i32);
  v.require(
      v.in(0).shape[1] == weight.shape[w] && v.out().shape[0] == v.in(0).shape[0] &&
          v.out().shape[1] == weight.shape[w - 1],
      "operands " + shape_text(v.in(0)) + ", " + shape_text(weight) + " don't give " + shape_text(v.out()));
  verify_epilogue(v, w + 1 + scaled, weight, Grouped);
}

// values i8 [M, K], scales [M, Ga], sums i32 [M, Ga], starts [E + 1] if grouped, weight [N, K] or [E, N, K]
// with its scales and offsets, bias? [N] or [E, N], residual? [M, N] if not grouped -> [M, N]
template <bool Grouped>
void verify_quantized_linear(StepVerifier& v) {
  Attributes& a = v.attributes();
  const size_t w = Grouped ? 4 : 3;
  a.has_offsets = v.flag("has_offsets", false);
  a.weight_group = v.group("weight_group");
  a.activation_group = v.group("activation_group");
  v.require(a.weight_group == 0 || a.activation_group == 0 || a.weight_group == a.activation_group,
            "attributes weight_group and activation_group differ");
  const Operand &values = v.in(0), &weight = v.in(w);
  v.require(few_bits(weight.dtype) == 0 || a.weight_group == a.activation_group,
            "attributes weight_group and activation_group differ, which only 8 bits may");
  v.data(values, Dtype::i8, 2, 2);
  v.padded(values, 4);
  const int64_t columns = v.size(values, 1), longest = std::max(a.weight_group, a.activation_group);
  v.require(std::min(columns, longest > 0 ? longest : columns) <= kLongestGroup,
            "a group of more than 2^16 values");
  for (size_t i = 1; i < 3; ++i) {
    v.matrix(v.in(i), i == 1 ? Dtype::f32 : Dtype::i32, values.shape[0],
             {groups_of(columns, a.activation_group)});
  }
  const size_t past = verify_integers(v, w, columns, a.weight_group, Grouped);
  if (Grouped) v.vector(v.in(3), {weight.shape[0].constant + 1}, Dtype::i32);
  v.matrix(v.out(), Dtype::f32, values.shape[0], weight.shape[Grouped ? 1 : 0]);
  verify_epilogue(v, past, weight, Grouped);
}

// ids [T], table [V, H] of f32 or bf16, or of fp8 with its scales -> [T, H]
void verify_embedding(StepVerifier& v) {
  const Operand& table = v.in(1);
  const bool scaled = table.dtype == Dtype::fp8;
  v.counts(2 + scaled, 2 + scaled, 1);
  if (scaled) {
    v.attributes().group_size = v.group("group_size");
    verify_fp8(v, 1, v.attributes().group_size);
  } else {
    v.require(table.kind == OperandKind::weight &&
                  (table.dtype == Dtype::f32 || table.dtype == Dtype::bf16) && table.rank() == 2,
              "operand " + table.name + " must be an f32 or bf16 weight of rank 2");
    const Weight& weight = v.weight(table);
    v.require(weight.layout != WeightLayout::sparse32,
              "operand " + table.name + " is sparse, which a table can't be");
    const bool whole = table.offset.is(0) && table.shape[0].is(weight.shape[0]) && weight.shape.size() == 2 &&
                       table.shape[1].is(weight.shape[1]) &&
                       (weight.layout != WeightLayout::rows || table.strides[0].is(weight.shape[1]));
    v.require(whole, "operand " + table.name + " must be a whole weight");
  }
  v.look_up(v.in(0), table.shape[0]);
  v.matrix(v.out(), Dtype::f32, v.in(0).shape[0], table.shape[1]);
}

// ids [T], table [V, H] with its scales and offsets -> [T, H]
void verify_quantized_embedding(StepVerifier& v) {
  Attributes& a = v.attributes();
  a.has_offsets = v.flag("has_offsets", false);
  const Operand& table = v.in(1);
  a.group_size = v.group("group_size");
  v.require(table.rank() == 2, "operand " + table.name + " has rank " + std::to_string(table.rank()));
  verify_integers(v, 1, v.size(table, 1), a.group_size);
  v.require(!a.sparse, "operand " + table.name + " is sparse, which a table can't be");
  v.look_up(v.in(0), table.shape[0]);
  v.matrix(v.out(), Dtype::f32, v.in(0).shape[0], table.shape[1]);
}

// What linears in every format have. Weight, scales and offsets begin at input `weight`; a bias is behind.
template <class Linear>
Linear linear(const StepResolver& s, size_t weight) {
  const Attributes& a = s.attributes();
  [[maybe_unused]] const size_t first = weight;
  Linear args;
  args.m = s.out().shape[0];
  args.n = s.out().shape[1];
  args.k = s.in(0).shape[1];
  set(args.weight, s.in(weight++));
  if constexpr (requires { args.weight_scales; }) args.weight_scales = s.in(weight++).as<uint16_t>();
  if constexpr (requires { args.weight_offsets; }) {
    if (a.has_offsets) args.weight_offsets = s.in(weight++).as<uint16_t>();
  }
  if (a.has_bias) args.bias = s.in(weight).as<float>();
  args.y = s.out().as<float>();
  args.y_stride = s.out().strides[0];
  args.epilogue.activation = a.linear_activation;
  if (a.has_residual) {
    args.epilogue.residual = s.in(s.inputs() - 1).as<float>();
    args.epilogue.residual_stride = s.in(s.inputs() - 1).strides[0];
  }
  if constexpr (requires { args.x; }) {
    set(args.x, s.in(0));
    args.x_stride = s.in(0).strides[0];
  }
  if constexpr (requires { args.values; }) {
    args.values = s.in(0).as<int8_t>();
    args.values_stride = s.in(0).strides[0];
    args.scales = s.in(1).as<float>();
    args.scales_stride = s.in(1).strides[0];
    args.sums = s.in(2).as<int32_t>();
    args.sums_stride = s.in(2).strides[0];
    args.workspace = s.memory().workspace;
  }
  if constexpr (requires { args.bits; }) args.bits = few_bits(s.dtype(first));
  if constexpr (requires { args.codes; }) args.codes = codes_of(s.dtype(first));
  if constexpr (requires { args.scale_block; }) args.scale_block = a.scale_block;
  if constexpr (requires { args.group; }) args.group = a.weight_group;
  if constexpr (requires { args.weight_group; }) args.weight_group = a.weight_group;
  if constexpr (requires { args.activation_group; }) args.activation_group = a.activation_group;
  if constexpr (requires { args.sparse; }) args.sparse = a.sparse;
  return args;
}

// Of experts: `starts` is in front of the weight.
template <class Linear>
Grouped<Linear> grouped(const StepResolver& s, size_t starts) {
  // From one expert of a weight [E, N, K] to the next, in elements; of fewer than 8 bits: bytes.
  const auto stride = [&](size_t input) {
    const Weight& weight = s.weight(input);
    return weight.bytes() / element_bytes(weight.dtype) / weight.shape[0];
  };
  const bool scaled = requires(Linear all) { all.weight_scales; };
  const size_t bias = starts + (scaled ? 3 : 2) + (s.attributes().has_offsets ? 1 : 0);
  return {.all = linear<Linear>(s, starts + 1),
          .experts = s.in(starts).shape[0] - 1,
          .starts = s.in(starts).as<int32_t>(),
          .weight_stride = stride(starts + 1),
          .scales_stride = scaled ? s.weight(starts + 2).bytes() / 2 / s.weight(starts + 2).shape[0] : 0,
          .bias_stride = s.attributes().has_bias ? s.in(bias).strides[0] : 0};
}

bool multiplied_as_few_bits(Dtype dtype) { return few_bits(dtype) > 0 && codes_of(dtype) == nullptr; }

Call bind_linear(const StepResolver& s) {
  if (s.dtype(1) == Dtype::fp8) return call(&KernelTable::linear_fp8, linear<LinearFp8Args>(s, 1));
  if (s.dtype(0) == Dtype::bf16) return call(&KernelTable::linear_bf16, linear<LinearBf16Args>(s, 1));
  return call(&KernelTable::linear, linear<LinearArgs>(s, 1));
}

Call bind_grouped_linear(const StepResolver& s) {
  if (s.dtype(2) == Dtype::fp8) return call(&KernelTable::grouped_linear_fp8, grouped<LinearFp8Args>(s, 1));
  if (s.dtype(0) == Dtype::bf16)
    return call(&KernelTable::grouped_linear_bf16, grouped<LinearBf16Args>(s, 1));
  return call(&KernelTable::grouped_linear, grouped<LinearArgs>(s, 1));
}

Call bind_quantized_linear(const StepResolver& s) {
  if (multiplied_as_few_bits(s.dtype(3)))
    return call(&KernelTable::linear_int4, linear<LinearInt4Args>(s, 3));
  return call(&KernelTable::linear_int8, linear<LinearInt8Args>(s, 3));
}

Call bind_quantized_grouped_linear(const StepResolver& s) {
  if (multiplied_as_few_bits(s.dtype(4)))
    return call(&KernelTable::grouped_linear_int4, grouped<LinearInt4Args>(s, 3));
  return call(&KernelTable::grouped_linear_int8, grouped<LinearInt8Args>(s, 3));
}

// What embeddings in every format have.
template <class Embedding>
Embedding embedding(const StepResolver& s) {
  Embedding args;
  args.tokens = s.out().shape[0];
  args.hidden = s.out().shape[1];
  args.ids = s.in(0).as<int32_t>();
  set(args.weight, s.in(1));
  args.out = s.out().as<float>();
  args.out_stride = s.out().strides[0];
  if constexpr (requires { args.layout; }) args.layout = s.weight(1).layout;
  if constexpr (requires { args.scales; }) {
    args.group_size = s.attributes().group_size;
    if constexpr (requires { args.bits; }) args.bits = few_bits(s.dtype(1));
    if constexpr (requires { args.codes; }) args.codes = codes_of(s.dtype(1));
    if constexpr (requires { args.scale_block; }) args.scale_block = s.attributes().scale_block;
    args.scales = s.in(2).as<uint16_t>();
  }
  if constexpr (requires { args.offsets; }) {
    if (s.attributes().has_offsets) args.offsets = s.in(3).as<uint16_t>();
  }
  return args;
}

Call bind_embedding(const StepResolver& s) {
  if (s.dtype(1) == Dtype::fp8) return call(&KernelTable::embedding_fp8, embedding<EmbeddingFp8Args>(s));
  if (s.dtype(1) == Dtype::bf16) return call(&KernelTable::embedding_bf16, embedding<EmbeddingBf16Args>(s));
  return call(&KernelTable::embedding, embedding<EmbeddingArgs>(s));
}

Call bind_quantized_embedding(const StepResolver& s) {
  if (multiplied_as_few_bits(s.dtype(1)))
    return call(&KernelTable::embedding_int4, embedding<EmbeddingInt4Args>(s));
  return call(&KernelTable::embedding_int8, embedding<EmbeddingInt8Args>(s));
}

int64_t table_rows(const StepResolver& s) { return s.in(1).shape[0]; }
int64_t rows_of_x(const StepResolver& s) { return s.in(0).shape[0]; }

constexpr Op kOps[] = {
    {.name = "linear", .verify = verify_linear<false>, .bind = bind_linear},
    {.name = "quantized_linear", .verify = verify_quantized_linear<false>, .bind = bind_quantized_linear},
    {.name = "grouped_linear",
     .verify = verify_linear<true>,
     .bind = bind_grouped_linear,
     .indices = {1, "starts", IndexRule::starts, rows_of_x}},
    {.name = "quantized_grouped_linear",
     .verify = verify_quantized_linear<true>,
     .bind = bind_quantized_grouped_linear,
     .indices = {3, "starts", IndexRule::starts, rows_of_x}},
    {.name = "embedding",
     .verify = verify_embedding,
     .bind = bind_embedding,
     .indices = {0, "ids", IndexRule::range, table_rows, true},
     .padded_rows = false},
    {.name = "quantized_embedding",
     .verify = verify_quantized_embedding,
     .bind = bind_quantized_embedding,
     .indices = {0, "ids", IndexRule::range, table_rows, true}},
};

}  // namespace

std::span<const Op> linear_ops() { return kOps; }

}  // namespace ew
