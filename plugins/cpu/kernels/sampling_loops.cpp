// Which of the sampler's loops this processor can run.
#include "sampling_loops.h"

#include <string_view>

namespace ew {

#if defined(__x86_64__)
extern const SamplingLoops avx512_sampling_loops;
extern const SamplingLoops avx2_sampling_loops;
#endif
extern const SamplingLoops portable_sampling_loops;

const SamplingLoops* sampling_loops_for(const char* isa) {
  const std::string_view name = isa;
#if defined(__x86_64__)
  if (name == "avx512") {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has ? &avx512_sampling_loops : nullptr;
  }
  if (name == "avx2") {
    const bool has =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? &avx2_sampling_loops : nullptr;
  }
#endif
  return name == "portable" ? &portable_sampling_loops : nullptr;
}

const SamplingLoops& sampling_loops() {
  static const SamplingLoops* const best = [] {
    for (const char* isa : {"avx512", "avx2"}) {
      if (const SamplingLoops* loops = sampling_loops_for(isa)) return loops;
    }
    return &portable_sampling_loops;
  }();
  return *best;
}

}  // namespace ew
