// Checks of one step that don't depend on the sizes of a run: what ops ask of operands (shapes as
// expressions, dtypes, layouts) and of attributes. An op's `verify` is made of these.
#pragma once

#include <set>
#include <string>

#include "program.h"

namespace ew {

struct OpDeclaration;

// A view as errors name it: "b3 [T, 576]".
std::string shape_text(const Operand& operand);

class StepVerifier {
 public:
  StepVerifier(Program& program, Step& step, const std::string& title)
      : program_(program), step_(step), title_(title) {}

  // Sets the step's op and attributes. Throws std::invalid_argument that begins with the title.
  void verify(const AttributeMap& attributes);

  [[noreturn]] void fail(const std::string& problem) const;
  void require(bool ok, const std::string& problem) const {
    if (!ok) fail(problem);
  }
  void counts(size_t fewest_inputs, size_t most_inputs, size_t outputs) const;
  size_t inputs() const { return step_.inputs.size(); }
  const Operand& in(size_t i) const { return step_.inputs[i]; }
  const Operand& out(size_t i = 0) const { return step_.outputs[i]; }
  const Weight& weight(const Operand& operand) const { return program_.weights()[operand.index]; }
  bool is_shared(const Operand& operand) const {  // by ranks
    return operand.kind == OperandKind::buffer && program_.buffers()[operand.index].region > 0;
  }
  RankGroup ranks() const { return program_.ranks(); }
  WeightLayout layout(const Operand& operand) const { return weight(operand).layout; }
  Attributes& attributes() { return step_.attributes; }

  // An operand of data: not a cache, of the dtype, rank in [low, high], unit inner stride, not a panel
  // weight.
  void data(const Operand& operand, Dtype dtype, int low, int high, bool unit_inner = true) const;
  void vector(const Operand& operand, const Affine& size, Dtype dtype = Dtype::f32) const;  // [size]
  void matrix(const Operand& operand, Dtype dtype, const Affine& rows, const Affine& columns) const;
  // Rows are read or written up to the next multiple of `multiple` elements, which their stride leaves room
  // for and is a multiple of.
  void padded(const Operand& operand, int64_t multiple) const;
  int64_t size(const Operand& operand, int dimension) const;  // a constant from 1 to 2^31 - 1
  void look_up(const Operand& ids, const Affine& rows);       // i32 [T], of a table with that many rows
  void leading(const Operand& a, const Operand& b) const;     // the same shape but for the last dimension
  // The step input whose values are checked so.
  void input(const Operand& operand, PortCheck check, int group = -1) const;
  void same_shape(const Operand& a, const Operand& b) const;
  void broadcasts(const Operand& operand, const Operand& to) const;
  const CacheGroup& cache(const Operand& operand, int* group) const;  // of keys and values
  const CacheGroup& state(const Operand& operand, int* group) const;  // of states
  // Notes that a step reads `window` keys of that cache group (0: all), and the `first` keys of a request.
  void attends(int group, int64_t window, int64_t first = 0);
  // Attributes ranks and rank, if it has them: the step has to do with its own rank's blocks of a group
  // alone.
  void divides(int group);

  // Attributes by their names in the op's declaration, which says of what kind they are.
  bool has(const char* attribute) const;
  double number(const char* name);
  bool flag(const char* name, bool required = true);
  int64_t integer(const char* name);
  int64_t integer(const char* name, int64_t low, int64_t high);
  int64_t group(const char* name);  // 0, or a multiple of 4
  std::string string(const char* name);
  std::string string(const char* name, const char* otherwise);

 private:
  // Operands and attributes as the op's declaration has them.
  void check_declared();
  void check_counts() const;
  const AttributeValue* find(const char* name, bool required);

  Program& program_;
  Step& step_;
  const std::string& title_;
  const AttributeMap* attributes_ = nullptr;
  const OpDeclaration* declaration_ = nullptr;
  std::set<std::string> read_;
};

}  // namespace ew
