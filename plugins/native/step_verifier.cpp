#include "step_verifier.h"

#include <algorithm>
#include <stdexcept>

#include "ops/op.h"

namespace ew {

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
  const bool table =
      operand.kind == OperandKind::input && program_.ports()[operand.index].check == PortCheck::table;
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
  Port& port = program_.ports_[ids.index];
  require(port.check == PortCheck::index, "operand " + ids.name + " can't be looked up");
  port.limit = std::min(port.limit, rows.constant);
}

void StepVerifier::leading(const Operand& a, const Operand& b) const {
  require(a.rank() == b.rank() && std::equal(a.shape.begin(), a.shape.end() - 1, b.shape.begin()),
          "operands " + shape_text(a) + " and " + shape_text(b) + " differ in their rows");
}

void StepVerifier::input(const Operand& operand, PortCheck check, int group) const {
  const int index = program_.find_port(check, group);
  require(index >= 0 && operand.kind == OperandKind::input && operand.index == index,
          "operand " + operand.name + " must be the step input " +
              (index < 0 ? "that the program lacks" : program_.ports()[index].name));
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
  require(program_.groups()[*group].state_size == 0, "operand " + operand.name + " holds states");
  return program_.groups()[*group];
}

const CacheGroup& StepVerifier::state(const Operand& operand, int* group) const {
  require(operand.kind == OperandKind::cache, "operand " + operand.name + " must be a cache");
  *group = program_.caches()[operand.index].group;
  require(program_.groups()[*group].state_size > 0, "operand " + operand.name + " holds keys and values");
  return program_.groups()[*group];
}

void StepVerifier::attends(int group, int64_t window, int64_t first) {
  int64_t& widest = program_.groups_[group].attention_window;
  int64_t& beginning = program_.groups_[group].first_tokens;
  beginning = std::max(beginning, first);
  widest = window == 0 || widest == 0 ? 0 : std::max(widest, window);
}

void StepVerifier::divides(int group) {
  Attributes& a = attributes();
  a.ranks = has("ranks") ? integer("ranks", 2, kMostOwners) : 1;
  a.rank = has("ranks") ? integer("rank", 0, a.ranks - 1) : 0;
  CacheGroup& divided = program_.groups_[group];
  require(divided.owners == 0 || divided.owners == a.ranks,
          "attribute ranks: blocks of cache group " + divided.name + " are divided among " +
              std::to_string(divided.owners) + " ranks by another step, not " + std::to_string(a.ranks));
  divided.owners = a.ranks;
}

bool StepVerifier::has(const char* attribute) const {
  const auto& known = declaration_->attributes;
  const std::string name = attribute;
  if (std::none_of(known.begin(), known.end(), [&](const auto& one) { return name == one.name; }))
    throw std::logic_error("attribute " + name + " of " + step_.op_name + " isn't declared in op_schema.py");
  return attributes_->count(name) > 0;
}

const AttributeValue* StepVerifier::find(const char* name, bool required) {
  if (!has(name)) {
    require(!required, std::string("attribute ") + name + " is missing");
    return nullptr;
  }
  read_.insert(name);
  return &attributes_->at(name);
}

double StepVerifier::number(const char* name) {
  const AttributeValue* value = find(name, true);
  const auto* integer = std::get_if<int64_t>(value);
  return integer ? static_cast<double>(*integer) : std::get<double>(*value);
}

int64_t StepVerifier::integer(const char* name) { return std::get<int64_t>(*find(name, true)); }

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
  return value && std::get<bool>(*value);
}

std::string StepVerifier::string(const char* name) { return std::get<std::string>(*find(name, true)); }

std::string StepVerifier::string(const char* name, const char* otherwise) {
  return has(name) ? string(name) : otherwise;
}

namespace {

const char* problem_of_kind(AttributeKind kind, const AttributeValue& value) {
  const bool integer = std::holds_alternative<int64_t>(value);
  switch (kind) {
    case AttributeKind::number:
      return integer || std::holds_alternative<double>(value) ? nullptr : " is not a number";
    case AttributeKind::integer:
      return integer ? nullptr : " is not an integer";
    case AttributeKind::flag:
      return std::holds_alternative<bool>(value) ? nullptr : " is not a boolean";
    case AttributeKind::string:
      return std::holds_alternative<std::string>(value) ? nullptr : " is not a string";
  }
  return nullptr;
}

}  // namespace

void StepVerifier::check_declared() {
  declaration_ = find_declaration(step_.op_name);
  if (!declaration_) throw std::logic_error("op " + step_.op_name + " isn't declared in op_schema.py");
  for (const AttributeDeclaration& attribute : declaration_->attributes) {
    const auto it = attributes_->find(attribute.name);
    const std::string title = std::string("attribute ") + attribute.name;
    require(it != attributes_->end() || !attribute.needed, title + " is missing");
    if (it == attributes_->end()) continue;
    const char* problem = problem_of_kind(attribute.kind, it->second);
    require(!problem, title + (problem ? problem : ""));
  }
  const auto declared = [&](const std::string& name) {
    const auto& all = declaration_->attributes;
    return std::any_of(all.begin(), all.end(), [&](const auto& one) { return name == one.name; });
  };
  for (const auto& [name, value] : *attributes_) require(declared(name), "it has no attribute " + name);
  check_counts();
}

void StepVerifier::check_counts() const {
  if (declaration_->any_number) {
    require(inputs() > 0, "it has no operands");
    return counts(inputs(), inputs(), inputs());
  }
  size_t fewest = 0, optional = 0;
  for (const InputDeclaration& input : declaration_->inputs) {
    const std::string when = input.when;
    const auto flag = attributes_->find(when);
    if (when == "?") ++optional;
    if (when.empty() || (flag != attributes_->end() && std::get<bool>(flag->second))) ++fewest;
  }
  counts(fewest, fewest + optional, declaration_->outputs);
}

void StepVerifier::verify(const AttributeMap& attributes) {
  attributes_ = &attributes;
  step_.op = find_op(step_.op_name);
  require(step_.op != nullptr, "the cpu target has no such op");
  check_declared();
  step_.op->verify(*this);
  for (const auto& [name, value] : attributes) require(read_.count(name) > 0, "it has no attribute " + name);
}

}  // namespace ew
