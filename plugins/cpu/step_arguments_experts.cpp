// Kernel arguments of a router's ops and of what brings experts' results together; see step_resolver.h.
#include "step_resolver.h"

namespace ew {

RouteExpertsArgs StepResolver::route_experts() const {
  if (out_[0].shape[0] > INT32_MAX) fail_operand(title_, step_.outputs[0], "has more than 2^31 places");
  return {.tokens = in_[0].shape[0],
          .choices = in_[0].shape[1],
          .experts = step_.attributes.experts,
          .ids = pointer<int32_t>(in_[0]),
          .ids_stride = in_[0].strides[0],
          .order = pointer<int32_t>(out_[0]),
          .rows = pointer<int32_t>(out_[1]),
          .starts = pointer<int32_t>(out_[2])};
}

// `places` is made of order when it is known: see index_check.h.
CombineExpertsArgs StepResolver::combine_experts() const {
  if (in_[1].shape[0] > INT32_MAX) fail_operand(title_, step_.inputs[1], "has more than 2^31 places");
  return {.tokens = in_[2].shape[0],
          .choices = in_[2].shape[1],
          .size = out_[0].shape[1],
          .y = pointer<float>(in_[0]),
          .y_stride = in_[0].strides[0],
          .places = nullptr,
          .weights = pointer<float>(in_[2]),
          .weights_stride = in_[2].strides[0],
          .out = pointer<float>(out_[0]),
          .out_stride = out_[0].strides[0]};
}

TopKArgs StepResolver::top_k() const {
  return {.outer = outer(in_[0]),
          .inner = inner(in_[0]),
          .size = in_[0].shape.back(),
          .k = step_.attributes.k,
          .x = rows<const float>(in_[0]),
          .values = rows<float>(out_[0]),
          .indices = rows<int32_t>(out_[1])};
}

GatherArgs StepResolver::gather() const {
  return {.outer = outer(out_[0]),
          .inner = inner(out_[0]),
          .count = out_[0].shape.back(),
          .x = rows<const int32_t>(in_[0]),
          .indices = rows<const int32_t>(in_[1]),
          .out = rows<int32_t>(out_[0])};
}

ScatterArgs StepResolver::scatter() const {
  return {.outer = outer(out_[0]),
          .inner = inner(out_[0]),
          .size = out_[0].shape.back(),
          .count = in_[1].shape.back(),
          .x = rows<const float>(in_[0]),
          .indices = rows<const int32_t>(in_[1]),
          .value = static_cast<float>(step_.attributes.scalar),
          .out = rows<float>(out_[0])};
}

}  // namespace ew
