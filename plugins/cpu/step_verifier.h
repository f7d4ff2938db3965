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

  // step_verifier_fused.cpp
  void norm_quantize(bool add, bool layer);
  void gated_activation_quantize();
  void rope_kv_write();

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
  // The same for the weight of a product, which may be sparse if it isn't grouped; sets attribute `sparse`.
  void product_panels(const Operand& operand, Dtype dtype, WeightLayout layout, bool grouped);
  // The weight at input `first` of that many columns, i8 or of 4 bits, its scales and, with attribute
  // has_offsets, offsets; the index of the input behind them.
  size_t integers(size_t first, int64_t columns, int64_t group_size, bool grouped = false);
  // The weight at input `first`, fp8, and its scales behind it.
  void floats_of_8_bits(size_t first, int64_t group_size, bool grouped = false) const;
  int64_t size(const Operand& operand, int dimension) const;  // a constant from 1 to 2^31 - 1
  void look_up(const Operand& ids, const Affine& rows);       // i32 [T], of a table with that many rows
  void leading(const Operand& a, const Operand& b) const;     // the same shape but for the last dimension
  // What parts of several ops ask: of a norm's inputs, a gated activation's kind, a rotation, rows for a
  // cache, and the first three outputs, which are quantized rows.
  void norm_inputs(bool add, bool layer, int most_rank, size_t outputs);
  void gate_kind();
  void rotates(const Operand& table, const Operand& x) const;
  void cached_rows(const Operand& x, const CacheGroup& cached, int64_t size) const;
  void quantized_rows(const Affine& rows, int64_t columns);
  // A linear's bias, input `first` if it is there, residual and activation.
  void epilogue(size_t first, const Operand& weight, bool grouped);
  void input(const Operand& operand, int index) const;  // that step input
  void same_shape(const Operand& a, const Operand& b) const;
  void broadcasts(const Operand& operand, const Operand& to) const;
  const CacheGroup& cache(const Operand& operand, int* group) const;

  double number(const char* name);
  bool flag(const char* name, bool required = true);
  int64_t integer(const char* name);
  int64_t integer(const char* name, int64_t low, int64_t high);
  int64_t group(const char* name);  // 0, or a multiple of 4
  std::string string(const char* name);
  std::string string(const char* name, const char* otherwise);
  const AttributeValue* find(const char* name, bool required);

  Program& program_;
  Step& step_;
  const std::string& title_;
  const AttributeMap* attributes_ = nullptr;
  std::set<std::string> read_;
};

}  // namespace ew
