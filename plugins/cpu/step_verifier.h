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
  // step_verifier_ops.cpp
  void embedding();
  void linear(bool grouped);
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

  // step_verifier_quantized.cpp
  void cast_bf16();
  void quantize_activation();
  void quantized_linear(bool grouped);
  void quantized_embedding();

  // step_verifier_experts.cpp
  void route_experts();
  void combine_experts();
  void top_k();
  void gather();
  void scatter();

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
  void vector(const Operand& operand, const Affine& size, Dtype dtype = Dtype::f32) const;  // [size]
  void matrix(const Operand& operand, Dtype dtype, const Affine& rows, const Affine& columns) const;
  // Rows are read or written up to the next multiple of `multiple` elements, which their stride leaves room
  // for and is a multiple of.
  void padded(const Operand& operand, int64_t multiple) const;
  // A whole weight [N, K] of that layout, or [E, N, K] with `grouped`.
  void panels(const Operand& operand, Dtype dtype, WeightLayout layout, bool grouped = false) const;
  int64_t size(const Operand& operand, int dimension) const;     // a constant from 1 to 2^31 - 1
  void look_up(const Operand& ids, const Affine& rows);          // i32 [T], of a table with that many rows
  void leading(const Operand& a, const Operand& b) const;        // the same shape but for the last dimension
  void bias(size_t first, const Operand& weight, bool grouped);  // input `first`, if it is there
  void input(const Operand& operand, int index) const;           // that step input
  void same_shape(const Operand& a, const Operand& b) const;
  void broadcasts(const Operand& operand, const Operand& to) const;
  const CacheGroup& cache(const Operand& operand, int* group) const;

  double number(const char* name);
  bool flag(const char* name, bool required = true);
  int64_t integer(const char* name);
  int64_t integer(const char* name, int64_t low, int64_t high);
  int64_t group(const char* name);  // 0, or a multiple of 4
  std::string string(const char* name);
  const AttributeValue* find(const char* name, bool required);

  Program& program_;
  Step& step_;
  const std::string& title_;
  const AttributeMap* attributes_ = nullptr;
  std::set<std::string> read_;
};

}  // namespace ew
