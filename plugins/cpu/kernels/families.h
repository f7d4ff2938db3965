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
#include "norm_quantize.h"
#include "packed_attention.h"
#include "peak.h"
#include "pool.h"
#include "quantize.h"
#include "recurrence.h"
#include "ring_attention.h"
#include "rope.h"
#include "rope_kv_write.h"
#include "rows.h"
#include "top_k.h"

namespace ew {
namespace {

// For constinit tables: nothing of these files may run while the program is loaded.
constexpr KernelTable make_table(const char* isa) {
  KernelTable t = {};
  t.isa = isa;
#define EW_FILL(name, args, ...) t.name = __VA_ARGS__;
  EW_KERNELS(EW_FILL)
#undef EW_FILL
  t.peak_int8 = peak_int8;
  t.peak_bf16 = peak_bf16;
  t.peak_f32 = peak_f32;
  t.read = read_bytes;
  return t;
}

}  // namespace
}  // namespace ew
