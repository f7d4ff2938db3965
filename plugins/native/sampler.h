// Draws a token from each row of logits, and reports log probabilities.
//
// First a row's logits change, in this order:
//   allowed             all tokens but these are banned: their logit is -infinity;
//   mask                the same, as a set of bits;
//   bias                is added to the logits that it names; -infinity bans a token;
//   repetition_penalty  r: logits of tokens that the row has seen are divided by r if above 0, else
//   multiplied
//                       (Keskar et al. 2019);
//   frequency_penalty   times how often the row has a token in its output is subtracted, then
//   presence_penalty    once for each token that it has there at all (as in OpenAI's API and vLLM);
//   dry                 is added to the logits that it names: what DRY takes from tokens that would repeat a
//                       sequence (p-e-w, 2024; runtime/requests/repeats.py).
// For a row with temperature t > 0 the distribution is then softmax(logits / t), cut in this order:
//   top_n_sigma  n: keeps the tokens whose logit is at most n standard deviations below the largest, over
//                all tokens that aren't banned (Tang et al. 2024, arXiv 2411.07641);
//   top_k      keeps the k most likely tokens (Fan et al. 2018);
//   top_p      of what is left, renormalised, keeps the fewest most likely tokens that sum to at least p
//              (Holtzman et al. 2020);
//   min_p      keeps tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024);
//   typical_p  of what is left, renormalised, keeps the fewest tokens that sum to at least p among those
//   whose
//              surprise, -log of their probability, is nearest to its mean (Meister et al. 2023);
//   xtc        with xtc_probability, of two or more tokens that have xtc_threshold of what is left, keeps the
//              least likely one, and all below it ("exclude top choices"; p-e-w, 2024). The chance is the
//              second number of the row's seed and counter; the first draws the token.
// Equal logits are ordered by id, lowest first, so the result is one fixed function of (logits, parameters,
// seed, counter). Temperature 0 takes the largest logit. Weights are exp in float, all sums are double in a
// fixed order. Log probabilities are those of the logits as they came.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../cpu/kernels/sampling_loops.h"

namespace ew {

class ThreadPool;

struct RowSampling {
  float temperature = 0;
  int32_t top_k = 0;  // 0: off
  float top_p = 1;    // 1: off
  float min_p = 0;    // 0: off
  uint64_t seed = 0;
  uint64_t counter = 0;          // index of the new token in its request
  float typical_p = 1;           // 1: off
  float repetition_penalty = 1;  // 1: off
  float frequency_penalty = 0;   // 0: off
  float presence_penalty = 0;    // 0: off
  float top_n_sigma = 0;         // 0 or below: off
  float xtc_probability = 0;     // 0: off
  float xtc_threshold = 0;
  // Token ids are in [0, vocab), in any order.
  std::span<const int32_t> seen{};     // one that comes twice counts once
  std::span<const int32_t> counted{};  // of the output, each once
  std::span<const int32_t> counts{};   // how often each of `counted` is there
  std::span<const int32_t> biased{};   // each once
  std::span<const float> bias{};       // of each of `biased`; not NaN, nor +infinity
  std::span<const int32_t> dry{};      // each once
  std::span<const float> dry_bias{};   // of each of `dry`; not NaN, nor +infinity
  std::span<const int32_t> allowed{};  // empty: all
  // Bit id % 32 of word id / 32 says whether a token may come; null: all may. It is read by `sample` alone,
  // so that it may be filled in while kernels run.
  const uint32_t* mask = nullptr;
  int32_t top_allowed = 0;  // not 0: the most likely tokens are reported of those that may come
  int32_t scored = -1;      // the token whose log probability is reported; -1: the drawn one
};

constexpr int32_t kNoToken = -1;  // of a row that can't be sampled

// Where the results of a row go. The last three may be null: then no log probabilities are computed.
struct SampleResult {
  int32_t* tokens = nullptr;        // [R]; kNoToken, with log probabilities NaN, where logits aren't finite
  float* token_logprobs = nullptr;  // [R]
  int32_t* top_ids = nullptr;       // [R, top], most likely first
  float* top_logprobs = nullptr;    // [R, top]
  int32_t top = 0;
};

class Sampler {
 public:
  // logits: [rows, vocab], `stride` elements from row to row. A row whose logits are NaN, +infinity, or all
  // -infinity, or whose options ban every token, gets kNoToken; the others are as without it. Throws
  // std::invalid_argument naming the row for a parameter out of range. Keeps its scratch memory.
  void sample(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const RowSampling* parameters,
              const SampleResult& result, ThreadPool& pool);

  // The weights that `sample` draws from, for one row with temperature > 0: 0 where a token is cut. weights:
  // [vocab]. Throws std::runtime_error for a row that can't be sampled.
  void distribution(const float* logits, int64_t vocab, const RowSampling& parameters, float* weights);

 private:
  struct Candidate {
    float logit;
    int32_t id;
    bool operator<(const Candidate& other) const {  // the more likely one is the lesser
      return logit > other.logit || (logit == other.logit && id < other.id);
    }
  };
  // How far a token's surprise is from the mean, and the token's place in the weights.
  struct Surprise {
    double distance;
    int64_t at;
    bool operator<(const Surprise& other) const {
      return distance < other.distance || (distance == other.distance && at < other.at);
    }
  };
  struct Scratch {
    std::vector<float> changed;       // the row's logits after biases and penalties
    std::vector<float> before;        // those that a repetition penalty changes, as they were
    std::vector<Candidate> best;      // of a partial selection
    std::vector<float> logits;        // of the tokens that top_k kept, in order of id
    std::vector<int32_t> ids;         // their ids
    std::vector<float> weights;       // of these, or of all tokens
    std::vector<double> block_sums;   // of the weights
    std::vector<double> range_sums;   // of weights that are about alike
    std::vector<Surprise> surprises;  // of tokens that typical_p chooses from
  };
  struct Kept {
    int64_t count;       // of weights in scratch
    const int32_t* ids;  // null: all tokens
  };

  // What is drawn from: the row's own logits, or, with `largest` of them, those in scratch.
  const float* change(const float* logits, int64_t vocab, const RowSampling& parameters, Largest& largest,
                      Scratch& scratch) const;
  void select_best(const float* logits, int64_t vocab, int64_t count, std::vector<Candidate>& best) const;
  Kept weigh(const float* logits, int64_t vocab, float top, const RowSampling& parameters,
             Scratch& scratch) const;
  void cut_top_p(const float* logits, int64_t count, double sum, float top_p, Scratch& scratch) const;
  void cut_untypical(const float* logits, int64_t count, float top, const RowSampling& parameters,
                     Scratch& scratch) const;
  void exclude_top(const float* logits, int64_t count, float threshold, Scratch& scratch) const;
  // The most likely tokens are those of `of_top`.
  void log_probabilities(const float* logits, const float* of_top, int64_t vocab, int64_t row, float top,
                         int32_t scored, const SampleResult& result, Scratch& scratch) const;

  const SamplingLoops& loops_ = sampling_loops();
  std::vector<Scratch> scratch_;  // by worker
};

}  // namespace ew
