// What each kernel computes, as plain loops that take the same arguments. For the tests alone: slow, in
// double where the order of a sum is the kernels' own affair, and bit for bit the kernels' result where
// nothing is left open.
#pragma once

#include <vector>

#include "kernels.h"

namespace ew::reference {

// A function for each kernel, by its name and with its arguments: whoever adds a kernel adds the function's
// body alone, to one of the reference*.cpp, which say how exact it is. Those of the add_ norms are in
// rms_norm and layer_norm, where sum is not null; some kernels have none.
#define EW_REFERENCE(name, args, ...) void name(const args& a);
EW_KERNELS(EW_REFERENCE)
#undef EW_REFERENCE

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

// One element of an elementwise function, in double.
double apply(ElementwiseFn fn, double x, double y, double z);

}  // namespace ew::reference
