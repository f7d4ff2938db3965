// gated_activation.
#include "op.h"
#include "step_resolver.h"
#include "step_verifier.h"

namespace ew {
namespace {

// [.., 2I] -> [.., I]
void verify_gated_activation(StepVerifier& v) {
  v.counts(1, 1, 1);
  v.data(v.in(0), Dtype::f32, 1, 3);
  v.data(v.out(), Dtype::f32, v.in(0).rank(), v.in(0).rank());
  std::vector<Affine> doubled = v.out().shape;
  doubled.back() = {2 * doubled.back().constant};
  v.require(v.out().shape.back() == Affine{v.out().shape.back().constant} && v.in(0).shape == doubled,
            "operand " + shape_text(v.in(0)) + " doesn't give " + shape_text(v.out()));
  const std::string kind = v.string("kind");
  v.require(parse_activation(kind.c_str(), &v.attributes().activation),
            "attribute kind: no activation " + kind);
}

Call bind_gated_activation(const StepResolver& s) {
  return call(&KernelTable::gated_activation, {.outer = outer(s.out()),
                                               .inner = inner(s.out()),
                                               .size = s.out().shape.back(),
                                               .x = rows<const float>(s.in(0)),
                                               .kind = s.attributes().activation,
                                               .out = rows<float>(s.out())});
}

constexpr Op kOps[] = {
    {.name = "gated_activation", .verify = verify_gated_activation, .bind = bind_gated_activation},
};

}  // namespace

std::span<const Op> gated_activation_ops() { return kOps; }

}  // namespace ew
