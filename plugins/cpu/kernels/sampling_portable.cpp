// The loops of sampling compiled for any processor.
#include "sampling_bodies.h"

namespace ew {

extern const SamplingLoops portable_sampling_loops;
constinit const SamplingLoops portable_sampling_loops = make_sampling_loops("portable");

}  // namespace ew
