// Checks of one step that don't depend on the sizes of a run: operands, shapes as expressions, dtypes,
// layouts, attributes.
#pragma once

#include <set>
#include <string>

#include "program.h"

namespace ew {

// A view as errors name it: "b3 [T, 576]".
std::string shape_text(const Operand& operand);

class StepVerifier {
 public:
  StepVerifier(Program& program, Step& step, const std::string& title)
      : program_(program), step_(step), title_(title) {}

  // Sets the step's op and attributes. Throws std::invalid_argument that begins with the title.
  void verify(const AttributeMap& attributes);

 private:
  void embedding();
  void linear();
  void norm(bool add, bool layer);
  void rope_table();
  void rope();
  void gated_activation();
  void kv_write();
  void paged_attention();
  void take_rows();
  void elementwise();
  void copy();
  void reduce();

  [[noreturn]] void fail(const std::string& problem) const;
  void require(bool ok, const std::string& problem) const {
    if (!ok) fail(problem);
  }
  void counts(size_t fewest_inputs, size_t most_inputs, size_t outputs) const;
  const Operand& in(size_t i) const { return step_.inputs[i]; }
  const Operand& out(size_t i = 0) const { return step_.outputs[i]; }

  // An operand of data: not a cache, of the dtype, rank in [low, high], unit inner stride, not a panel
  // weight.
  void data(const Operand& operand, Dtype dtype, int low, int high, bool unit_inner = true) const;
  void vector(const Operand& operand, const Affine& size) const;  // f32 [size]
  void input(const Operand& operand, int index) const;            // that step input
  void same_shape(const Operand& a, const Operand& b) const;
  void broadcasts(const Operand& operand, const Operand& to) const;
  const CacheGroup& cache(const Operand& operand, int* group) const;

  double number(const char* name);
  bool flag(const char* name, bool required = true);
  int64_t integer(const char* name);
  std::string string(const char* name);
  const AttributeValue* find(const char* name, bool required);

  Program& program_;
  Step& step_;
  const std::string& title_;
  const AttributeMap* attributes_ = nullptr;
  std::set<std::string> read_;
};

}  // namespace ew
