// What each kernel computes, as plain loops that take the same arguments. For the tests alone: slow, in
// double where the order of a sum is the kernels' own affair, and bit for bit the kernels' result where
// nothing is left open.
#pragma once

#include "kernels.h"

namespace ew::reference {

void embedding(const EmbeddingArgs& a);  // exact
// `fused`: one fma a step, which is bit for bit what AVX-512 and AVX2 compute; else a product and a sum, as
// portable.
void linear(const LinearArgs& a, bool fused);
// In double. Both norms, and their add_ forms if sum is not null.
void rms_norm(const NormArgs& a);
void layer_norm(const NormArgs& a);
void rope_table(const RopeTableArgs& a);              // the angle is a float product; the rest in double
void rope(const RopeArgs& a);                         // in double
void gated_activation(const GatedActivationArgs& a);  // in double
void kv_write(const KvWriteArgs& a);                  // exact
void paged_attention(const PagedAttentionArgs& a);    // in double, the plain formula
void take_rows(const TakeRowsArgs& a);                // exact
void elementwise(const ElementwiseArgs& a);           // in double, or exact for integers
void copy(const CopyArgs& a);                         // exact
void reduce(const ReduceArgs& a);                     // in double

// One element of an elementwise function, in double.
double apply(ElementwiseFn fn, double x, double y, double z);

}  // namespace ew::reference
