// Draws a token from each row of logits, and reports log probabilities.
//
// For a row with temperature t > 0 the distribution is softmax(logits / t), cut in this order:
//   top_k   keeps the k most likely tokens (Fan et al. 2018);
//   top_p   of what is left, renormalised, keeps the fewest most likely tokens that sum to at least p
//           (Holtzman et al. 2020);
//   min_p   keeps tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024).
// Equal logits are ordered by id, lowest first, so the result is one fixed function of (logits, parameters,
// seed, counter). Temperature 0 takes the largest logit. Weights are exp in float, all sums are double in a
// fixed order.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/sampling_loops.h"

namespace ew {

class ThreadPool;

struct RowSampling {
  float temperature = 0;
  int32_t top_k = 0;  // 0: off
  float top_p = 1;    // 1: off
  float min_p = 0;    // 0: off
  uint64_t seed = 0;
  uint64_t counter = 0;  // index of the new token in its request
};

// Where the results of a row go. The last three may be null if `top` is 0.
struct SampleResult {
  int32_t* tokens = nullptr;        // [R]
  float* token_logprobs = nullptr;  // [R]
  int32_t* top_ids = nullptr;       // [R, top], most likely first
  float* top_logprobs = nullptr;    // [R, top]
  int32_t top = 0;
};

class Sampler {
 public:
  // logits: [rows, vocab], `stride` elements from row to row. Throws std::invalid_argument naming the row for
  // a parameter out of range, and for logits that are NaN, +infinity, or all -infinity. Keeps its scratch
  // memory.
  void sample(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const RowSampling* parameters,
              const SampleResult& result, ThreadPool& pool);

  // The weights that `sample` draws from, for one row with temperature > 0: 0 where a token is cut. weights:
  // [vocab].
  void distribution(const float* logits, int64_t vocab, const RowSampling& parameters, float* weights);

 private:
  struct Candidate {
    float logit;
    int32_t id;
    bool operator<(const Candidate& other) const {  // the more likely one is the lesser
      return logit > other.logit || (logit == other.logit && id < other.id);
    }
  };
  struct Scratch {
    std::vector<Candidate> best;     // of a partial selection
    std::vector<float> logits;       // of the tokens that top_k kept, in order of id
    std::vector<int32_t> ids;        // their ids
    std::vector<float> weights;      // of these, or of all tokens
    std::vector<double> block_sums;  // of the weights
    std::vector<double> range_sums;  // of weights that are about alike
  };
  struct Kept {
    int64_t count;       // of weights in scratch
    const int32_t* ids;  // null: all tokens
  };

  void select_best(const float* logits, int64_t vocab, int64_t count, std::vector<Candidate>& best) const;
  Kept weigh(const float* logits, int64_t vocab, float top, const RowSampling& parameters,
             Scratch& scratch) const;
  void cut_top_p(const float* logits, int64_t count, double sum, float top_p, Scratch& scratch) const;
  void log_probabilities(const float* logits, int64_t vocab, int64_t row, float top,
                         const SampleResult& result, Scratch& scratch) const;

  const SamplingLoops& loops_ = sampling_loops();
  std::vector<Scratch> scratch_;      // by worker
  std::vector<const char*> problem_;  // by row: null, or what is wrong with it
};

}  // namespace ew
