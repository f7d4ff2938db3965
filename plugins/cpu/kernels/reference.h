// What each kernel computes, as plain loops that take the same arguments. For the tests alone: slow, in
// double where the order of a sum is the kernels' own affair, and bit for bit the kernels' result where
// nothing is left open.
#pragma once

#include <vector>

#include "kernels.h"

namespace ew::reference {

void embedding(const EmbeddingArgs& a);  // exact
// `fused`: one fma a step, which is bit for bit what AVX-512 and AVX2 compute; else a product and a sum, as
// portable.
void linear(const LinearArgs& a, bool fused);
// What row m and column n of a linear store, of a sum with its bias. Exact but for activations, in double.
float end_of(const Epilogue& epilogue, int64_t m, int64_t n, float sum);
// The nearest bf16, ties to even; a NaN stays one.
uint16_t to_bf16(float value);
void embedding_bf16(const EmbeddingBf16Args& a);            // exact
void embedding_int8(const EmbeddingInt8Args& a);            // exact
void embedding_int4(const EmbeddingInt4Args& a);            // exact
void embedding_fp8(const EmbeddingFp8Args& a);              // exact
void cast_bf16(const CastBf16Args& a);                      // exact
void quantize_activation(const QuantizeActivationArgs& a);  // exact
// `fused` as in linear. With VDPBF16 the order within a pair is the instruction's own.
void linear_bf16(const LinearBf16Args& a, bool fused);
void linear_fp8(const LinearFp8Args& a, bool fused);    // exact, with `fused` as in linear
void linear_int8(const LinearInt8Args& a, bool fused);  // exact
void linear_int4(const LinearInt4Args& a, bool fused);  // exact
// In double. Both norms, and their add_ forms if sum is not null.
void rms_norm(const NormArgs& a);
void layer_norm(const NormArgs& a);
void rope_table(const RopeTableArgs& a);              // the angle is a float product; the rest in double
void rope(const RopeArgs& a);                         // in double
void gated_activation(const GatedActivationArgs& a);  // in double
void kv_write(const KvWriteArgs& a);                  // exact
void summarize(const KvCache& c, int64_t block, int64_t head);  // exact
// Whether each block up to its own is seen by the query of token t, of request b, at a kv head.
std::vector<bool> seen_blocks(const PagedAttentionArgs& a, int64_t b, int64_t t, int64_t kv_head);
void paged_attention(
    const PagedAttentionArgs& a);  // in double, the plain formula; q rounded as the cache asks
// Element i of a slot of the cache, its scale included.
double cached(const KvCache& c, bool key, int64_t block, int64_t head, int64_t slot, int64_t i);
void take_rows(const TakeRowsArgs& a);       // exact
void elementwise(const ElementwiseArgs& a);  // in double, or exact for integers
void copy(const CopyArgs& a);                // exact
void reduce(const ReduceArgs& a);            // in double

// One element of an elementwise function, in double.
double apply(ElementwiseFn fn, double x, double y, double z);

}  // namespace ew::reference
