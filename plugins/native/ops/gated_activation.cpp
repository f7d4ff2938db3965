// gated_activation.
#include "op.h"
#include "step_resolver.h"
#include "step_verifier.h"

namespace ew {
namespace {

// gate and up in one [.., 2I], or gate [.., I] and up [.., I] -> [.., I]
void verify_gated_activation(StepVerifier& v) {
  v.data(v.in(0), Dtype::f32, 1, 3);
  v.data(v.out(), Dtype::f32, v.in(0).rank(), v.in(0).rank());
  const Affine& size = v.out().shape.back();
  std::vector<Affine> read = v.out().shape;
  if (v.inputs() == 1) read.back() = {2 * size.constant};
  v.require(size == Affine{size.constant} && v.in(0).shape == read,
            "operand " + shape_text(v.in(0)) + " doesn't give " + shape_text(v.out()));
  if (v.inputs() == 2) {
    v.data(v.in(1), Dtype::f32, v.in(0).rank(), v.in(0).rank());
    v.same_shape(v.in(0), v.in(1));
  }
  const std::string kind = v.string("kind");
  v.require(parse_activation(kind.c_str(), &v.attributes().activation),
            "attribute kind: no activation " + kind);
}

Call bind_gated_activation(const StepResolver& s) {
  const Rows<const float> gate = rows<const float>(s.in(0));
  Rows<const float> up = gate;
  if (s.inputs() == 2) {
    up = rows<const float>(s.in(1));
  } else {
    up.data += s.out().shape.back();
  }
  return call(&KernelTable::gated_activation, {.outer = outer(s.out()),
                                               .inner = inner(s.out()),
                                               .size = s.out().shape.back(),
                                               .gate = gate,
                                               .up = up,
                                               .kind = s.attributes().activation,
                                               .out = rows<float>(s.out())});
}

constexpr Op kOps[] = {
    {.name = "gated_activation", .verify = verify_gated_activation, .bind = bind_gated_activation},
};

}  // namespace

std::span<const Op> gated_activation_ops() { return kOps; }

}  // namespace ew
