// What Python says of sampling, and what it gets back: options by name, an array each.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "sampler.h"

namespace ew {

namespace nb = nanobind;

// The sampled rows of a step. Python's arrays stay alive as long as `options`, which it borrows.
struct SamplingArrays {
  std::vector<RowSampling> rows;
  SampleResult result;
  nb::object tokens, token_logprobs = nb::none(), top_ids = nb::none(), top_logprobs = nb::none();
  nb::object before = nb::none();

  // options: name -> array [R], by the table in sampling_bindings.cpp; what is left out is off. top: how many
  // of the most likely tokens to report; -1 reports no log probabilities. Throws std::invalid_argument.
  SamplingArrays(const nb::dict& options, size_t count, int top, int64_t vocab);

  // Calls options["before_sampling"], if it is there: who fills in masks has it return when they are
  // complete. Without the interpreter lock; raises what it raises.
  void wait() const;
  void put(nb::dict& into) const;
};

void bind_row_sampler(nb::module_& m);

}  // namespace ew
