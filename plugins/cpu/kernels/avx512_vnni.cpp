// What AVX512_VNNI adds to avx512.cpp.
#define EW_ISA_AVX512
#define EW_VNNI
#include "experts.h"
#include "linear_int4.h"
#include "linear_int8.h"
#include "peak.h"

namespace ew {

void use_avx512_vnni(KernelTable* table);
void use_avx512_vnni(KernelTable* table) {
  table->linear_int8 = linear_int8;
  table->peak_int8 = peak_int8;
  table->grouped_linear_int8 = grouped_linear<LinearInt8Args, linear_int8>;
  table->linear_int4 = linear_int4;
  table->grouped_linear_int4 = grouped_linear<LinearInt4Args, linear_int4>;
}

}  // namespace ew
