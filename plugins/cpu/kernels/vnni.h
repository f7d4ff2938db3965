// The kernels whose products of bytes VNNI computes: what AVX-VNNI adds to avx2.cpp, and AVX512_VNNI to
// avx512.cpp. Included by a file that says which instruction set it is for.
#pragma once

#include "experts.h"
#include "linear_int4.h"
#include "linear_int8.h"
#include "peak.h"

namespace ew {
namespace {

void use_vnni(KernelTable* table) {
  table->linear_int8 = linear_int8;
  table->peak_int8 = peak_int8;
  table->grouped_linear_int8 = grouped_linear<LinearInt8Args, linear_int8>;
  table->linear_int4 = linear_int4;
  table->grouped_linear_int4 = grouped_linear<LinearInt4Args, linear_int4>;
}

}  // namespace
}  // namespace ew
