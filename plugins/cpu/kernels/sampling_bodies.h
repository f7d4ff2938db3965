// The loops of sampling_loops.h, in lanes that the compiler makes vectors of. Included by sampling_*.cpp
// alone, each compiled with flags of its own; everything has internal linkage, so that code for one can't end
// up in another.
#pragma once

#include "sampling_loops.h"

namespace ew {
namespace {

constexpr int64_t kFindBlock = 1024;  // logits among which the largest is then looked for
constexpr int kFindLanes = 32;

// The largest of a row and the first place that has it. NaN, which compares with nothing, and +infinity are
// bad.
Largest find_largest(const float* logits, int64_t count) {
  const float kInfinity = __builtin_inff();
  Largest found{-kInfinity, 0, false};
  for (int64_t start = 0; start < count; start += kFindBlock) {
    const float* block = logits + start;
    const int64_t size = count - start < kFindBlock ? count - start : kFindBlock;
    float tops[kFindLanes];
    int32_t bads[kFindLanes] = {};
    for (float& top : tops) top = -kInfinity;
    int64_t i = 0;
    for (; i + kFindLanes <= size; i += kFindLanes) {
      for (int lane = 0; lane < kFindLanes; ++lane) {
        const float x = block[i + lane];
        tops[lane] = x > tops[lane] ? x : tops[lane];
        bads[lane] |= static_cast<int32_t>(!(x < kInfinity));
      }
    }
    for (int lane = 0; i < size; ++i, ++lane) {
      tops[lane] = block[i] > tops[lane] ? block[i] : tops[lane];
      bads[lane] |= static_cast<int32_t>(!(block[i] < kInfinity));
    }
    float top = tops[0];
    int32_t bad = bads[0];
    for (int lane = 1; lane < kFindLanes; ++lane) {
      top = tops[lane] > top ? tops[lane] : top;
      bad |= bads[lane];
    }
    found.bad = found.bad || bad != 0;
    if (!(top > found.value)) continue;  // of equals, the first
    found.value = top;
    int64_t at = 0;
    while (block[at] != top) ++at;
    found.at = start + at;
  }
  return found;
}

// exp(x) for x <= 0 within 2 ulp, in plain operations. Below -87 it is 0. Range reduction after Cody and
// Waite; polynomial from Cephes expf.
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
  const uint32_t scale = (__builtin_bit_cast(uint32_t, shifted) + 127u) << 23;  // 2^n
  const float result = p * __builtin_bit_cast(float, scale);
  return x < -87.0f ? 0.0f : result;
}

void exp_weights(const float* logits, int64_t count, float top, float temperature, float* weights) {
  for (int64_t i = 0; i < count; ++i) weights[i] = exp_nonpositive((logits[i] - top) / temperature);
}

double sum(const float* weights, int64_t count) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += static_cast<double>(weights[i + lane]);
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += static_cast<double>(weights[i]);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

int64_t find_at_least(const float* values, int64_t begin, int64_t count, float limit) {
  constexpr int64_t kStride = 64;
  int64_t i = begin;
  for (; i + kStride <= count; i += kStride) {
    int32_t any = 0;
    for (int64_t lane = 0; lane < kStride; ++lane) any |= static_cast<int32_t>(values[i + lane] >= limit);
    if (any != 0) break;
  }
  while (i < count && !(values[i] >= limit)) ++i;
  return i;
}

// For constinit tables: nothing of these files may run while the program is loaded.
constexpr SamplingLoops make_sampling_loops(const char* isa) {
  return {isa, find_largest, exp_weights, sum, find_at_least};
}

}  // namespace
}  // namespace ew
