// The kernels for the processor that builds them, and for no other: EW_NATIVE, which is their name. The other
// macros of an instruction set's file come from the build too.
#include "families.h"

namespace ew {

extern const KernelTable native_kernels;
constinit const KernelTable native_kernels = make_table(EW_NATIVE);

}  // namespace ew
