// All kernel families compiled for any processor.
#define EW_ISA_PORTABLE
#include "families.h"

namespace ew {

extern const KernelTable portable_kernels;
constinit const KernelTable portable_kernels = make_table("portable");

}  // namespace ew
