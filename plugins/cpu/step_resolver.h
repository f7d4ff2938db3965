// A step's operands for one set of sizes, and the kernel arguments made of them. resolver.cpp has what all
// steps share; step_arguments*.cpp fill the arguments, by theme.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "resolver.h"

namespace ew {

class StepResolver {
 public:
  StepResolver(const Program& program, const Memory& memory, const Sizes& sizes, size_t index);

  bool is_empty() const { return !out_.empty() && out_[0].bytes == 0; }
  void check_overlap() const;
  IndexCheck index_check() const;
  Arguments arguments() const;

 private:
  Place place(const Operand& operand) const;
  int64_t padding(const Operand& operand) const;
  int index_operand() const;

  template <class T>
  static T* pointer(const Place& place) {
    return reinterpret_cast<T*>(place.data);
  }
  template <class T>
  static void set(T*& to, const Place& place) {
    to = pointer<T>(place);
  }
  // A tensor of rank 1 to 3 as [outer, inner, C].
  template <class T>
  static Rows<T> rows(const Place& place) {
    const size_t rank = place.shape.size();
    return {pointer<T>(place), rank > 1 ? place.strides[0] : 0, rank > 2 ? place.strides[1] : 0};
  }
  static int64_t outer(const Place& place) { return place.shape.size() > 1 ? place.shape[0] : 1; }
  static int64_t inner(const Place& place) { return place.shape.size() > 2 ? place.shape[1] : 1; }
  static View view(const Place& place, const Place& to);
  static void set_shape(const Place& place, int64_t* shape) {
    std::copy(place.shape.begin(), place.shape.end(), shape + kMaxRank - place.shape.size());
  }
  WeightLayout layout(size_t input) const { return program_.weights()[step_.inputs[input].index].layout; }
  int64_t expert_stride(
      size_t input) const;  // from one expert of a weight [E, N, K] to the next; int4: bytes
  const float* bias(size_t input) const {
    return step_.attributes.has_bias ? pointer<float>(in_[input]) : nullptr;
  }
  Epilogue epilogue() const;  // of a linear; a residual is its last input

  // step_arguments.cpp
  NormArgs norm_of(bool add) const;  // without results
  NormArgs norm(bool add) const;
  RopeTableArgs rope_table() const;
  RopeArgs rope() const;
  GatedActivationArgs gated_activation() const;
  KvWriteArgs kv_write() const;
  PagedAttentionArgs paged_attention() const;
  TakeRowsArgs take_rows() const;
  ElementwiseArgs elementwise() const;
  CopyArgs copy() const;
  ReduceArgs reduce() const;

  // step_arguments_linear.cpp
  template <class Embedding>
  Embedding embedding_of() const;
  Arguments embedding() const;
  Arguments quantized_embedding() const;
  CastBf16Args cast_bf16() const;
  QuantizeActivationArgs quantize_activation() const;
  template <class Linear>
  Linear linear_of(size_t weight, size_t bias_input) const;
  LinearArgs linear(size_t weight) const;
  LinearBf16Args linear_bf16(size_t weight) const;
  LinearFp8Args linear_fp8(size_t weight) const;
  LinearInt8Args linear_int8(size_t weight) const;
  LinearInt4Args linear_int4(size_t weight) const;
  template <class Linear>
  Grouped<Linear> grouped(const Linear& all, size_t starts) const;

  // step_arguments_fused.cpp
  ThenQuantize<NormArgs> norm_quantize(bool add) const;
  ThenQuantize<GatedActivationArgs> gated_activation_quantize() const;
  RopeKvWriteArgs rope_kv_write() const;
  QuantizeActivationArgs quantized_rows() const;  // the first three outputs

  // step_arguments_experts.cpp
  RouteExpertsArgs route_experts() const;
  CombineExpertsArgs combine_experts() const;
  TopKArgs top_k() const;
  GatherArgs gather() const;
  ScatterArgs scatter() const;

  const Program& program_;
  const Memory& memory_;
  const Sizes& sizes_;
  const Step& step_;
  const std::string title_;
  std::vector<Place> in_, out_;
};

// Throws std::invalid_argument: the subject, the operand's name and the problem.
[[noreturn]] void fail_operand(const std::string& subject, const Operand& operand,
                               const std::string& problem);

}  // namespace ew
