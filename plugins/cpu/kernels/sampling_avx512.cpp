// The loops of sampling compiled for AVX-512.
#include "sampling_bodies.h"

namespace ew {

extern const SamplingLoops avx512_sampling_loops;
constinit const SamplingLoops avx512_sampling_loops = make_sampling_loops("avx512");

}  // namespace ew
