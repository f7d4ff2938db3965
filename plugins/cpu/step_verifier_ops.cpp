// What each op asks of its operands and attributes; see step_verifier.h.

#include <algorithm>
#include <cmath>

#include "step_verifier.h"

namespace ew {
namespace {

bool has_integer_form(ElementwiseFn fn) {
  return compares(fn) || fn == ElementwiseFn::add || fn == ElementwiseFn::sub || fn == ElementwiseFn::mul ||
         fn == ElementwiseFn::maximum || fn == ElementwiseFn::minimum;
}

}  // namespace

// ids [T], table [V, H] of f32 or bf16, or of fp8 with its scales -> [T, H]
void StepVerifier::embedding() {
  counts(2, 3, 1);
  const Operand& table = in(1);
  if (table.dtype == Dtype::fp8) {
    counts(3, 3, 1);
    step_.attributes.group_size = group("group_size");
    floats_of_8_bits(1, step_.attributes.group_size);
    look_up(in(0), table.shape[0]);
    return matrix(out(), Dtype::f32, in(0).shape[0], table.shape[1]);
  }
  counts(2, 2, 1);
  require(table.kind == OperandKind::weight && (table.dtype == Dtype::f32 || table.dtype == Dtype::bf16) &&
              table.rank() == 2,
          "operand " + table.name + " must be an f32 or bf16 weight of rank 2");
  const Weight& weight = program_.weights()[table.index];
  require(weight.layout != WeightLayout::sparse32,
          "operand " + table.name + " is sparse, which a table can't be");
  const bool whole = table.offset.is(0) && table.shape[0].is(weight.shape[0]) && weight.shape.size() == 2 &&
                     table.shape[1].is(weight.shape[1]) &&
                     (weight.layout != WeightLayout::rows || table.strides[0].is(weight.shape[1]));
  require(whole, "operand " + table.name + " must be a whole weight");
  look_up(in(0), table.shape[0]);
  matrix(out(), Dtype::f32, in(0).shape[0], table.shape[1]);
}

// x [M, K], starts [E + 1] if grouped, weight [N, K] or [E, N, K], its scales if it is fp8, bias? [N] or
// [E, N], residual? [M, N] if not grouped -> [M, N]
void StepVerifier::linear(bool grouped) {
  const size_t w = grouped ? 2 : 1;
  counts(w + 1, w + 4, 1);
  const Operand& weight = in(w);
  const bool scaled = weight.dtype == Dtype::fp8;
  counts(w + 1 + scaled, w + 3 + scaled, 1);
  const bool narrow = in(0).dtype == Dtype::bf16;
  data(in(0), narrow ? Dtype::bf16 : Dtype::f32, 2, 2);
  data(out(), Dtype::f32, 2, 2);
  if (scaled) {
    require(!narrow, "operand " + in(0).name + " is bf16, where fp8 weights meet f32");
    step_.attributes.weight_group = group("weight_group");
    floats_of_8_bits(w, step_.attributes.weight_group, grouped);
  } else {
    product_panels(weight, in(0).dtype, narrow ? WeightLayout::panel32x2 : WeightLayout::panel32, grouped);
  }
  if (narrow) padded(in(0), 2);
  if (grouped) vector(in(1), {weight.shape[0].constant + 1}, Dtype::i32);
  require(in(0).shape[1] == weight.shape[w] && out().shape[0] == in(0).shape[0] &&
              out().shape[1] == weight.shape[w - 1],
          "operands " + shape_text(in(0)) + ", " + shape_text(weight) + " don't give " + shape_text(out()));
  epilogue(w + 1 + scaled, weight, grouped);
}

// x, residual if add, weight?, bias?, and nothing else
void StepVerifier::norm_inputs(bool add, bool layer, int most_rank, size_t outputs) {
  Attributes& a = step_.attributes;
  a.eps = static_cast<float>(number("eps"));
  require(a.eps >= 0 && std::isfinite(a.eps), "attribute eps is negative or not finite");
  a.has_weight = flag("has_weight");
  a.has_bias = layer && flag("has_bias");
  size_t next = add ? 2 : 1;
  const size_t inputs = next + a.has_weight + a.has_bias;
  counts(inputs, inputs, outputs);
  for (size_t i = 0; i < next; ++i) data(in(i), Dtype::f32, most_rank == 2 ? 2 : 1, most_rank);
  if (add) same_shape(in(0), in(1));
  if (a.has_weight) vector(in(next++), in(0).shape.back());
  if (a.has_bias) vector(in(next), in(0).shape.back());
}

// -> normed, sum if add
void StepVerifier::norm(bool add, bool layer) {
  norm_inputs(add, layer, 3, add ? 2 : 1);
  for (const Operand& output : step_.outputs) {
    data(output, Dtype::f32, 1, 3);
    same_shape(in(0), output);
  }
}

// positions [T], inv_freq [F] -> [T, 2F]
void StepVerifier::rope_table() {
  counts(2, 2, 1);
  data(in(0), Dtype::i32, 1, 1);
  data(in(1), Dtype::f32, 1, 1);
  data(out(), Dtype::f32, 2, 2);
  const Affine& f = in(1).shape[0];
  require(f == Affine{f.constant} && out().shape[1].is(2 * f.constant) && out().shape[0] == in(0).shape[0],
          "operands " + shape_text(in(0)) + ", " + shape_text(in(1)) + " don't give " + shape_text(out()));
  step_.attributes.scale = static_cast<float>(number("scale"));
  require(std::isfinite(step_.attributes.scale), "attribute scale is not finite");
}

void StepVerifier::rotates(const Operand& table, const Operand& x) const {
  data(x, Dtype::f32, 3, 3);
  data(table, Dtype::f32, 2, 2);
  const Affine& width = table.shape[1];
  const Affine& size = x.shape[2];
  require(table.shape[0] == x.shape[0] && width == Affine{width.constant} && size == Affine{size.constant} &&
              width.constant % 2 == 0 && width.constant <= size.constant,
          "operand " + shape_text(table) + " doesn't rotate " + shape_text(x));
}

// x [T, N, D], table [T, 2F] -> [T, N, D]
void StepVerifier::rope() {
  counts(2, 2, 1);
  rotates(in(1), in(0));
  data(out(), Dtype::f32, 3, 3);
  same_shape(in(0), out());
  step_.attributes.interleaved = flag("interleaved");
}

void StepVerifier::gate_kind() {
  const std::string kind = string("kind");
  require(parse_activation(kind.c_str(), &step_.attributes.activation),
          "attribute kind: no activation " + kind);
}

// [.., 2I] -> [.., I]
void StepVerifier::gated_activation() {
  counts(1, 1, 1);
  data(in(0), Dtype::f32, 1, 3);
  data(out(), Dtype::f32, in(0).rank(), in(0).rank());
  std::vector<Affine> doubled = out().shape;
  doubled.back() = {2 * doubled.back().constant};
  require(out().shape.back() == Affine{out().shape.back().constant} && in(0).shape == doubled,
          "operand " + shape_text(in(0)) + " doesn't give " + shape_text(out()));
  gate_kind();
}

void StepVerifier::cached_rows(const Operand& x, const CacheGroup& cached, int64_t size) const {
  data(x, Dtype::f32, 3, 3);
  require(x.shape[0] == kTokens && x.shape[1].is(cached.kv_heads) && x.shape[2].is(size),
          "operand " + shape_text(x) + " doesn't fit cache group " + cached.name);
}

// k [T, Nkv, D], v [T, Nkv, Dv], slots [T], cache
void StepVerifier::kv_write() {
  counts(4, 4, 0);
  int group = 0;
  const CacheGroup& cached = cache(in(3), &group);
  cached_rows(in(0), cached, cached.key_size);
  cached_rows(in(1), cached, cached.value_size);
  input(in(2), slots_input(group));
}

// q [T, Nq, D], cache, block_table, q_start, kv_len, sinks? [Nq], slopes? [Nq] -> [T, Nq, Dv]
void StepVerifier::paged_attention() {
  Attributes& a = step_.attributes;
  a.has_sinks = flag("has_sinks", false);
  a.has_slopes = flag("has_slopes", false);
  const size_t inputs = 5 + a.has_sinks + a.has_slopes;
  counts(inputs, inputs, 1);
  int group = 0;
  const CacheGroup& cached = cache(in(1), &group);
  data(in(0), Dtype::f32, 3, 3);
  data(out(), Dtype::f32, 3, 3);
  const Affine& heads = in(0).shape[1];
  require(in(0).shape[0] == kTokens && heads == Affine{heads.constant} && heads.constant > 0 &&
              heads.constant % cached.kv_heads == 0 && in(0).shape[2].is(cached.key_size),
          "operand " + shape_text(in(0)) + " doesn't fit cache group " + cached.name);
  require(out().shape[0] == kTokens && out().shape[1] == heads && out().shape[2].is(cached.value_size),
          "operand " + shape_text(out()) + " doesn't fit the query and cache group " + cached.name);
  input(in(2), table_input(group));
  input(in(3), kQStart);
  input(in(4), kKvLen);
  for (size_t i = 5; i < inputs; ++i) vector(in(i), heads);
  a.scale = static_cast<float>(number("scale"));
  a.softcap = static_cast<float>(number("softcap"));
  a.window = integer("window");
  require(std::isfinite(a.scale) && a.softcap >= 0 && std::isfinite(a.softcap) && a.window >= 0,
          "attribute scale, softcap or window is out of range");
  int64_t& widest = program_.groups_[group].attention_window;
  widest = a.window == 0 || widest == 0 ? 0 : std::max(widest, a.window);
}

// x [T, ..], rows [R] -> [R, ..]; or any x, and rows that a step computed
void StepVerifier::take_rows() {
  counts(2, 2, 1);
  data(in(0), Dtype::f32, 2, 3);
  data(out(), Dtype::f32, in(0).rank(), in(0).rank());
  if (in(1).kind == OperandKind::input) {
    input(in(1), kRowsInput);
    require(in(0).shape[0] == kTokens,
            "operand " + shape_text(in(0)) + " has not the tokens that rows counts");
  } else {
    data(in(1), Dtype::i32, 1, 1);
  }
  require(out().shape[0] == in(1).shape[0] &&
              std::equal(in(0).shape.begin() + 1, in(0).shape.end(), out().shape.begin() + 1),
          "operand " + shape_text(in(0)) + " doesn't give " + shape_text(out()));
}

void StepVerifier::elementwise() {
  Attributes& a = step_.attributes;
  const std::string fn = string("fn");
  require(parse_elementwise(fn.c_str(), &a.fn), "attribute fn: no function " + fn);
  const int operands = operands_of(a.fn);
  a.has_scalar = operands == 2 && step_.inputs.size() == 1;
  if (a.has_scalar) {
    a.scalar = number("scalar");
    a.scalar_first = flag("scalar_first", false);
  }
  const size_t inputs = a.has_scalar ? 1 : static_cast<size_t>(operands);
  counts(inputs, inputs, 1);
  const bool i32 = in(0).dtype == Dtype::i32 && a.fn != ElementwiseFn::cast;
  require(!i32 || has_integer_form(a.fn), "function " + fn + " has no i32 form");
  const Dtype dtype = i32 || a.fn == ElementwiseFn::cast ? Dtype::i32 : Dtype::f32;
  if (a.has_scalar && i32) {
    require(a.scalar == std::floor(a.scalar) && std::abs(a.scalar) < 0x1p31, "attribute scalar is no i32");
  }
  data(out(), i32 && !compares(a.fn) ? Dtype::i32 : Dtype::f32, 1, kMaxRank, false);
  for (const Operand& operand : step_.inputs) {
    data(operand, dtype, 1, kMaxRank, false);
    broadcasts(operand, out());
  }
}

void StepVerifier::copy() {
  counts(1, 1, 1);
  require(element_bytes(in(0).dtype) == 4, "operand " + in(0).name + " is neither f32 nor i32");
  data(out(), in(0).dtype, 1, kMaxRank, false);
  data(in(0), in(0).dtype, 1, kMaxRank, false);
  broadcasts(in(0), out());
}

// x [.., C] -> [.., 1]
void StepVerifier::reduce() {
  counts(1, 1, 1);
  data(in(0), Dtype::f32, 1, kMaxRank);
  data(out(), Dtype::f32, in(0).rank(), in(0).rank());
  // What is reduced has one size in every step, or a token's result would depend on its company.
  const Affine& size = in(0).shape.back();
  require(size == Affine{size.constant} && size.constant > 0,
          "operand " + shape_text(in(0)) + " is not reduced over a constant size");
  std::vector<Affine> reduced = in(0).shape;
  reduced.back() = {1};
  require(out().shape == reduced, "operand " + shape_text(in(0)) + " doesn't give " + shape_text(out()));
  const std::string kind = string("kind");
  require(parse_reduce(kind.c_str(), &step_.attributes.reduce), "attribute kind: no reduction " + kind);
}

}  // namespace ew
