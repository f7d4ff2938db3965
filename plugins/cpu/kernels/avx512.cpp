// All kernel families compiled for AVX-512.
#define EW_ISA_AVX512
#include "families.h"

namespace ew {

extern const KernelTable avx512_kernels;
constinit const KernelTable avx512_kernels = make_table("avx512");

}  // namespace ew
