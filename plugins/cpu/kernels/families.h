// All kernel families, and the table of them. Included by avx512.cpp, avx2.cpp and portable.cpp, which first
// say which instruction set they are for. Everything has internal linkage, so that code for one can't end up
// in another.
#pragma once

#include "attention.h"
#include "copy_reduce.h"
#include "elementwise.h"
#include "experts.h"
#include "gated_activation.h"
#include "kernels.h"
#include "kv_format.h"
#include "linear.h"
#include "linear_bf16.h"
#include "linear_fp8.h"
#include "linear_int4.h"
#include "linear_int8.h"
#include "norm.h"
#include "peak.h"
#include "quantize.h"
#include "rope.h"
#include "rope_kv_write.h"
#include "rows.h"
#include "then_quantize.h"
#include "top_k.h"

namespace ew {
namespace {

// For constinit tables: nothing of these files may run while the program is loaded.
constexpr KernelTable make_table(const char* isa) {
  KernelTable t = {};
  t.isa = isa;
  t.embedding = embedding;
  t.linear = linear;
  t.embedding_bf16 = embedding_bf16;
  t.cast_bf16 = cast_bf16;
  t.linear_bf16 = linear_bf16;
  t.embedding_int8 = embedding_int8;
  t.embedding_int4 = embedding_int4;
  t.embedding_fp8 = embedding_fp8;
  t.linear_fp8 = linear_fp8;
  t.quantize_activation = quantize_activation;
  t.linear_int8 = linear_int8;
  t.linear_int4 = linear_int4;
  t.rms_norm = norm<false, false>;
  t.layer_norm = norm<true, false>;
  t.add_rms_norm = norm<false, true>;
  t.add_layer_norm = norm<true, true>;
  t.rope_table = rope_table;
  t.rope = rope;
  t.gated_activation = gated_activation;
  t.rms_norm_quantize = norm_quantize<false, false>;
  t.layer_norm_quantize = norm_quantize<true, false>;
  t.add_rms_norm_quantize = norm_quantize<false, true>;
  t.add_layer_norm_quantize = norm_quantize<true, true>;
  t.gated_activation_quantize = gated_activation_quantize;
  t.kv_write = kv_write;
  t.rope_kv_write = rope_kv_write;
  t.paged_attention = paged_attention;
  t.take_rows = take_rows;
  t.elementwise = elementwise;
  t.copy = copy;
  t.reduce = reduce;
  t.route_experts = route_experts;
  t.combine_experts = combine_experts;
  t.grouped_linear = grouped_linear<LinearArgs, linear>;
  t.grouped_linear_bf16 = grouped_linear<LinearBf16Args, linear_bf16>;
  t.grouped_linear_fp8 = grouped_linear<LinearFp8Args, linear_fp8>;
  t.grouped_linear_int8 = grouped_linear<LinearInt8Args, linear_int8>;
  t.grouped_linear_int4 = grouped_linear<LinearInt4Args, linear_int4>;
  t.top_k = top_k;
  t.gather = gather;
  t.scatter = scatter;
  t.peak_int8 = peak_int8;
  t.peak_bf16 = peak_bf16;
  t.peak_f32 = peak_f32;
  return t;
}

}  // namespace
}  // namespace ew
