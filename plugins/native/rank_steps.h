// Steps on their way from rank 0 to the others.
#pragma once

#include "executor.h"
#include "rank_link.h"

namespace ew {

// A step's inputs as bytes, at an address that int64_t may have. `unpack_step` borrows them, and throws
// std::runtime_error where some are missing.
size_t packed_bytes(const StepArrays& step);
void pack_step(const StepArrays& step, char* to);
StepArrays unpack_step(std::span<const char> bytes);

// Rank 0: starts a step on all others, once they are through with the last one. Throws NoSharedMemory, and
// std::runtime_error if a rank is lost; then nothing has started.
void post_step(RankLink& link, const StepArrays& inputs);

// The others: runs steps until rank 0 ends it. A step that fails here fails for all, and the next may come.
// Throws std::runtime_error if a rank is lost.
void run_posted_steps(RankLink& link, Executor& executor);

}  // namespace ew
