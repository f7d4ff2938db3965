// rms_norm and layer_norm: alone, of a sum (add_), quantized (_quantize).
#include <cmath>

#include "op.h"
#include "quantize.h"

namespace ew {
namespace {

// x, residual if add, weight?, bias?, and nothing else
void verify_inputs(StepVerifier& v, bool add, bool layer, int most_rank) {
  Attributes& a = v.attributes();
  a.eps = static_cast<float>(v.number("eps"));
  v.require(a.eps >= 0 && std::isfinite(a.eps), "attribute eps is negative or not finite");
  a.has_weight = v.flag("has_weight");
  a.has_bias = layer && v.flag("has_bias");
  size_t next = add ? 2 : 1;
  for (size_t i = 0; i < next; ++i) v.data(v.in(i), Dtype::f32, most_rank == 2 ? 2 : 1, most_rank);
  if (add) v.same_shape(v.in(0), v.in(1));
  if (a.has_weight) v.vector(v.in(next++), v.in(0).shape.back());
  if (a.has_bias) v.vector(v.in(next), v.in(0).shape.back());
}

// -> normed, sum if add
template <bool Add, bool Layer>
void verify_norm(StepVerifier& v) {
  verify_inputs(v, Add, Layer, 3);
  for (size_t i = 0; i < (Add ? 2 : 1); ++i) {
    v.data(v.out(i), Dtype::f32, 1, 3);
    v.same_shape(v.in(0), v.out(i));
  }
}

// x [M, K] -> values i8 [M, K], scales [M, G], sums i32 [M, G], and the sum [M, K] if add
template <bool Add, bool Layer>
void verify_norm_quantize(StepVerifier& v) {
  verify_inputs(v, Add, Layer, 2);
  if (Add) {
    v.data(v.out(3), Dtype::f32, 2, 2);
    v.same_shape(v.in(0), v.out(3));
  }
  verify_quantized_rows(v, v.in(0).shape[0], v.size(v.in(0), 1));
}

template <bool Add>
NormArgs arguments(const StepResolver& s, size_t sum) {
  const Attributes& a = s.attributes();
  NormArgs args{.outer = outer(s.in(0)),
                .inner = inner(s.in(0)),
                .size = s.in(0).shape.back(),
                .x = rows<const float>(s.in(0)),
                .residual = {},
                .weight = nullptr,
                .bias = nullptr,
                .eps = a.eps,
                .normed = {},
                .sum = {}};
  size_t next = 1;
  if (Add) args.residual = rows<const float>(s.in(next++));
  if (a.has_weight) args.weight = s.in(next++).as<float>();
  if (a.has_bias) args.bias = s.in(next).as<float>();
  if (Add) args.sum = rows<float>(s.out(sum));
  return args;
}

template <auto Kernel, bool Add>
Call bind_norm(const StepResolver& s) {
  NormArgs args = arguments<Add>(s, 1);
  args.normed = rows<float>(s.out());
  return call(Kernel, args);
}

template <auto Kernel, bool Add>
Call bind_norm_quantize(const StepResolver& s) {
  return call(Kernel,
              {.first = arguments<Add>(s, 3), .then = quantized_rows(s), .workspace = s.memory().workspace});
}

constexpr Op kOps[] = {
    {.name = "rms_norm",
     .verify = verify_norm<false, false>,
     .bind = bind_norm<&KernelTable::rms_norm, false>,
     .in_place = true},
    {.name = "layer_norm",
     .verify = verify_norm<false, true>,
     .bind = bind_norm<&KernelTable::layer_norm, false>,
     .in_place = true},
    {.name = "add_rms_norm",
     .verify = verify_norm<true, false>,
     .bind = bind_norm<&KernelTable::add_rms_norm, true>,
     .in_place = true},
    {.name = "add_layer_norm",
     .verify = verify_norm<true, true>,
     .bind = bind_norm<&KernelTable::add_layer_norm, true>,
     .in_place = true},
    {.name = "rms_norm_quantize",
     .verify = verify_norm_quantize<false, false>,
     .bind = bind_norm_quantize<&KernelTable::rms_norm_quantize, false>},
    {.name = "layer_norm_quantize",
     .verify = verify_norm_quantize<false, true>,
     .bind = bind_norm_quantize<&KernelTable::layer_norm_quantize, false>},
    {.name = "add_rms_norm_quantize",
     .verify = verify_norm_quantize<true, false>,
     .bind = bind_norm_quantize<&KernelTable::add_rms_norm_quantize, true>},
    {.name = "add_layer_norm_quantize",
     .verify = verify_norm_quantize<true, true>,
     .bind = bind_norm_quantize<&KernelTable::add_layer_norm_quantize, true>},
};

}  // namespace

std::span<const Op> norm_ops() { return kOps; }

}  // namespace ew
