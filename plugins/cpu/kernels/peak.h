// How fast this instruction set multiplies, in loops in registers alone, and how fast it reads: no linear can
// be faster than either.
#pragma once

#include "dot.h"
#include "kernels.h"

namespace ew {
namespace {

// Sums in flight: more than an instruction's latency times how many a cycle, and no more than registers.
constexpr int kPeakSums = kRegisters > 8 ? 16 : kRegisters > 4 ? 5 : 2;
constexpr int64_t kLanes = 16;

// So that the loop is neither removed nor worked out ahead.
template <class T>
EW_INLINE void launder(T& value) {
  asm volatile("" : "+m"(value));
}

// So that a product with the same value is worked out each time, and not once for all: without an
// instruction.
#if defined(__x86_64__) || defined(__i386__)
#define EW_IN_REGISTER "+v"
#elif defined(__aarch64__)
#define EW_IN_REGISTER "+w"
#else
#define EW_IN_REGISTER "+m"
#endif
template <class T>
EW_INLINE void renew(T& value) {
  if constexpr (requires { value.even; }) {
    asm("" : EW_IN_REGISTER(value.even), EW_IN_REGISTER(value.odd));
  } else {
    asm("" : EW_IN_REGISTER(value.v));
  }
}
#undef EW_IN_REGISTER

// Each returns how many multiply-adds it did.
inline int64_t peak_int8(int64_t rounds) {
  uint8_t weights[64];
  int8_t four[4] = {1, 2, 3, 4};
  for (int i = 0; i < 64; ++i) weights[i] = static_cast<uint8_t>(i);
  launder(weights), launder(four);
  const Quads w = load_quads(weights);
  Quad x = splat_quad(four);
  I16 sums[kPeakSums];
#pragma GCC unroll 16
  for (int i = 0; i < kPeakSums; ++i) sums[i] = splat_int(i);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kPeakSums; ++i) {
      sums[i] = dot(sums[i], w, x);
      renew(x);
    }
  }
  int32_t sum = 0;
  for (int i = 0; i < kPeakSums; ++i) sum ^= sum_lanes(sums[i]);
  launder(sum);
  return rounds * kPeakSums * kLanes * 4;
}

// The same of floats: product(sum) is a sum with a product of each of its lanes added.
template <class Product>
EW_INLINE int64_t peak_of_floats(int64_t rounds, const Product& product) {
  F16 sums[kPeakSums];
#pragma GCC unroll 16
  for (int i = 0; i < kPeakSums; ++i) {
    F16 start = splat(0.0f);  // equal sums would be worked out once
    launder(start);
    sums[i] = start;
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kPeakSums; ++i) sums[i] = product(sums[i]);
  }
  float sum = 0;
  for (int i = 0; i < kPeakSums; ++i) sum += sum_lanes(sums[i]);
  launder(sum);
  return rounds * kPeakSums * kLanes;
}

inline int64_t peak_bf16(int64_t rounds) {
  uint16_t weights[32], two[2] = {0x3f80, 0};
  for (int i = 0; i < 32; ++i) weights[i] = static_cast<uint16_t>(i << 7);
  launder(weights), launder(two);
  const Pairs w = load_pairs(weights);
  const Pair x = splat_pair(two);
  return 2 * peak_of_floats(rounds, [&](F16 sum) { return dot(sum, w, x); });
}

inline int64_t peak_f32(int64_t rounds) {
  float weights[16], one = 1;
  for (int i = 0; i < 16; ++i) weights[i] = static_cast<float>(i);
  launder(weights), launder(one);
  const F16 w = load(weights), x = splat(one);
  return peak_of_floats(rounds, [&](F16 sum) { return fma(x, w, sum); });
}

// With enough independent sums that the additions don't bound it. What 256 bytes don't divide is left out.
inline uint64_t read_bytes(const void* data, int64_t bytes) {
  constexpr int kSums = 32;
  const uint64_t* at = static_cast<const uint64_t*>(data);
  uint64_t sums[kSums] = {};
  for (int64_t i = 0; i + kSums <= bytes / 8; i += kSums) {
    for (int j = 0; j < kSums; ++j) sums[j] += at[i + j];
  }
  uint64_t sum = 0;
  for (const uint64_t each : sums) sum += each;
  return sum;
}

}  // namespace
}  // namespace ew
