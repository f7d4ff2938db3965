// All kernel families compiled for AVX2.
#define EW_ISA_AVX2
#include "families.h"

namespace ew {

extern const KernelTable avx2_kernels;
constinit const KernelTable avx2_kernels = make_table("avx2");

}  // namespace ew
