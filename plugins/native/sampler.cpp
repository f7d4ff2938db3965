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
constexpr int64_t kStretch = 64;    // values behind one that was found, looked at one by one
constexpr int64_t kSumBlock = 512;  // weights summed together; the draw looks at the sums first

// Ranges of weights: those of one have the exponent and the first four bits behind it in common. The most
// likely token's, 1, is alone in the last.
constexpr int kRangeShift = 19;
constexpr int kWeightRanges = (0x3f800000 >> kRangeShift) + 1;
int weight_range(float weight) { return static_cast<int>(std::bit_cast<uint32_t>(weight) >> kRangeShift); }
float least_of_range(int range) { return std::bit_cast<float>(static_cast<uint32_t>(range) << kRangeShift); }

double sum_blocks(const SamplingLoops& loops, const std::vector<float>& weights, int64_t count,
                  std::vector<double>& block_sums) {
  block_sums.clear();
  double sum = 0;
  for (int64_t at = 0; at < count; at += kSumBlock) {
    block_sums.push_back(loops.sum(weights.data() + at, std::min(kSumBlock, count - at)));
    sum += block_sums.back();
  }
  return sum;
}

// The index of the weight in which `uniform` times the sum falls; -1 if no weight is above 0.
int64_t draw(const SamplingLoops& loops, const std::vector<float>& weights, int64_t count, double uniform,
             std::vector<double>& block_sums) {
  const double target = uniform * sum_blocks(loops, weights, count, block_sums);
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

// fn(i) for every one of values[0 : count] that is at least `limit`, in order. Few are, as a rule.
template <class F>
void for_each_at_least(const SamplingLoops& loops, const float* values, int64_t count, float limit,
                       const F& fn) {
  for (int64_t i = 0; (i = loops.find_at_least(values, i, count, limit)) < count;) {
    for (const int64_t end = std::min(i + kStretch, count); i < end; ++i) {
      if (values[i] >= limit) fn(i);
    }
  }
}

// Whether something can be drawn from logits of which this is the largest.
bool sound(const Largest& largest) { return !largest.bad && largest.value != -kInfinity; }

const char* check(const RowSampling& p) {
  if (!(p.temperature >= 0) || p.temperature == kInfinity) return "has a temperature that is not in [0, inf)";
  if (p.top_k < 0) return "has a negative top_k";
  if (!(p.top_p >= 0 && p.top_p <= 1)) return "has a top_p that is not in [0, 1]";
  if (!(p.min_p >= 0 && p.min_p <= 1)) return "has a min_p that is not in [0, 1]";
  if (!(p.repetition_penalty > 0 && p.repetition_penalty < kInfinity)) {
    return "has a repetition_penalty that is not in (0, inf)";
  }
  if (!(p.typical_p > 0 && p.typical_p <= 1)) return "has a typical_p that is not in (0, 1]";
  if (!std::isfinite(p.frequency_penalty)) return "has a frequency_penalty that is not finite";
  if (!std::isfinite(p.presence_penalty)) return "has a presence_penalty that is not finite";
  if (!std::isfinite(p.top_n_sigma)) return "has a top_n_sigma that is not finite";
  if (!(p.xtc_probability >= 0 && p.xtc_probability <= 1)) {
    return "has an xtc_probability that is not in [0, 1]";
  }
  if (!(p.xtc_threshold >= 0 && p.xtc_threshold <= 1)) return "has an xtc_threshold that is not in [0, 1]";
  for (const float bias : p.bias) {
    if (!(bias < kInfinity)) return "has a bias that is NaN or +infinity";
  }
  for (const float bias : p.dry_bias) {
    if (!(bias < kInfinity)) return "has a dry_bias that is NaN or +infinity";
  }
  return nullptr;
}

// The results of a row that can't be sampled.
void refuse(const SampleResult& result, int64_t row) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  result.tokens[row] = kNoToken;
  if (!result.token_logprobs) return;
  result.token_logprobs[row] = kNaN;
  std::fill_n(result.top_ids + row * result.top, result.top, kNoToken);
  std::fill_n(result.top_logprobs + row * result.top, result.top, kNaN);
}

// Finite logits stay finite, whatever is done to them.
float within_range(float logit) {
  constexpr float kMost = std::numeric_limits<float>::max();
  return std::clamp(logit, -kMost, kMost);
}

// Bans the tokens whose bit isn't set.
void ban_others(const uint32_t* mask, int64_t vocab, float* logits) {
  for (int64_t begin = 0; begin < vocab; begin += 32) {
    const uint32_t word = mask[begin / 32];
    if (word == ~uint32_t{0}) continue;
    const int64_t count = std::min<int64_t>(32, vocab - begin);
    if (word == 0) {
      std::fill_n(logits + begin, count, -kInfinity);
      continue;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (!(word >> i & 1)) logits[begin + i] = -kInfinity;
    }
  }
}

// A banned token stays banned.
float biased(float logit, float bias) {
  return logit == -kInfinity || bias == -kInfinity ? -kInfinity : within_range(logit + bias);
}

// The least logit that top_n_sigma keeps: `n` standard deviations below the largest one. Sums are over the
// distances from it, in eight lanes.
double least_within(const float* logits, int64_t vocab, float top, float n) {
  constexpr int kLanes = 8;
  double sums[kLanes] = {}, squares[kLanes] = {};
  int64_t counts[kLanes] = {};
  for (int64_t i = 0; i < vocab; ++i) {
    if (logits[i] == -kInfinity) continue;
    const int lane = static_cast<int>(i % kLanes);
    const double below = static_cast<double>(logits[i]) - top;
    sums[lane] += below;
    squares[lane] += below * below;
    ++counts[lane];
  }
  double sum = 0, square = 0, count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    sum += sums[lane];
    square += squares[lane];
    count += static_cast<double>(counts[lane]);
  }
  const double mean = sum / count;
  return top - n * std::sqrt(std::max(square / count - mean * mean, 0.0));
}

float penalized(float logit, float penalty) {
  if (logit == -kInfinity) return logit;
  return within_range(logit < 0 ? logit * penalty : logit / penalty);
}

}  // namespace

const float* Sampler::change(const float* logits, int64_t vocab, const RowSampling& parameters,
                             Largest& largest, Scratch& scratch) const {
  const RowSampling& p = parameters;
  const bool repeated = p.repetition_penalty != 1 && !p.seen.empty();
  const bool counted = (p.frequency_penalty != 0 || p.presence_penalty != 0) && !p.counted.empty();
  if (!repeated && !counted && p.biased.empty() && p.dry.empty() && p.allowed.empty() && !p.mask)
    return logits;
  std::vector<float>& changed = scratch.changed;
  if (p.allowed.empty()) {
    changed.assign(logits, logits + vocab);
  } else {
    changed.assign(static_cast<size_t>(vocab), -kInfinity);
    for (const int32_t id : p.allowed) changed[id] = logits[id];
  }
  if (p.mask) ban_others(p.mask, vocab, changed.data());
  for (size_t i = 0; i < p.biased.size(); ++i) {
    changed[p.biased[i]] = biased(changed[p.biased[i]], p.bias[i]);
  }
  if (repeated) {
    scratch.before.clear();
    for (const int32_t id : p.seen) scratch.before.push_back(changed[id]);
    for (size_t i = 0; i < p.seen.size(); ++i) {
      changed[p.seen[i]] = penalized(scratch.before[i], p.repetition_penalty);
    }
  }
  for (size_t i = 0; counted && i < p.counted.size(); ++i) {
    float& logit = changed[p.counted[i]];
    if (logit == -kInfinity) continue;
    logit = within_range(logit - p.frequency_penalty * static_cast<float>(p.counts[i]));
    logit = within_range(logit - p.presence_penalty);
  }
  for (size_t i = 0; i < p.dry.size(); ++i) changed[p.dry[i]] = biased(changed[p.dry[i]], p.dry_bias[i]);
  largest = loops_.find_largest(changed.data(), vocab);
  return changed.data();
}

// Keeps a buffer of at most 2 * count candidates and cuts it to the best `count` whenever it is full:
// O(vocab) in all.
void Sampler::select_best(const float* logits, int64_t vocab, int64_t count,
                          std::vector<Candidate>& best) const {
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
  for (int64_t id = 0; id < vocab;) {
    if (full) id = loops_.find_at_least(logits, id, vocab, worst);
    for (const int64_t end = std::min(id + kStretch, vocab); id < end; ++id) {
      if (full && !(logits[id] > worst)) continue;  // an equal logit of a higher id comes later in the order
      best.push_back({logits[id], static_cast<int32_t>(id)});
      if (best.size() >= 2 * keep) cut();
    }
  }
  if (best.size() > keep) cut();
}

// Zeroes the weights outside of the smallest set of most likely tokens that holds top_p of the sum: sums them
// by ranges of weights, from the heaviest down, and looks into the one range where the sum gets there.
void Sampler::cut_top_p(const float* logits, int64_t count, double sum, float top_p, Scratch& scratch) const {
  std::vector<float>& weights = scratch.weights;
  std::vector<Candidate>& best = scratch.best;
  // Tokens lighter than (1 - p) * sum / count weigh less than (1 - p) * sum together, so none of them is
  // needed. At p = 1 every weight counts but 0.
  const double least = (1.0 - static_cast<double>(top_p)) * sum / static_cast<double>(count) * 0.999;
  const float light = std::max(static_cast<float>(least), std::numeric_limits<float>::min());
  scratch.range_sums.assign(kWeightRanges, 0.0);
  for_each_at_least(loops_, weights.data(), count, light,
                    [&](int64_t i) { scratch.range_sums[weight_range(weights[i])] += weights[i]; });
  double wanted = static_cast<double>(top_p) * sum;
  int range = kWeightRanges - 1;
  const int lowest = weight_range(light);
  while (range > lowest && wanted > scratch.range_sums[range]) wanted -= scratch.range_sums[range--];
  while (range < kWeightRanges - 1 && scratch.range_sums[range] == 0) ++range;  // rounding used up all
  best.clear();
  const float lower = std::max(least_of_range(range), light);
  for_each_at_least(loops_, weights.data(), count, lower, [&](int64_t i) {
    if (weight_range(weights[i]) == range) best.push_back({logits[i], static_cast<int32_t>(i)});
  });
  if (best.empty()) return;  // weights that aren't exp(x): nothing to cut
  // Halve [low, high) around the place where the running sum reaches the target; all before `low` is kept.
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
  const Candidate last = *low;  // of equal logits, those of higher ids go
  for (int64_t i = 0; i <= last.id; ++i) weights[i] = logits[i] < last.logit ? 0.0f : weights[i];
  for (int64_t i = last.id + 1; i < count; ++i) weights[i] = logits[i] <= last.logit ? 0.0f : weights[i];
}

Sampler::Kept Sampler::weigh(const float* logits, int64_t vocab, float top, const RowSampling& parameters,
                             Scratch& scratch) const {
  Kept kept{vocab, nullptr};
  const bool near = parameters.top_n_sigma > 0;
  const double least = near ? least_within(logits, vocab, top, parameters.top_n_sigma) : 0;
  if (parameters.top_k > 0 && parameters.top_k < vocab) {
    select_best(logits, vocab, parameters.top_k, scratch.best);
    const Candidate last = *std::max_element(scratch.best.begin(), scratch.best.end());
    scratch.ids.clear();
    scratch.logits.clear();
    for_each_at_least(loops_, logits, vocab, last.logit, [&](int64_t id) {
      if (last < Candidate{logits[id], static_cast<int32_t>(id)}) return;
      scratch.ids.push_back(static_cast<int32_t>(id));
      scratch.logits.push_back(logits[id]);
    });
    logits = scratch.logits.data();
    kept = {parameters.top_k, scratch.ids.data()};
  }
  scratch.weights.resize(static_cast<size_t>(std::max(kept.count, vocab)));
  float* weights = scratch.weights.data();
  loops_.exp_weights(logits, kept.count, top, parameters.temperature, weights);
  for (int64_t i = 0; near && i < kept.count; ++i) weights[i] = logits[i] < least ? 0.0f : weights[i];
  if (parameters.top_p < 1) {
    const double sum = sum_blocks(loops_, scratch.weights, kept.count, scratch.block_sums);
    cut_top_p(logits, kept.count, sum, parameters.top_p, scratch);
  }
  if (parameters.min_p > 0) {  // the most likely token weighs 1
    for (int64_t i = 0; i < kept.count; ++i) weights[i] = weights[i] < parameters.min_p ? 0.0f : weights[i];
  }
  if (parameters.typical_p < 1) cut_untypical(logits, kept.count, top, parameters, scratch);
  if (parameters.xtc_probability > 0 &&
      philox_uniform(parameters.seed, parameters.counter, 1) < parameters.xtc_probability) {
    exclude_top(logits, kept.count, parameters.xtc_threshold, scratch);
  }
  return kept;
}

// Zeroes the weights whose surprise is farthest from the mean: of the others, the nearest sum to typical_p.
void Sampler::cut_untypical(const float* logits, int64_t count, float top, const RowSampling& parameters,
                            Scratch& scratch) const {
  std::vector<float>& weights = scratch.weights;
  std::vector<Surprise>& surprises = scratch.surprises;
  const double sum = sum_blocks(loops_, weights, count, scratch.block_sums);
  const double log_sum = std::log(sum);
  const auto surprise = [&](int64_t i) {
    return log_sum - (static_cast<double>(logits[i]) - top) / parameters.temperature;
  };
  surprises.clear();
  double mean = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] <= 0) continue;
    mean += weights[i] / sum * surprise(i);
    surprises.push_back({0, i});
  }
  for (Surprise& one : surprises) one.distance = std::abs(surprise(one.at) - mean);
  // Halve [low, high) around the place where the running sum reaches the target; all before `low` is kept.
  double wanted = static_cast<double>(parameters.typical_p) * sum;
  auto low = surprises.begin();
  auto high = surprises.end();
  while (high - low > 1) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high);
    double half = 0;
    for (auto it = low; it != middle; ++it) half += weights[it->at];
    if (half >= wanted) {
      high = middle;
    } else {
      wanted -= half;
      low = middle;
    }
  }
  const double farthest = low->distance;  // all that are as far are kept
  for (auto it = low; it != surprises.end(); ++it) {
    if (it->distance > farthest) weights[it->at] = 0;
  }
}

// Zeroes the weights of all tokens with `threshold` of the sum, but for the least likely of them.
void Sampler::exclude_top(const float* logits, int64_t count, float threshold, Scratch& scratch) const {
  std::vector<float>& weights = scratch.weights;
  const double least = threshold * sum_blocks(loops_, weights, count, scratch.block_sums);
  Candidate last{kInfinity, -1};
  for (int64_t i = 0; i < count; ++i) {
    const Candidate one{logits[i], static_cast<int32_t>(i)};
    if (weights[i] > 0 && weights[i] >= least && last < one) last = one;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (Candidate{logits[i], static_cast<int32_t>(i)} < last) weights[i] = 0;
  }
}

void Sampler::log_probabilities(const float* logits, const float* of_top, int64_t vocab, int64_t row,
                                float top, int32_t scored, const SampleResult& result,
                                Scratch& scratch) const {
  scratch.weights.resize(static_cast<size_t>(vocab));
  loops_.exp_weights(logits, vocab, top, 1.0f, scratch.weights.data());
  const double log_sum = top + std::log(sum_blocks(loops_, scratch.weights, vocab, scratch.block_sums));
  result.token_logprobs[row] = static_cast<float>(logits[scored < 0 ? result.tokens[row] : scored] - log_sum);
  if (result.top == 0) return;
  select_best(of_top, vocab, result.top, scratch.best);
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
  for (int64_t row = 0; row < rows; ++row) {
    if (const char* problem = check(parameters[row])) {
      throw std::invalid_argument("sampled row " + std::to_string(row) + " " + problem);
    }
  }
  scratch_.resize(static_cast<size_t>(pool.size()));
  pool.parallel_for(rows, [&](int64_t row, int worker) {
    Scratch& scratch = scratch_[worker];
    const RowSampling& own = parameters[row];
    const float* row_logits = logits + row * stride;
    const Largest raw = loops_.find_largest(row_logits, vocab);
    if (!sound(raw)) {
      refuse(result, row);
      return;
    }
    Largest largest = raw;
    const float* drawn_from = change(row_logits, vocab, own, largest, scratch);
    if (!sound(largest)) {
      refuse(result, row);
      return;
    }
    result.tokens[row] = static_cast<int32_t>(largest.at);
    if (own.temperature != 0) {
      const Kept kept = weigh(drawn_from, vocab, largest.value, own, scratch);
      const double uniform = philox_uniform(own.seed, own.counter);
      const int64_t chosen = draw(loops_, scratch.weights, kept.count, uniform, scratch.block_sums);
      if (chosen >= 0) result.tokens[row] = kept.ids ? kept.ids[chosen] : static_cast<int32_t>(chosen);
    }
    if (result.token_logprobs) {
      const float* of_top = own.top_allowed ? drawn_from : row_logits;
      log_probabilities(row_logits, of_top, vocab, row, raw.value, own.scored, result, scratch);
    }
  });
}

void Sampler::distribution(const float* logits, int64_t vocab, const RowSampling& parameters,
                           float* weights) {
  if (scratch_.empty()) scratch_.resize(1);
  const char* problem = check(parameters);
  if (!problem && parameters.temperature == 0) problem = "is greedy and has no distribution";
  if (problem) throw std::invalid_argument(std::string("sampled row 0 ") + problem);
  Largest largest = loops_.find_largest(logits, vocab);
  if (!sound(largest)) throw std::runtime_error("sampled row 0 has logits that are not finite");
  const float* drawn_from = change(logits, vocab, parameters, largest, scratch_[0]);
  if (!sound(largest)) throw std::runtime_error("sampled row 0 has no token that isn't banned");
  const Kept kept = weigh(drawn_from, vocab, largest.value, parameters, scratch_[0]);
  std::fill(weights, weights + vocab, 0.0f);
  for (int64_t i = 0; i < kept.count; ++i) weights[kept.ids ? kept.ids[i] : i] = scratch_[0].weights[i];
}

}  // namespace ew
