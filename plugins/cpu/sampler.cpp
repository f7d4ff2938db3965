#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "philox.h"
#include "thread_pool.h"

namespace ew {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kSumBlock = 512;  // weights summed together; the draw looks at the sums first

// exp(x) for x <= 0 within 2 ulp, in plain operations that the compiler turns into SIMD, so that one build
// gives the same bits on every processor. Below -87 it is 0. Range reduction after Cody and Waite; polynomial
// from Cephes expf.
inline float exp_nonpositive(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const float shifted = clamped * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t scale = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;  // 2^n
  const float result = p * std::bit_cast<float>(scale);
  return x < -87.0f ? 0.0f : result;
}

// The largest logit. `problem` is set for NaN, +infinity, or nothing above -infinity.
float largest(const float* logits, int64_t count, const char** problem) {
  constexpr int kLanes = 16;  // independent maxima, so that the compiler can use SIMD
  float tops[kLanes];
  int32_t bads[kLanes] = {};
  std::fill_n(tops, kLanes, -kInfinity);
  const auto take = [&](int64_t i, int lane) {
    tops[lane] = logits[i] > tops[lane] ? logits[i] : tops[lane];
    bads[lane] |= static_cast<int32_t>(!(logits[i] < kInfinity));  // NaN compares false
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) take(i + lane, lane);
  }
  for (; i < count; ++i) take(i, 0);
  const float top = *std::max_element(tops, tops + kLanes);
  const bool bad = std::any_of(bads, bads + kLanes, [](int32_t lane) { return lane != 0; });
  if (bad) {
    *problem = "has a NaN or infinite logit";
  } else if (top == -kInfinity) {
    *problem = "has no logit above -infinity";
  }
  return top;
}

// Eight partial sums in double, then a fixed tree: vectorizes, and does not depend on who calls it.
double sum_of(const float* values, int64_t count) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += values[i + lane];
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += values[i];
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

double sum_blocks(const std::vector<float>& weights, int64_t count, std::vector<double>& block_sums) {
  block_sums.clear();
  double sum = 0;
  for (int64_t at = 0; at < count; at += kSumBlock) {
    block_sums.push_back(sum_of(weights.data() + at, std::min(kSumBlock, count - at)));
    sum += block_sums.back();
  }
  return sum;
}

// The index of the weight in which `uniform` times the sum falls.
int64_t draw(const std::vector<float>& weights, int64_t count, double uniform,
             std::vector<double>& block_sums) {
  const double target = uniform * sum_blocks(weights, count, block_sums);
  double below = 0;
  size_t block = 0;
  size_t last = 0;  // block that holds any weight
  for (size_t b = 0; b < block_sums.size(); ++b) {
    if (block_sums[b] > 0) last = b;
  }
  while (block < last && below + block_sums[block] <= target) below += block_sums[block++];
  int64_t chosen = -1;
  const int64_t end = std::min(count, (static_cast<int64_t>(block) + 1) * kSumBlock);
  for (int64_t i = static_cast<int64_t>(block) * kSumBlock; i < end; ++i) {
    if (weights[i] <= 0) continue;
    chosen = i;  // rounding may leave the target at or above the last running sum
    below += weights[i];
    if (below > target) break;
  }
  return chosen;
}

const char* check(const RowSampling& p) {
  if (!(p.temperature >= 0) || p.temperature == kInfinity) return "has a temperature that is not in [0, inf)";
  if (p.top_k < 0) return "has a negative top_k";
  if (!(p.top_p >= 0 && p.top_p <= 1)) return "has a top_p that is not in [0, 1]";
  if (!(p.min_p >= 0 && p.min_p <= 1)) return "has a min_p that is not in [0, 1]";
  return nullptr;
}

}  // namespace

// Keeps a buffer of at most 2 * count candidates and cuts it to the best `count` whenever it is full:
// O(vocab) in all.
void Sampler::select_best(const float* logits, int64_t vocab, int64_t count, std::vector<Candidate>& best) {
  best.clear();
  const size_t keep = static_cast<size_t>(count);
  float worst = -kInfinity;  // of the kept ones, once there are `count`
  bool full = false;
  const auto cut = [&] {
    std::nth_element(best.begin(), best.begin() + (count - 1), best.end());
    best.resize(keep);
    worst = best.back().logit;
    full = true;
  };
  for (int64_t id = 0; id < vocab; ++id) {
    if (full && !(logits[id] > worst)) continue;  // an equal logit of a higher id comes later in the order
    best.push_back({logits[id], static_cast<int32_t>(id)});
    if (best.size() >= 2 * keep) cut();
  }
  if (best.size() > keep) cut();
}

// Zeroes the weights outside of the smallest set of most likely tokens that holds top_p of the sum.
void Sampler::cut_top_p(const float* logits, int64_t count, double sum, float top_p, Scratch& scratch) {
  std::vector<float>& weights = scratch.weights;
  std::vector<Candidate>& best = scratch.best;
  // Tokens lighter than (1 - p) * sum / count weigh less than (1 - p) * sum together, so none of them is
  // needed.
  const double light = (1.0 - static_cast<double>(top_p)) * sum / static_cast<double>(count) * 0.999;
  best.clear();
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] >= light && weights[i] > 0) best.push_back({logits[i], static_cast<int32_t>(i)});
  }
  // Halve [low, high) around the place where the running sum reaches the target; all before `low` is kept.
  double wanted = static_cast<double>(top_p) * sum;
  auto low = best.begin();
  auto high = best.end();
  while (high - low > 1) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high);
    double half = 0;
    for (auto it = low; it != middle; ++it) half += weights[it->id];
    if (half >= wanted) {
      high = middle;
    } else {
      wanted -= half;
      low = middle;
    }
  }
  const Candidate last = *low;
  for (int64_t i = 0; i < count; ++i) {
    if (last < Candidate{logits[i], static_cast<int32_t>(i)}) weights[i] = 0;
  }
}

Sampler::Kept Sampler::weigh(const float* logits, int64_t vocab, float top, const RowSampling& parameters,
                             Scratch& scratch) {
  Kept kept{vocab, nullptr};
  if (parameters.top_k > 0 && parameters.top_k < vocab) {
    select_best(logits, vocab, parameters.top_k, scratch.best);
    const Candidate last = *std::max_element(scratch.best.begin(), scratch.best.end());
    scratch.ids.clear();
    scratch.logits.clear();
    for (int64_t id = 0; id < vocab; ++id) {
      if (last < Candidate{logits[id], static_cast<int32_t>(id)}) continue;
      scratch.ids.push_back(static_cast<int32_t>(id));
      scratch.logits.push_back(logits[id]);
    }
    logits = scratch.logits.data();
    kept = {parameters.top_k, scratch.ids.data()};
  }
  scratch.weights.resize(static_cast<size_t>(std::max(kept.count, vocab)));
  float* weights = scratch.weights.data();
  const float temperature = parameters.temperature;
  for (int64_t i = 0; i < kept.count; ++i) weights[i] = exp_nonpositive((logits[i] - top) / temperature);
  if (parameters.top_p < 1) {
    const double sum = sum_blocks(scratch.weights, kept.count, scratch.block_sums);
    cut_top_p(logits, kept.count, sum, parameters.top_p, scratch);
  }
  if (parameters.min_p > 0) {  // the most likely token weighs 1
    for (int64_t i = 0; i < kept.count; ++i) weights[i] = weights[i] < parameters.min_p ? 0.0f : weights[i];
  }
  return kept;
}

void Sampler::log_probabilities(const float* logits, int64_t vocab, int64_t row, float top,
                                const SampleResult& result, Scratch& scratch) {
  scratch.weights.resize(static_cast<size_t>(vocab));
  float* weights = scratch.weights.data();
  for (int64_t i = 0; i < vocab; ++i) weights[i] = exp_nonpositive(logits[i] - top);
  const double log_sum = top + std::log(sum_blocks(scratch.weights, vocab, scratch.block_sums));
  result.token_logprobs[row] = static_cast<float>(logits[result.tokens[row]] - log_sum);
  select_best(logits, vocab, result.top, scratch.best);
  std::sort(scratch.best.begin(), scratch.best.end());
  for (int32_t i = 0; i < result.top; ++i) {
    result.top_ids[row * result.top + i] = scratch.best[i].id;
    result.top_logprobs[row * result.top + i] = static_cast<float>(scratch.best[i].logit - log_sum);
  }
}

void Sampler::sample(const float* logits, int64_t rows, int64_t vocab, int64_t stride,
                     const RowSampling* parameters, const SampleResult& result, ThreadPool& pool) {
  if (vocab < 1) throw std::invalid_argument("the vocabulary is empty");
  if (result.top < 0 || result.top > vocab) {
    throw std::invalid_argument("logprobs must be in [0, " + std::to_string(vocab) + "]");
  }
  scratch_.resize(static_cast<size_t>(pool.size()));
  problem_.assign(static_cast<size_t>(rows), nullptr);
  pool.parallel_for(rows, [&](int64_t row, int worker) {
    Scratch& scratch = scratch_[worker];
    const float* row_logits = logits + row * stride;
    const char*& problem = problem_[row];
    problem = check(parameters[row]);
    if (problem) return;
    const float top = largest(row_logits, vocab, &problem);
    if (problem) return;
    if (parameters[row].temperature == 0) {
      result.tokens[row] = static_cast<int32_t>(std::find(row_logits, row_logits + vocab, top) - row_logits);
    } else {
      const Kept kept = weigh(row_logits, vocab, top, parameters[row], scratch);
      const double uniform = philox_uniform(parameters[row].seed, parameters[row].counter);
      const int64_t chosen = draw(scratch.weights, kept.count, uniform, scratch.block_sums);
      result.tokens[row] = kept.ids ? kept.ids[chosen] : static_cast<int32_t>(chosen);
    }
    if (result.top > 0) log_probabilities(row_logits, vocab, row, top, result, scratch);
  });
  for (int64_t row = 0; row < rows; ++row) {
    if (const char* problem = check(parameters[row])) {
      throw std::invalid_argument("sampled row " + std::to_string(row) + " " + problem);
    }
    if (problem_[row]) throw std::runtime_error("sampled row " + std::to_string(row) + " " + problem_[row]);
  }
}

void Sampler::distribution(const float* logits, int64_t vocab, const RowSampling& parameters,
                           float* weights) {
  if (scratch_.empty()) scratch_.resize(1);
  const char* problem = check(parameters);
  if (!problem && parameters.temperature == 0) problem = "is greedy and has no distribution";
  if (problem) throw std::invalid_argument(std::string("sampled row 0 ") + problem);
  const float top = largest(logits, vocab, &problem);
  if (problem) throw std::runtime_error(std::string("sampled row 0 ") + problem);
  const Kept kept = weigh(logits, vocab, top, parameters, scratch_[0]);
  std::fill(weights, weights + vocab, 0.0f);
  for (int64_t i = 0; i < kept.count; ++i) weights[kept.ids ? kept.ids[i] : i] = scratch_[0].weights[i];
}

}  // namespace ew
