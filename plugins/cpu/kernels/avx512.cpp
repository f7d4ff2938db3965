#include "families.h"
#include "simd_avx512.h"

namespace ew {

extern const KernelTable avx512_kernels;
const KernelTable avx512_kernels = make_table("avx512");

}  // namespace ew
