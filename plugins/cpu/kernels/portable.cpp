#include "families.h"
#include "simd_portable.h"

namespace ew {

extern const KernelTable portable_kernels;
const KernelTable portable_kernels = make_table("portable");

}  // namespace ew
