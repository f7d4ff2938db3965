// The loops of sampling compiled for AVX2.
#include "sampling_bodies.h"

namespace ew {

extern const SamplingLoops avx2_sampling_loops;
constinit const SamplingLoops avx2_sampling_loops = make_sampling_loops("avx2");

}  // namespace ew
