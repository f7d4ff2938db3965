// What the sampler does to every logit of a row, in files of their own for each instruction set, which
// compute the same bits: nobody need know which of them ran.
#pragma once

#include <cstdint>

#include "exported.h"

namespace ew {

// The largest of a row of logits.
struct Largest {
  float value;
  int64_t at;  // the first place that has it
  bool bad;    // a logit is NaN or +infinity
};

struct SamplingLoops {
  const char* isa;
  Largest (*find_largest)(const float* logits, int64_t count);
  // weights[i] = exp((logits[i] - top) / temperature)
  void (*exp_weights)(const float* logits, int64_t count, float top, float temperature, float* weights);
  // In double: eight partial sums, then a fixed tree.
  double (*sum)(const float* weights, int64_t count);
  // The first of values[begin : count] that is at least `limit`; `count` if none is.
  int64_t (*find_at_least)(const float* values, int64_t begin, int64_t count, float limit);
};

// Those of an instruction set (avx512, avx2, portable); null if this processor doesn't have it.
EW_EXPORTED const SamplingLoops* sampling_loops_for(const char* isa);

// The fastest that this processor has.
EW_EXPORTED const SamplingLoops& sampling_loops();

}  // namespace ew
