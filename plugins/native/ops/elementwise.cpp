// elementwise, copy and reduce: on views of any strides. kernels/elementwise_functions.h lists the functions.
#include <cmath>

#include "op.h"
#include "step_resolver.h"
#include "step_verifier.h"

namespace ew {
namespace {

bool has_integer_form(ElementwiseFn fn) {
  return compares(fn) || fn == ElementwiseFn::add || fn == ElementwiseFn::sub || fn == ElementwiseFn::mul ||
         fn == ElementwiseFn::maximum || fn == ElementwiseFn::minimum;
}

void verify_elementwise(StepVerifier& v) {
  Attributes& a = v.attributes();
  const std::string fn = v.string("fn");
  v.require(parse_elementwise(fn.c_str(), &a.fn), "attribute fn: no function " + fn);
  const int operands = operands_of(a.fn);
  a.has_scalar = operands == 2 && v.inputs() == 1;
  if (a.has_scalar) {
    a.scalar = v.number("scalar");
    a.scalar_first = v.flag("scalar_first", false);
  }
  const size_t inputs = a.has_scalar ? 1 : static_cast<size_t>(operands);
  v.counts(inputs, inputs, 1);
  const bool i32 = v.in(0).dtype == Dtype::i32 && a.fn != ElementwiseFn::cast;
  v.require(!i32 || has_integer_form(a.fn), "function " + fn + " has no i32 form");
  const Dtype dtype = i32 || a.fn == ElementwiseFn::cast ? Dtype::i32 : Dtype::f32;
  if (a.has_scalar && i32) {
    v.require(a.scalar == std::floor(a.scalar) && std::abs(a.scalar) < 0x1p31,
              "attribute scalar isn't an i32");
  }
  v.data(v.out(), i32 && !compares(a.fn) ? Dtype::i32 : Dtype::f32, 1, kMaxRank, false);
  for (size_t i = 0; i < inputs; ++i) {
    v.data(v.in(i), dtype, 1, kMaxRank, false);
    v.broadcasts(v.in(i), v.out());
  }
}

Call bind_elementwise(const StepResolver& s) {
  const Attributes& a = s.attributes();
  ElementwiseArgs args;
  args.fn = a.fn;
  set_shape(s.out(), args.shape);
  for (size_t i = 0; i < s.inputs(); ++i) args.in[i] = view(s.in(i), s.out());
  args.out = view(s.out(), s.out());
  args.integer = s.dtype(0) == Dtype::i32 && a.fn != ElementwiseFn::cast;
  args.has_scalar = a.has_scalar;
  args.scalar_first = a.scalar_first;
  args.scalar = a.scalar;
  return call(&KernelTable::elementwise, args);
}

void verify_copy(StepVerifier& v) {
  v.require(element_bytes(v.in(0).dtype) == 4, "operand " + v.in(0).name + " is neither f32 nor i32");
  v.data(v.out(), v.in(0).dtype, 1, kMaxRank, false);
  v.data(v.in(0), v.in(0).dtype, 1, kMaxRank, false);
  v.broadcasts(v.in(0), v.out());
}

Call bind_copy(const StepResolver& s) {
  CopyArgs args;
  set_shape(s.out(), args.shape);
  args.in = view(s.in(0), s.out());
  args.out = view(s.out(), s.out());
  return call(&KernelTable::copy, args);
}

// x [.., C] -> [.., 1]
void verify_reduce(StepVerifier& v) {
  v.data(v.in(0), Dtype::f32, 1, kMaxRank);
  v.data(v.out(), Dtype::f32, v.in(0).rank(), v.in(0).rank());
  // What is reduced has one size in every step, or a token's result would depend on the batch.
  const Affine& size = v.in(0).shape.back();
  v.require(size == Affine{size.constant} && size.constant > 0,
            "operand " + shape_text(v.in(0)) + " is not reduced over a constant size");
  std::vector<Affine> reduced = v.in(0).shape;
  reduced.back() = {1};
  v.require(v.out().shape == reduced,
            "operand " + shape_text(v.in(0)) + " doesn't give " + shape_text(v.out()));
  const std::string kind = v.string("kind");
  v.require(parse_reduce(kind.c_str(), &v.attributes().reduce), "attribute kind: no reduction " + kind);
}

Call bind_reduce(const StepResolver& s) {
  ReduceArgs args;
  args.kind = s.attributes().reduce;
  set_shape(s.in(0), args.shape);
  args.in = view(s.in(0), s.in(0));
  args.in.stride[kMaxRank - 1] = 1;
  args.out = view(s.out(), s.out());
  return call(&KernelTable::reduce, args);
}

constexpr Op kOps[] = {
    {.name = "elementwise", .verify = verify_elementwise, .bind = bind_elementwise, .in_place = true},
    {.name = "copy", .verify = verify_copy, .bind = bind_copy, .in_place = true},
    {.name = "reduce", .verify = verify_reduce, .bind = bind_reduce},
};

}  // namespace

std::span<const Op> elementwise_ops() { return kOps; }

}  // namespace ew
