// Several runs of a step in which each request decodes one token: each run has the tokens that the one before
// drew.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "executor.h"
#include "sampler.h"

namespace ew {

// The arrays of such a step, from one run to the next.
class DecodeArrays {
 public:
  // Throws std::invalid_argument if a request has several tokens, or none that is a row, if the program has
  // an array whose next values aren't known here, or a cache of states. `step` must outlive the object.
  DecodeArrays(const Program& program, const StepArrays& step);
  DecodeArrays(const DecodeArrays&) = delete;
  DecodeArrays& operator=(const DecodeArrays&) = delete;

  // Goes on by one token of each request. A slot is -1 where the block table ends.
  void advance(std::span<const int32_t> tokens);

  const StepArrays& step() const { return step_; }
  size_t requests() const { return requests_; }

 private:
  struct Slots {
    std::vector<int32_t>* values;
    StepArray table;
    int64_t block_tokens;
  };

  StepArrays step_;
  size_t requests_ = 0;
  std::vector<std::vector<int32_t>> own_;  // of ports that change, by port
  std::vector<int32_t>*ids_ = nullptr, *positions_ = nullptr, *lengths_ = nullptr;
  std::vector<Slots> slots_;
};

// Runs the step up to `runs` times, and returns how often. It ends after a run in which a row draws one of
// `until`, or can't be sampled, and where Executor::interrupt was called. rows: the sampling parameters,
// whose counters go on. tokens: [runs, requests]. Throws as Executor::run does. Hold the resources' mutex.
size_t decode_runs(Executor& executor, DecodeArrays& arrays, std::span<RowSampling> rows, size_t runs,
                   std::span<const int32_t> until, int32_t* tokens);

}  // namespace ew
