// gated_activation, and gated_activation_quantize.
#include "op.h"
#include "quantize.h"

namespace ew {
namespace {

void verify_kind(StepVerifier& v) {
  const std::string kind = v.string("kind");
  v.require(parse_activation(kind.c_str(), &v.attributes().activation),
            "attribute kind: no activation " + kind);
}

// [.., 2I] -> [.., I]
void verify_gated_activation(StepVerifier& v) {
  v.counts(1, 1, 1);
  v.data(v.in(0), Dtype::f32, 1, 3);
  v.data(v.out(), Dtype::f32, v.in(0).rank(), v.in(0).rank());
  std::vector<Affine> doubled = v.out().shape;
  doubled.back() = {2 * doubled.back().constant};
  v.require(v.out().shape.back() == Affine{v.out().shape.back().constant} && v.in(0).shape == doubled,
            "operand " + shape_text(v.in(0)) + " doesn't give " + shape_text(v.out()));
  verify_kind(v);
}

GatedActivationArgs arguments(const StepResolver& s) {
  return {.outer = outer(s.out()),
          .inner = inner(s.out()),
          .size = s.out().shape.back(),
          .x = rows<const float>(s.in(0)),
          .kind = s.attributes().activation,
          .out = {}};
}

Call bind_gated_activation(const StepResolver& s) {
  GatedActivationArgs args = arguments(s);
  args.out = rows<float>(s.out());
  return call(&KernelTable::gated_activation, args);
}

// [M, 2I] -> values i8 [M, I], scales [M, G], sums i32 [M, G]
void verify_gated_activation_quantize(StepVerifier& v) {
  v.counts(1, 1, 3);
  v.data(v.in(0), Dtype::f32, 2, 2);
  const int64_t columns = v.size(v.in(0), 1);
  v.require(columns % 2 == 0, "operand " + shape_text(v.in(0)) + " has no two halves");
  verify_kind(v);
  verify_quantized_rows(v, v.in(0).shape[0], columns / 2);
}

Call bind_gated_activation_quantize(const StepResolver& s) {
  return call(&KernelTable::gated_activation_quantize,
              {.first = arguments(s), .then = quantized_rows(s), .workspace = s.memory().workspace});
}

constexpr Op kOps[] = {
    {.name = "gated_activation", .verify = verify_gated_activation, .bind = bind_gated_activation},
    {.name = "gated_activation_quantize",
     .verify = verify_gated_activation_quantize,
     .bind = bind_gated_activation_quantize},
};

}  // namespace

std::span<const Op> gated_activation_ops() { return kOps; }

}  // namespace ew
