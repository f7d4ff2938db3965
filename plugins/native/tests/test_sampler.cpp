// Philox against its published vectors, and the sampler's edges. Its numbers are tested in
// tests/plugins/native.
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "../../cpu/kernels/sampling_loops.h"
#include "check.h"
#include "philox.h"
#include "sampler.h"
#include "thread_pool.h"

namespace {

using ew::RowSampling;
using ew::Sampler;
using ew::ThreadPool;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(count);
  for (float& logit : logits) logit = normal(generator);
  return logits;
}

bool no_token(int32_t token) { return token == ew::kNoToken; }

int32_t sample_one(const std::vector<float>& logits, const RowSampling& parameters) {
  ThreadPool pool(1);
  int32_t token = -1;
  const int64_t vocab = static_cast<int64_t>(logits.size());
  Sampler().sample(logits.data(), 1, vocab, vocab, &parameters, {.tokens = &token}, pool);
  return token;
}

// The known-answer vectors of Random123 for philox4x32 with 10 rounds.
void philox_known_answers() {
  using Counter = std::array<uint32_t, 4>;
  const uint32_t ones = 0xffffffffu;
  CHECK((ew::philox4x32_10({0, 0, 0, 0}, {0, 0}) == Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  CHECK((ew::philox4x32_10({ones, ones, ones, ones}, {ones, ones}) ==
         Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  CHECK((ew::philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
         Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

void uniform_is_in_range() {
  double sum = 0;
  for (uint64_t i = 0; i < 10000; ++i) {
    const double u = ew::philox_uniform(42, i);
    CHECK(u >= 0 && u < 1);
    sum += u;
  }
  CHECK(std::abs(sum / 10000 - 0.5) < 0.02) << sum;  // seven deviations
}

// Cutting to one token in any way gives the greedy one.
void cuts_to_one_token_are_greedy() {
  for (const size_t vocab : {1, 2, 31, 32, 33, 511, 512, 513, 5000}) {
    const std::vector<float> logits = random_logits(vocab, static_cast<unsigned>(vocab));
    const int32_t best = sample_one(logits, {});
    for (uint64_t seed = 0; seed < 5; ++seed) {
      CHECK(sample_one(logits, {.temperature = 2, .top_k = 1, .seed = seed}) == best) << vocab;
      CHECK(sample_one(logits, {.temperature = 2, .top_p = 0, .seed = seed}) == best) << vocab;
      CHECK(sample_one(logits, {.temperature = 2, .min_p = 1, .seed = seed}) == best) << vocab;
      CHECK(sample_one(logits, {.temperature = 1e-6f, .seed = seed}) == best) << vocab;
    }
  }
}

void tokens_of_no_weight_are_never_drawn() {
  std::vector<float> logits(2000, -kInfinity);
  logits[700] = 1;
  logits[1999] = 1;
  int counts[2] = {};
  for (uint64_t counter = 0; counter < 200; ++counter) {
    const int32_t token = sample_one(logits, {.temperature = 1, .counter = counter});
    CHECK(token == 700 || token == 1999) << token;
    ++counts[token == 1999];
  }
  CHECK(counts[0] > 60 && counts[1] > 60) << counts[0] << " " << counts[1];
}

void rows_do_not_depend_on_threads_or_stride() {
  constexpr int64_t kRows = 17, kVocab = 300, kStride = 333;
  const std::vector<float> logits = random_logits(kRows * kStride, 4);
  std::vector<RowSampling> parameters;
  for (int64_t row = 0; row < kRows; ++row) {
    parameters.push_back({.temperature = 0.5f * static_cast<float>(row % 3),
                          .top_k = row % 4 ? 20 : 0,
                          .top_p = row % 5 ? 1.0f : 0.7f,
                          .seed = static_cast<uint64_t>(row)});
  }
  std::vector<int32_t> first(kRows), again(kRows), top_ids(kRows * 4);
  std::vector<float> token_logprobs(kRows), top_logprobs(kRows * 4);
  ThreadPool one(1), two(2);
  Sampler sampler;
  sampler.sample(logits.data(), kRows, kVocab, kStride, parameters.data(), {.tokens = first.data()}, one);
  sampler.sample(logits.data(), kRows, kVocab, kStride, parameters.data(),
                 {again.data(), token_logprobs.data(), top_ids.data(), top_logprobs.data(), 4}, two);
  CHECK(first == again);
  for (int64_t row = 0; row < kRows; ++row) {
    const std::vector<float> own(logits.begin() + row * kStride, logits.begin() + row * kStride + kVocab);
    CHECK(sample_one(own, parameters[row]) == first[row]);
    CHECK(top_ids[row * 4] == sample_one(own, {}));
    CHECK(token_logprobs[row] <= top_logprobs[row * 4] && top_logprobs[row * 4] <= 0);
  }
}

// The search runs in lanes: a largest logit is found, and a fault seen, in each of them and behind the last.
void every_place_is_looked_at() {
  for (size_t at = 0; at < 37; ++at) {
    std::vector<float> logits(37, -1.0f);
    logits[at] = 2;
    logits[36] = 2;  // of equals, the first
    CHECK(sample_one(logits, {}) == static_cast<int32_t>(at)) << at;
    for (const float bad : {NAN, kInfinity}) {
      logits[at] = bad;
      CHECK(no_token(sample_one(logits, {})));
    }
  }
}

// The loops of every instruction set, over lengths that no vector divides.
void every_set_has_the_same_bits() {
  const ew::SamplingLoops& plain = *ew::sampling_loops_for("portable");
  for (const char* isa : {"avx512", "avx2", "portable"}) {
    if (!ew::sampling_loops_for(isa)) continue;
    const ew::SamplingLoops& loops = *ew::sampling_loops_for(isa);
    for (const size_t count : {1, 2, 15, 31, 33, 63, 64, 65, 500, 1023, 1025, 3001}) {
      const int64_t size = static_cast<int64_t>(count);
      const std::vector<float> logits = random_logits(count, static_cast<unsigned>(count));
      const ew::Largest a = plain.find_largest(logits.data(), size),
                        b = loops.find_largest(logits.data(), size);
      CHECK(a.value == b.value && a.at == b.at && !a.bad && !b.bad) << isa << " " << count;
      CHECK(a.at == std::max_element(logits.begin(), logits.end()) - logits.begin()) << isa << " " << count;
      std::vector<float> weights(count), expected(count);
      for (const float temperature : {0.3f, 1.0f, 7.0f}) {
        plain.exp_weights(logits.data(), size, a.value, temperature, expected.data());
        loops.exp_weights(logits.data(), size, a.value, temperature, weights.data());
        CHECK(weights == expected) << isa << " " << count;
        CHECK(plain.sum(weights.data(), size) == loops.sum(weights.data(), size)) << isa << " " << count;
      }
      for (const float limit : {-1.0f, 0.0f, 3.0f, 5.0f, 100.0f}) {
        for (int64_t at = 0; at < size; at = at * 2 + 1) {
          const auto found =
              std::find_if(logits.begin() + at, logits.end(), [&](float x) { return x >= limit; });
          CHECK(loops.find_at_least(logits.data(), at, size, limit) == found - logits.begin())
              << isa << " " << count;
        }
      }
    }
  }
}

void faults_are_refused() {
  const std::vector<float> good(5, 1.0f);
  CHECK(no_token(sample_one({1, NAN, 2}, {})));
  CHECK(no_token(sample_one({1, kInfinity}, {.temperature = 1})));
  CHECK(no_token(sample_one({-kInfinity, -kInfinity}, {})));
  for (const float penalty : {0.0f, -1.0f, NAN, kInfinity}) {
    CHECK_THROWS(sample_one(good, {.repetition_penalty = penalty}), std::invalid_argument);
  }
  CHECK_THROWS(sample_one(good, {.temperature = -1}), std::invalid_argument);
  CHECK_THROWS(sample_one(good, {.temperature = NAN}), std::invalid_argument);
  CHECK_THROWS(sample_one(good, {.temperature = 1, .top_k = -1}), std::invalid_argument);
  CHECK_THROWS(sample_one(good, {.temperature = 1, .top_p = 1.01f}), std::invalid_argument);
  CHECK_THROWS(sample_one(good, {.temperature = 1, .min_p = NAN}), std::invalid_argument);
  CHECK_THROWS(sample_one({}, {}), std::invalid_argument);
  std::vector<float> weights(5);
  CHECK_THROWS(Sampler().distribution(good.data(), 5, {}, weights.data()), std::invalid_argument);
}

// Where a library has the thread take the smallest numbers for 0, logits divided by a temperature that is one
// are NaN, and no weight is above 0.
void flushed_numbers_draw_the_largest() {
#ifdef __SSE2__
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);  // flush to zero, denormals are zero
  for (const size_t vocab : {1, 40, 600}) {
    const std::vector<float> logits = random_logits(vocab, 3);
    const int32_t best = sample_one(logits, {});
    for (const float top_p : {1.0f, 0.9f, 0.0f}) {
      for (const int32_t top_k : {0, 1, 5}) {
        CHECK(sample_one(logits, {.temperature = 1e-45f, .top_k = top_k, .top_p = top_p}) == best)
            << vocab << " " << top_p << " " << top_k;
      }
    }
  }
  _mm_setcsr(mode);
#endif
}

// Tokens beside any others, in any order and number.
void a_penalty_is_of_what_was_seen() {
  const std::vector<float> logits = {4, 3, -1, -2};
  const std::vector<int32_t> first = {0}, twice = {0, 0, 0}, all = {3, 1, 0, 2};
  CHECK(sample_one(logits, {.repetition_penalty = 1.3f, .seen = first}) == 0);  // 3.08
  CHECK(sample_one(logits, {.repetition_penalty = 1.4f, .seen = first}) == 1);  // 2.86
  CHECK(sample_one(logits, {.repetition_penalty = 1.3f, .seen = twice}) == 0);
  CHECK(sample_one(logits, {.repetition_penalty = 100, .seen = all}) == 0);
  CHECK(sample_one({-1, -1.5f}, {.repetition_penalty = 2, .seen = first}) == 1);
  CHECK(sample_one({3e38f, 1}, {.repetition_penalty = 1e-30f, .seen = first}) == 0);  // stays finite
  CHECK(sample_one({-3e38f, 1}, {.temperature = 1, .repetition_penalty = 1e30f, .seen = first}) == 1);
}

// A mask bans what its bits leave out, also in the last word, which is shorter; its words are read, nothing
// behind.
void a_mask_bans_the_others() {
  for (const size_t vocab : {1u, 31u, 32u, 33u, 1000u}) {
    const std::vector<float> logits = random_logits(vocab, 5);
    std::vector<uint32_t> mask((vocab + 31) / 32);
    std::mt19937 generator(7);
    for (uint32_t& word : mask) word = generator() & generator();
    mask[0] |= 1;
    size_t best = 0;
    for (size_t i = 0; i < vocab; ++i) {
      if ((mask[i / 32] >> (i % 32) & 1) && logits[i] > logits[best]) best = i;
    }
    CHECK(sample_one(logits, {.mask = mask.data()}) == static_cast<int32_t>(best));
    for (uint64_t counter = 0; counter < 50; ++counter) {
      const auto token = static_cast<size_t>(
          sample_one(logits, {.temperature = 3, .counter = counter, .mask = mask.data()}));
      CHECK(mask[token / 32] >> (token % 32) & 1);
    }
    std::fill(mask.begin(), mask.end(), 0xffffffffu);
    CHECK(sample_one(logits, {.mask = mask.data()}) == sample_one(logits, {}));
    std::fill(mask.begin(), mask.end(), 0u);
    CHECK(no_token(sample_one(logits, {.mask = mask.data()})));
  }
}

// The most likely tokens are of all, or of those that may come; their log probabilities are the same ones.
void top_tokens_may_be_those_that_may_come() {
  const std::vector<float> logits = {0, 3, 1, 2};
  const uint32_t mask = 0b0101;
  ThreadPool pool(1);
  int32_t token = -1, ids[3] = {};
  float own = 0, top[3] = {};
  for (const int32_t allowed : {0, 1}) {
    const RowSampling row{.mask = &mask, .top_allowed = allowed};
    const ew::SampleResult result{&token, &own, ids, top, 3};
    Sampler().sample(logits.data(), 1, 4, 4, &row, result, pool);
    CHECK(token == 2);
    CHECK(ids[0] == (allowed ? 2 : 1) && ids[1] == (allowed ? 0 : 3));
    CHECK(!allowed || (top[0] == own && top[2] == -kInfinity));
  }
}

}  // namespace

int main() {
  RUN(philox_known_answers);
  RUN(uniform_is_in_range);
  RUN(cuts_to_one_token_are_greedy);
  RUN(tokens_of_no_weight_are_never_drawn);
  RUN(rows_do_not_depend_on_threads_or_stride);
  RUN(every_place_is_looked_at);
  RUN(every_set_has_the_same_bits);
  RUN(flushed_numbers_draw_the_largest);
  RUN(a_penalty_is_of_what_was_seen);
  RUN(a_mask_bans_the_others);
  RUN(top_tokens_may_be_those_that_may_come);
  RUN(faults_are_refused);
  return ew::check::result();
}
