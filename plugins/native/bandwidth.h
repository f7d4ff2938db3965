// Measures what bounds this machine: how fast it reads memory, the limit of decoding, which reads every
// weight for each token, and how fast it multiplies, the limit of many tokens at once.
#pragma once

#include <cstdint>
#include <string>

namespace ew {

class Executor;

// Best of a few passes that read `bytes` of float32 with `threads` threads, in GB/s (10^9 bytes). Choose more
// bytes than the caches hold. Throws std::bad_alloc.
double measure_bandwidth(int64_t bytes, int threads);

// Multiply-adds a second, in 10^9, of `dtype` (f32, bf16, i8) in registers alone with `threads` threads; best
// of a few passes. Throws std::invalid_argument for another dtype or an instruction set that can't run.
double measure_peak(const std::string& dtype, int threads, const std::string& isa);

// Reads all weights that linears of the program multiply by, once, with the executor's threads, in the order
// of the steps: what a step of few rows would take if it only read. Hold the resources' mutex.
void read_weights(Executor& executor);

}  // namespace ew
