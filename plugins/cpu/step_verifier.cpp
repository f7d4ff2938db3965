#include "step_verifier.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace ew {
namespace {

const std::map<std::string, Op>& ops() {
  static const std::map<std::string, Op> names = {
      {"embedding", Op::embedding},
      {"linear", Op::linear},
      {"rms_norm", Op::rms_norm},
      {"layer_norm", Op::layer_norm},
      {"add_rms_norm", Op::add_rms_norm},
      {"add_layer_norm", Op::add_layer_norm},
      {"rope_table", Op::rope_table},
      {"rope", Op::rope},
      {"gated_activation", Op::gated_activation},
      {"kv_write", Op::kv_write},
      {"paged_attention", Op::paged_attention},
      {"take_rows", Op::take_rows},
      {"elementwise", Op::elementwise},
      {"copy", Op::copy},
      {"reduce", Op::reduce},
      {"cast_bf16", Op::cast_bf16},
      {"quantize_activation", Op::quantize_activation},
      {"quantized_linear", Op::quantized_linear},
      {"quantized_embedding", Op::quantized_embedding},
      {"route_experts", Op::route_experts},
      {"grouped_linear", Op::grouped_linear},
      {"quantized_grouped_linear", Op::quantized_grouped_linear},
      {"combine_experts", Op::combine_experts},
      {"top_k", Op::top_k},
      {"gather", Op::gather},
      {"scatter", Op::scatter},
      {"rms_norm_quantize", Op::rms_norm_quantize},
      {"layer_norm_quantize", Op::layer_norm_quantize},
      {"add_rms_norm_quantize", Op::add_rms_norm_quantize},
      {"add_layer_norm_quantize", Op::add_layer_norm_quantize},
      {"gated_activation_quantize", Op::gated_activation_quantize},
      {"rope_kv_write", Op::rope_kv_write},
  };
  return names;
}

}  // namespace

std::string shape_text(const Operand& operand) {
  std::string text = operand.name + " [";
  for (int i = 0; i < operand.rank(); ++i) text += (i ? ", " : "") + operand.shape[i].text();
  return text + "]";
}

void StepVerifier::fail(const std::string& problem) const {
  throw std::invalid_argument(title_ + ": " + problem);
}

void StepVerifier::counts(size_t fewest_inputs, size_t most_inputs, size_t outputs) const {
  const size_t inputs = step_.inputs.size();
  if (inputs < fewest_inputs || inputs > most_inputs || step_.outputs.size() != outputs) {
    const std::string most = most_inputs == fewest_inputs ? "" : " to " + std::to_string(most_inputs);
    fail("it has " + std::to_string(inputs) + " inputs and " + std::to_string(step_.outputs.size()) +
         " outputs, and takes " + std::to_string(fewest_inputs) + most + " and " + std::to_string(outputs));
  }
}

void StepVerifier::data(const Operand& operand, Dtype dtype, int low, int high, bool unit_inner) const {
  const std::string name = "operand " + operand.name;
  require(operand.kind != OperandKind::cache, name + " is a cache");
  // Nor a block table: its rows are wider in memory than any shape here can say.
  const bool table = operand.kind == OperandKind::input && operand.index >= kFirstGroup &&
                     operand.index != slots_input((operand.index - kFirstGroup) / 2);
  require(!table, name + " is a block table, which only attention reads");
  require(operand.dtype == dtype, name + " has the wrong dtype");
  require(operand.rank() >= low && operand.rank() <= high,
          name + " has rank " + std::to_string(operand.rank()));
  if (operand.kind == OperandKind::weight) {
    require(program_.weights()[operand.index].layout == WeightLayout::rows, name + " must have layout rows");
  }
  if (unit_inner) {
    require(operand.strides.back().is(1) || operand.shape.back().is(1), name + " has no unit inner stride");
  }
}

void StepVerifier::vector(const Operand& operand, const Affine& size, Dtype dtype) const {
  data(operand, dtype, 1, 1);
  require(operand.shape[0] == size, "operand " + shape_text(operand) + " should be [" + size.text() + "]");
}

void StepVerifier::matrix(const Operand& operand, Dtype dtype, const Affine& rows,
                          const Affine& columns) const {
  data(operand, dtype, 2, 2);
  require(operand.shape[0] == rows && operand.shape[1] == columns,
          "operand " + shape_text(operand) + " should be [" + rows.text() + ", " + columns.text() + "]");
}

void StepVerifier::padded(const Operand& operand, int64_t multiple) const {
  const Affine& stride = operand.strides[0];
  require(operand.strides[1].is(1), "operand " + operand.name + " has no unit inner stride");
  require(stride == Affine{stride.constant} && stride.constant % multiple == 0 &&
              stride.constant >= size(operand, 1),
          "the row stride of operand " + shape_text(operand) + " is " + stride.text() +
              ", not a multiple of " + std::to_string(multiple) + " with room for a row");
}

void StepVerifier::panels(const Operand& operand, Dtype dtype, WeightLayout layout, bool grouped) const {
  require(operand.kind == OperandKind::weight && operand.dtype == dtype &&
              program_.weights()[operand.index].layout == layout && operand.rank() == (grouped ? 3 : 2),
          "operand " + operand.name + " must be " +
              (dtype == Dtype::bf16 || dtype == Dtype::u4 ? "a " : "an ") + name_of(dtype) +
              " weight of layout " + name_of(layout) + (grouped ? " and rank 3" : ""));
}

void StepVerifier::product_panels(const Operand& operand, Dtype dtype, WeightLayout layout, bool grouped) {
  step_.attributes.sparse = !grouped && operand.kind == OperandKind::weight &&
                            program_.weights()[operand.index].layout == WeightLayout::sparse32;
  panels(operand, dtype, step_.attributes.sparse ? WeightLayout::sparse32 : layout, grouped);
}

int64_t StepVerifier::size(const Operand& operand, int dimension) const {
  const Affine& size = operand.shape[static_cast<size_t>(dimension)];
  require(size == Affine{size.constant} && size.constant >= 1 && size.constant <= INT32_MAX,
          "size " + std::to_string(dimension) + " of operand " + shape_text(operand) +
              " is not a constant in [1, 2^31)");
  return size.constant;
}

void StepVerifier::look_up(const Operand& ids, const Affine& rows) {
  data(ids, Dtype::i32, 1, 1);
  if (ids.kind != OperandKind::input) return;  // a run looks at what a step computes
  require(ids.index == kIds || ids.index == kPositions, "operand " + ids.name + " can't be looked up");
  int64_t& limit = ids.index == kIds ? program_.id_limit_ : program_.position_limit_;
  limit = std::min(limit, rows.constant);
}

void StepVerifier::leading(const Operand& a, const Operand& b) const {
  require(a.rank() == b.rank() && std::equal(a.shape.begin(), a.shape.end() - 1, b.shape.begin()),
          "operands " + shape_text(a) + " and " + shape_text(b) + " differ in their rows");
}

void StepVerifier::epilogue(size_t first, const Operand& weight, bool grouped) {
  Attributes& a = step_.attributes;
  a.has_residual = flag("has_residual", false);
  require(!a.has_residual || !grouped, "attribute has_residual: linears of experts have none");
  counts(first + a.has_residual, first + a.has_residual + 1, 1);
  a.has_bias = step_.inputs.size() > first + a.has_residual;
  if (a.has_bias && grouped) matrix(in(first), Dtype::f32, weight.shape[0], weight.shape[1]);
  if (a.has_bias && !grouped) vector(in(first), weight.shape[0]);
  if (attributes_->count("has_bias")) {
    require(flag("has_bias") == a.has_bias, "attribute has_bias contradicts the inputs");
  }
  if (a.has_residual) matrix(step_.inputs.back(), Dtype::f32, out().shape[0], out().shape[1]);
  const std::string kind = string("activation", "");
  require(kind.empty() || parse_linear_activation(kind.c_str(), &a.linear_activation),
          "attribute activation: no activation " + kind);
}

void StepVerifier::input(const Operand& operand, int index) const {
  require(operand.kind == OperandKind::input && operand.index == index,
          "operand " + operand.name + " must be the step input " + program_.input_name(index));
}

void StepVerifier::same_shape(const Operand& a, const Operand& b) const {
  require(a.shape == b.shape, "operands " + shape_text(a) + " and " + shape_text(b) + " differ in shape");
}

void StepVerifier::broadcasts(const Operand& operand, const Operand& to) const {
  const int missing = to.rank() - operand.rank();
  bool ok = missing >= 0;
  for (int i = 0; ok && i < operand.rank(); ++i) {
    ok = operand.shape[i] == to.shape[i + missing] || operand.shape[i].is(1);
  }
  require(ok, "operand " + shape_text(operand) + " doesn't broadcast to " + shape_text(to));
}

const CacheGroup& StepVerifier::cache(const Operand& operand, int* group) const {
  require(operand.kind == OperandKind::cache, "operand " + operand.name + " must be a cache");
  *group = program_.caches()[operand.index].group;
  return program_.groups()[*group];
}

const AttributeValue* StepVerifier::find(const char* name, bool required) {
  const auto it = attributes_->find(name);
  if (it == attributes_->end()) {
    require(!required, std::string("attribute ") + name + " is missing");
    return nullptr;
  }
  read_.insert(name);
  return &it->second;
}

double StepVerifier::number(const char* name) {
  const AttributeValue* value = find(name, true);
  double result = 0;
  if (const auto* integer = std::get_if<int64_t>(value)) {
    result = static_cast<double>(*integer);
  } else if (const auto* real = std::get_if<double>(value)) {
    result = *real;
  } else {
    fail(std::string("attribute ") + name + " is not a number");
  }
  return result;
}

int64_t StepVerifier::integer(const char* name) {
  const auto* value = std::get_if<int64_t>(find(name, true));
  require(value != nullptr, std::string("attribute ") + name + " is not an integer");
  return *value;
}

int64_t StepVerifier::integer(const char* name, int64_t low, int64_t high) {
  const int64_t value = integer(name);
  require(low <= value && value <= high, std::string("attribute ") + name + " = " + std::to_string(value) +
                                             " is not in [" + std::to_string(low) + ", " +
                                             std::to_string(high) + "]");
  return value;
}

int64_t StepVerifier::group(const char* name) {
  const int64_t size = integer(name, 0, int64_t{1} << 20);
  require(size % 4 == 0, std::string("attribute ") + name + " is not a multiple of 4");
  return size;
}

bool StepVerifier::flag(const char* name, bool required) {
  const AttributeValue* value = find(name, required);
  if (!value) return false;
  const auto* flag = std::get_if<bool>(value);
  require(flag != nullptr, std::string("attribute ") + name + " is not a boolean");
  return *flag;
}

std::string StepVerifier::string(const char* name) {
  const auto* value = std::get_if<std::string>(find(name, true));
  require(value != nullptr, std::string("attribute ") + name + " is not a string");
  return *value;
}

std::string StepVerifier::string(const char* name, const char* otherwise) {
  return attributes_->count(name) > 0 ? string(name) : otherwise;
}

void StepVerifier::verify(const AttributeMap& attributes) {
  attributes_ = &attributes;
  const auto it = ops().find(step_.op_name);
  require(it != ops().end(), "the cpu target has no such op");
  step_.op = it->second;
  switch (step_.op) {
    case Op::embedding:
      embedding();
      break;
    case Op::linear:
      linear(false);
      break;
    case Op::rms_norm:
      norm(false, false);
      break;
    case Op::layer_norm:
      norm(false, true);
      break;
    case Op::add_rms_norm:
      norm(true, false);
      break;
    case Op::add_layer_norm:
      norm(true, true);
      break;
    case Op::rope_table:
      rope_table();
      break;
    case Op::rope:
      rope();
      break;
    case Op::gated_activation:
      gated_activation();
      break;
    case Op::kv_write:
      kv_write();
      break;
    case Op::paged_attention:
      paged_attention();
      break;
    case Op::take_rows:
      take_rows();
      break;
    case Op::elementwise:
      elementwise();
      break;
    case Op::copy:
      copy();
      break;
    case Op::reduce:
      reduce();
      break;
    case Op::cast_bf16:
      cast_bf16();
      break;
    case Op::quantize_activation:
      quantize_activation();
      break;
    case Op::quantized_linear:
      quantized_linear(false);
      break;
    case Op::quantized_embedding:
      quantized_embedding();
      break;
    case Op::route_experts:
      route_experts();
      break;
    case Op::grouped_linear:
      linear(true);
      break;
    case Op::quantized_grouped_linear:
      quantized_linear(true);
      break;
    case Op::combine_experts:
      combine_experts();
      break;
    case Op::top_k:
      top_k();
      break;
    case Op::gather:
      gather();
      break;
    case Op::scatter:
      scatter();
      break;
    case Op::rms_norm_quantize:
      norm_quantize(false, false);
      break;
    case Op::layer_norm_quantize:
      norm_quantize(false, true);
      break;
    case Op::add_rms_norm_quantize:
      norm_quantize(true, false);
      break;
    case Op::add_layer_norm_quantize:
      norm_quantize(true, true);
      break;
    case Op::gated_activation_quantize:
      gated_activation_quantize();
      break;
    case Op::rope_kv_write:
      rope_kv_write();
      break;
  }
  for (const auto& [name, value] : attributes) require(read_.count(name) > 0, "it has no attribute " + name);
}

}  // namespace ew
