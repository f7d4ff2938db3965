// What a router's ops and those of experts ask of their operands and attributes; see step_verifier.h. The
// linears of experts are with the plain ones.

#include "step_verifier.h"

namespace ew {
namespace {

constexpr int64_t kMostExperts = 1 << 20;
constexpr int64_t kMostChoices = 1 << 10;  // top_k's time grows with it

Affine times(const Affine& a, int64_t factor) {
  return {a.constant * factor, a.t * factor, a.b * factor, a.r * factor};
}

}  // namespace

// ids i32 [T, k] -> order i32 [T * k], rows i32 [T * k], starts i32 [E + 1]
void StepVerifier::route_experts() {
  counts(1, 1, 3);
  data(in(0), Dtype::i32, 2, 2);
  const int64_t choices = size(in(0), 1);
  require(choices <= kMostChoices, "more than 2^10 experts a token");
  step_.attributes.experts = integer("experts", 1, kMostExperts);
  for (size_t i = 0; i < 2; ++i) vector(out(i), times(in(0).shape[0], choices), Dtype::i32);
  vector(out(2), {step_.attributes.experts + 1}, Dtype::i32);
}

// y [T * k, H], order i32 [T * k], weights [T, k] -> [T, H]
void StepVerifier::combine_experts() {
  counts(3, 3, 1);
  data(in(2), Dtype::f32, 2, 2);
  const int64_t choices = size(in(2), 1);
  require(choices <= kMostChoices, "more than 2^10 experts a token");
  const Affine places = times(in(2).shape[0], choices);
  data(in(0), Dtype::f32, 2, 2);
  require(in(0).shape[0] == places,
          "operand " + shape_text(in(0)) + " has not a row for each of " + shape_text(in(2)));
  vector(in(1), places, Dtype::i32);
  matrix(out(), Dtype::f32, in(2).shape[0], in(0).shape[1]);
}

// x [.., C] -> values [.., k], indices i32 [.., k]
void StepVerifier::top_k() {
  counts(1, 1, 2);
  data(in(0), Dtype::f32, 1, 3);
  const int rank = in(0).rank();
  const int64_t columns = size(in(0), rank - 1);
  step_.attributes.k = integer("k", 1, kMostChoices);
  require(step_.attributes.k <= columns, "attribute k is more than operand " + shape_text(in(0)) + " has");
  for (size_t i = 0; i < 2; ++i) {
    data(out(i), i == 0 ? Dtype::f32 : Dtype::i32, rank, rank);
    leading(in(0), out(i));
    require(out(i).shape.back().is(step_.attributes.k),
            "operand " + shape_text(out(i)) + " has not k columns");
  }
}

// x f32 or i32 [.., C], indices i32 [.., k] -> [.., k]
void StepVerifier::gather() {
  counts(2, 2, 1);
  require(element_bytes(in(0).dtype) == 4, "operand " + in(0).name + " is neither f32 nor i32");
  data(in(0), in(0).dtype, 1, 3);
  const int rank = in(0).rank();
  size(in(0), rank - 1);
  data(in(1), Dtype::i32, rank, rank);
  size(in(1), rank - 1);
  leading(in(0), in(1));
  data(out(), in(0).dtype, rank, rank);
  same_shape(in(1), out());
}

// x [.., C], indices i32 [.., k] -> [.., C]
void StepVerifier::scatter() {
  counts(2, 2, 1);
  data(in(0), Dtype::f32, 1, 3);
  const int rank = in(0).rank();
  size(in(0), rank - 1);
  data(in(1), Dtype::i32, rank, rank);
  size(in(1), rank - 1);
  leading(in(0), in(1));
  data(out(), Dtype::f32, rank, rank);
  same_shape(in(0), out());
  step_.attributes.scalar = number("value");
}

}  // namespace ew
