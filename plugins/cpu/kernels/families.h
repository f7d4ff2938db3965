// All kernel families, and the table of them. Included by avx512.cpp, avx2.cpp and portable.cpp, which first
// say which instruction set they are for. Everything has internal linkage, so that code for one can't end up
// in another.
#pragma once

#include "attention.h"
#include "copy_reduce.h"
#include "elementwise.h"
#include "gated_activation.h"
#include "kernels.h"
#include "linear.h"
#include "norm.h"
#include "rope.h"
#include "rows.h"

namespace ew {
namespace {

constexpr KernelTable make_table(const char* isa) {
  KernelTable t = {};
  t.isa = isa;
  t.embedding = embedding;
  t.linear = linear;
  t.rms_norm = norm<false, false>;
  t.layer_norm = norm<true, false>;
  t.add_rms_norm = norm<false, true>;
  t.add_layer_norm = norm<true, true>;
  t.rope_table = rope_table;
  t.rope = rope;
  t.gated_activation = gated_activation;
  t.kv_write = kv_write;
  t.paged_attention = paged_attention;
  t.take_rows = take_rows;
  t.elementwise = elementwise;
  t.copy = copy;
  t.reduce = reduce;
  return t;
}

}  // namespace
}  // namespace ew
