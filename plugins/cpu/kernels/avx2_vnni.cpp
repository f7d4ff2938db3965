// What AVX-VNNI adds to avx2.cpp.
#define EW_ISA_AVX2
#define EW_VNNI
#include "vnni.h"

namespace ew {

void use_avx2_vnni(KernelTable* table);
void use_avx2_vnni(KernelTable* table) { use_vnni(table); }

}  // namespace ew
