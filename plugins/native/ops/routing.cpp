// Rows and elements picked by index (take_rows, top_k, gather, scatter), and what brings tokens to experts
// and back.
#include <algorithm>

#include "op.h"
#include "step_resolver.h"
#include "step_verifier.h"

namespace ew {
namespace {

constexpr int64_t kMostExperts = 1 << 20;
constexpr int64_t kMostChoices = 1 << 10;  // top_k's time grows with it

Affine times(const Affine& a, int64_t factor) {
  return {a.constant * factor, a.t * factor, a.b * factor, a.r * factor};
}

// x [T, ..], rows [R] -> [R, ..]; or any x, and rows that a step computed
void verify_take_rows(StepVerifier& v) {
  v.data(v.in(0), Dtype::f32, 2, 3);
  v.data(v.out(), Dtype::f32, v.in(0).rank(), v.in(0).rank());
  if (v.in(1).kind == OperandKind::input) {
    v.input(v.in(1), PortCheck::row);
    v.require(v.in(0).shape[0] == kTokens,
              "operand " + shape_text(v.in(0)) + " has not the tokens that rows counts");
  } else {
    v.data(v.in(1), Dtype::i32, 1, 1);
  }
  v.require(v.out().shape[0] == v.in(1).shape[0] &&
                std::equal(v.in(0).shape.begin() + 1, v.in(0).shape.end(), v.out().shape.begin() + 1),
            "operand " + shape_text(v.in(0)) + " doesn't give " + shape_text(v.out()));
}

Call bind_take_rows(const StepResolver& s) {
  return call(&KernelTable::take_rows, {.count = s.out().shape[0],
                                        .inner = inner(s.out()),
                                        .size = s.out().shape.back(),
                                        .x = rows<const float>(s.in(0)),
                                        .rows = s.in(1).as<int32_t>(),
                                        .out = rows<float>(s.out())});
}

// x [.., C] -> values [.., k], indices i32 [.., k]
void verify_top_k(StepVerifier& v) {
  v.data(v.in(0), Dtype::f32, 1, 3);
  const int rank = v.in(0).rank();
  const int64_t columns = v.size(v.in(0), rank - 1);
  const int64_t k = v.attributes().k = v.integer("k", 1, kMostChoices);
  v.require(k <= columns, "attribute k is more than operand " + shape_text(v.in(0)) + " has");
  for (size_t i = 0; i < 2; ++i) {
    v.data(v.out(i), i == 0 ? Dtype::f32 : Dtype::i32, rank, rank);
    v.leading(v.in(0), v.out(i));
    v.require(v.out(i).shape.back().is(k), "operand " + shape_text(v.out(i)) + " has not k columns");
  }
}

Call bind_top_k(const StepResolver& s) {
  return call(&KernelTable::top_k, {.outer = outer(s.in(0)),
                                    .inner = inner(s.in(0)),
                                    .size = s.in(0).shape.back(),
                                    .k = s.attributes().k,
                                    .x = rows<const float>(s.in(0)),
                                    .values = rows<float>(s.out(0)),
                                    .indices = rows<int32_t>(s.out(1))});
}

// Input 1: indices i32 [.., k] into the rows of x [.., C], which is input 0.
void verify_indices(const StepVerifier& v) {
  const int rank = v.in(0).rank();
  v.size(v.in(0), rank - 1);
  v.data(v.in(1), Dtype::i32, rank, rank);
  v.size(v.in(1), rank - 1);
  v.leading(v.in(0), v.in(1));
}

// x f32 or i32 [.., C], indices i32 [.., k] -> [.., k]
void verify_gather(StepVerifier& v) {
  v.require(element_bytes(v.in(0).dtype) == 4, "operand " + v.in(0).name + " is neither f32 nor i32");
  v.data(v.in(0), v.in(0).dtype, 1, 3);
  verify_indices(v);
  v.data(v.out(), v.in(0).dtype, v.in(0).rank(), v.in(0).rank());
  v.same_shape(v.in(1), v.out());
}

Call bind_gather(const StepResolver& s) {
  return call(&KernelTable::gather, {.outer = outer(s.out()),
                                     .inner = inner(s.out()),
                                     .count = s.out().shape.back(),
                                     .x = rows<const int32_t>(s.in(0)),
                                     .indices = rows<const int32_t>(s.in(1)),
                                     .out = rows<int32_t>(s.out())});
}

// x [.., C], indices i32 [.., k] -> [.., C]
void verify_scatter(StepVerifier& v) {
  v.data(v.in(0), Dtype::f32, 1, 3);
  verify_indices(v);
  v.data(v.out(), Dtype::f32, v.in(0).rank(), v.in(0).rank());
  v.same_shape(v.in(0), v.out());
  v.attributes().scalar = v.number("value");
}

Call bind_scatter(const StepResolver& s) {
  return call(&KernelTable::scatter, {.outer = outer(s.out()),
                                      .inner = inner(s.out()),
                                      .size = s.out().shape.back(),
                                      .count = s.in(1).shape.back(),
                                      .x = rows<const float>(s.in(0)),
                                      .indices = rows<const int32_t>(s.in(1)),
                                      .value = static_cast<float>(s.attributes().scalar),
                                      .out = rows<float>(s.out())});
}

// ids i32 [T, k] -> order i32 [T * k], rows i32 [T * k], starts i32 [E + 1]
void verify_route_experts(StepVerifier& v) {
  v.data(v.in(0), Dtype::i32, 2, 2);
  const int64_t choices = v.size(v.in(0), 1);
  v.require(choices <= kMostChoices, "more than 2^10 experts a token");
  v.attributes().experts = v.integer("experts", 1, kMostExperts);
  for (size_t i = 0; i < 2; ++i) v.vector(v.out(i), times(v.in(0).shape[0], choices), Dtype::i32);
  v.vector(v.out(2), {v.attributes().experts + 1}, Dtype::i32);
}

Call bind_route_experts(const StepResolver& s) {
  if (s.out(0).shape[0] > INT32_MAX) s.fail_output(0, "has more than 2^31 places");
  const RouteExpertsArgs args{.tokens = s.in(0).shape[0],
                              .choices = s.in(0).shape[1],
                              .experts = s.attributes().experts,
                              .ids = s.in(0).as<int32_t>(),
                              .ids_stride = s.in(0).strides[0],
                              .order = s.out(0).as<int32_t>(),
                              .rows = s.out(1).as<int32_t>(),
                              .starts = s.out(2).as<int32_t>()};
  std::vector<std::atomic<int64_t>>* const counts =
      s.memory().expert_rows ? &s.memory().expert_rows->at(s.index()) : nullptr;
  return [args, counts](const RunContext& run) {
    run.kernels.route_experts(args, run.pool);
    for (size_t e = 0; counts && e < counts->size(); ++e)
      (*counts)[e].fetch_add(args.starts[e + 1] - args.starts[e], std::memory_order_relaxed);
  };
}

// y [T * k, H], order i32 [T * k], weights [T, k] -> [T, H]
void verify_combine_experts(StepVerifier& v) {
  v.data(v.in(2), Dtype::f32, 2, 2);
  const int64_t choices = v.size(v.in(2), 1);
  v.require(choices <= kMostChoices, "more than 2^10 experts a token");
  const Affine places = times(v.in(2).shape[0], choices);
  v.data(v.in(0), Dtype::f32, 2, 2);
  v.require(v.in(0).shape[0] == places,
            "operand " + shape_text(v.in(0)) + " has not a row for each of " + shape_text(v.in(2)));
  v.vector(v.in(1), places, Dtype::i32);
  v.matrix(v.out(), Dtype::f32, v.in(2).shape[0], v.in(0).shape[1]);
}

// The kernel takes the inverse of order, which is known when it runs: see index_check.h.
Call bind_combine_experts(const StepResolver& s) {
  if (s.in(1).shape[0] > INT32_MAX) s.fail_input(1, "has more than 2^31 places");
  const CombineExpertsArgs args{.tokens = s.in(2).shape[0],
                                .choices = s.in(2).shape[1],
                                .size = s.out().shape[1],
                                .y = s.in(0).as<float>(),
                                .y_stride = s.in(0).strides[0],
                                .places = nullptr,
                                .weights = s.in(2).as<float>(),
                                .weights_stride = s.in(2).strides[0],
                                .out = s.out().as<float>(),
                                .out_stride = s.out().strides[0]};
  return [args](const RunContext& run) {
    CombineExpertsArgs now = args;
    now.places = run.inverse;
    run.kernels.combine_experts(now, run.pool);
  };
}

int64_t rows_of_first(const StepResolver& s) { return s.in(0).shape[0]; }
int64_t columns_of_first(const StepResolver& s) { return s.in(0).shape.back(); }
int64_t experts(const StepResolver& s) { return s.attributes().experts; }

constexpr Op kOps[] = {
    {.name = "take_rows",
     .verify = verify_take_rows,
     .bind = bind_take_rows,
     .indices = {1, "rows", IndexRule::range, rows_of_first, true}},
    {.name = "top_k", .verify = verify_top_k, .bind = bind_top_k},
    {.name = "gather",
     .verify = verify_gather,
     .bind = bind_gather,
     .indices = {1, "indices", IndexRule::range, columns_of_first}},
    {.name = "scatter",
     .verify = verify_scatter,
     .bind = bind_scatter,
     .indices = {1, "indices", IndexRule::range, columns_of_first}},
    {.name = "route_experts",
     .verify = verify_route_experts,
     .bind = bind_route_experts,
     .indices = {0, "ids", IndexRule::range, experts},
     .separate_outputs = true},
    {.name = "combine_experts",
     .verify = verify_combine_experts,
     .bind = bind_combine_experts,
     .indices = {1, "order", IndexRule::permutation, rows_of_first}},
};

}  // namespace

std::span<const Op> routing_ops() { return kOps; }

}  // namespace ew
