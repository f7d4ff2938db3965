// What AVX512_VNNI adds to avx512.cpp.
#define EW_ISA_AVX512
#define EW_VNNI
#include "vnni.h"

namespace ew {

void use_avx512_vnni(KernelTable* table);
void use_avx512_vnni(KernelTable* table) { use_vnni(table); }

}  // namespace ew
