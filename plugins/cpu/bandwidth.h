// Measures how fast this machine reads memory: the limit of decoding, which reads every weight for each
// token.
#pragma once

#include <cstdint>

namespace ew {

// Best of a few passes that read `bytes` of float32 with `threads` threads, in GB/s (10^9 bytes). Choose more
// bytes than the caches hold. Throws std::bad_alloc.
double measure_bandwidth(int64_t bytes, int threads);

}  // namespace ew
