#include "families.h"
#include "simd_avx2.h"

namespace ew {

extern const KernelTable avx2_kernels;
const KernelTable avx2_kernels = make_table("avx2");

}  // namespace ew
