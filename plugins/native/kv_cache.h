// A cache as floats, for tests and tools.
#pragma once

#include "../cpu/kernels/kernels.h"

namespace ew {

// What blocks 0 .. blocks-1 stand for, scales included: k [P, Nkv, D, 32] and v [P, Nkv, 32, Dv].
void read_cache(const KvCache& cache, int64_t blocks, float* k, float* v);

}  // namespace ew
