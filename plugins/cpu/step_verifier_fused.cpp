// What fused ops ask of their operands and attributes; see step_verifier.h.

#include "step_verifier.h"

namespace ew {

// What the norm alone asks of x [M, K] and the rest; -> values i8 [M, K], scales [M, G], sums i32 [M, G], and
// the sum [M, K] if add
void StepVerifier::norm_quantize(bool add, bool layer) {
  norm_inputs(add, layer, 2, add ? 4 : 3);
  if (add) {
    data(out(3), Dtype::f32, 2, 2);
    same_shape(in(0), out(3));
  }
  quantized_rows(in(0).shape[0], size(in(0), 1));
}

// [M, 2I] -> values i8 [M, I], scales [M, G], sums i32 [M, G]
void StepVerifier::gated_activation_quantize() {
  counts(1, 1, 3);
  data(in(0), Dtype::f32, 2, 2);
  const int64_t columns = size(in(0), 1);
  require(columns % 2 == 0, "operand " + shape_text(in(0)) + " has no two halves");
  gate_kind();
  quantized_rows(in(0).shape[0], columns / 2);
}

// q [T, Nq, D], k [T, Nkv, D], v [T, Nkv, Dv], table [T, 2F], slots [T], cache -> [T, Nq, D]
void StepVerifier::rope_kv_write() {
  counts(6, 6, 1);
  int group = 0;
  const CacheGroup& cached = cache(in(5), &group);
  cached_rows(in(1), cached, cached.key_size);
  cached_rows(in(2), cached, cached.value_size);
  rotates(in(3), in(0));
  rotates(in(3), in(1));
  require(in(0).shape[0] == kTokens && size(in(0), 1) > 0,
          "operand " + shape_text(in(0)) + " has no queries");
  require(cached.key_size <= kLongestHead, "cache group " + cached.name + " has heads of more than 2^10");
  data(out(), Dtype::f32, 3, 3);
  same_shape(in(0), out());
  input(in(4), slots_input(group));
  step_.attributes.interleaved = flag("interleaved");
}

}  // namespace ew
