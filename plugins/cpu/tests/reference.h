// Scalar references of kernels, for the tests: plain loops over the same arguments. Those that a single test
// needs are in its file; here are those that several share. Each says how exact it is: in double where the
// order of a sum is the kernel's own, otherwise bit for bit the kernel's result.
#pragma once

#include <vector>

#include "../kernels/kernels.h"

namespace ew::reference {

void cast_bf16(const CastBf16Args& a);
void embedding_bf16(const EmbeddingBf16Args& a);
void embedding_fp8(const EmbeddingFp8Args& a);
void embedding_int4(const EmbeddingInt4Args& a);
void embedding_int8(const EmbeddingInt8Args& a);
void kv_write(const KvWriteArgs& a);
void paged_attention(const PagedAttentionArgs& a);
void quantize_activation(const QuantizeActivationArgs& a);

// `fused`: one fma a step, which is bit for bit what AVX-512 and AVX2 compute; else a product and a sum, as
// portable. Exact, but that with VDPBF16 the order within a pair is the instruction's own.
void linear(const LinearArgs& a, bool fused);
void linear_bf16(const LinearBf16Args& a, bool fused);
void linear_fp8(const LinearFp8Args& a, bool fused);
void linear_int8(const LinearInt8Args& a, bool fused);
void linear_int4(const LinearInt4Args& a, bool fused);
// What row m and column n of a linear store, of a sum with its bias. Exact but for activations, in double.
float end_of(const Epilogue& epilogue, int64_t m, int64_t n, float sum);
// The nearest bf16, ties to even; a NaN stays one.
uint16_t to_bf16(float value);
void summarize(const KvCache& c, int64_t block, int64_t head);  // exact
// Whether each block up to its own is seen by the query of token t, of request b, at a kv head.
std::vector<bool> seen_blocks(const PagedAttentionArgs& a, int64_t b, int64_t t, int64_t kv_head);
// Element i of a slot of the cache, its scale included.
double cached(const KvCache& c, bool key, int64_t block, int64_t head, int64_t slot, int64_t i);
std::vector<double> cached_row(const KvCache& c, bool key, int64_t block, int64_t head, int64_t slot);

// One element of an elementwise function, and of an activation, in double.
double apply(ElementwiseFn fn, double x, double y, double z);
double activate(Activation kind, double x);

// Row (i, j) of a tensor.
template <class T>
T* row(const Rows<T>& rows, int64_t i, int64_t j) {
  return rows.data + i * rows.stride0 + j * rows.stride1;
}

}  // namespace ew::reference
