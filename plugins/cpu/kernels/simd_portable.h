// Vectors of 16 floats for any processor: four of the compiler's vectors of 4 (SSE2 on x86-64, NEON on
// arm64).
//
// This file says what each function of the three simd_*.h means. There is no fused multiply-add here, since
// not every processor has one: fma(a, b, c) rounds twice, which is why results differ between instruction
// sets.
#pragma once

#include <cstdint>

#define EW_INLINE inline __attribute__((always_inline))

namespace ew {
namespace {

constexpr int kMaxRows = 1;       // most rows of a microkernel (8 accumulators a row of 16 registers)
constexpr int kRegisters = 4;     // that hold an F16 each
constexpr int kStreamPanels = 1;  // panels that a linear of few rows streams at once

typedef float F4 __attribute__((vector_size(16)));
typedef float F4InMemory __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t I4 __attribute__((vector_size(16)));

struct F16 {
  F4 v[4];
};
struct M16 {  // a mask: each lane is all ones or all zeros
  I4 v[4];
};

#define EW_LANES(expression)                                                   \
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) { r.v[i] = expression; } \
  return r

EW_INLINE F16 splat(float a) {
  const F4 s = {a, a, a, a};
  return {{s, s, s, s}};
}
EW_INLINE F16 load(const float* p) {
  const F4InMemory* from = reinterpret_cast<const F4InMemory*>(p);
  return {{from[0], from[1], from[2], from[3]}};
}
EW_INLINE void store(float* p, F16 a) {
  F4InMemory* to = reinterpret_cast<F4InMemory*>(p);
  to[0] = a.v[0], to[1] = a.v[1], to[2] = a.v[2], to[3] = a.v[3];
}
// Keeps a in registers, where the compiler would rather load it again for every use.
EW_INLINE void keep(F16&) {}

// The first n lanes (0 .. 16); load_n gives zeros in the others, and neither touches memory past p[n - 1].
EW_INLINE F16 load_n(const float* p, int64_t n) {
  float buffer[16] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}
EW_INLINE void store_n(float* p, F16 a, int64_t n) {
  float buffer[16];
  store(buffer, a);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

EW_INLINE F16 operator+(F16 a, F16 b) {
  F16 r;
  EW_LANES(a.v[i] + b.v[i]);
}
EW_INLINE F16 operator-(F16 a, F16 b) {
  F16 r;
  EW_LANES(a.v[i] - b.v[i]);
}
EW_INLINE F16 operator*(F16 a, F16 b) {
  F16 r;
  EW_LANES(a.v[i] * b.v[i]);
}
EW_INLINE F16 operator/(F16 a, F16 b) {
  F16 r;
  EW_LANES(a.v[i] / b.v[i]);
}
EW_INLINE F16 fma(F16 a, F16 b, F16 c) {
  F16 r;
  EW_LANES(a.v[i] * b.v[i] + c.v[i]);
}  // a * b + c
EW_INLINE F16 fnma(F16 a, F16 b, F16 c) {
  F16 r;
  EW_LANES(c.v[i] - a.v[i] * b.v[i]);
}  // c - a * b

EW_INLINE M16 operator<(F16 a, F16 b) {
  M16 r;
  EW_LANES(a.v[i] < b.v[i]);
}
EW_INLINE M16 operator!=(F16 a, F16 b) {
  M16 r;
  EW_LANES(a.v[i] != b.v[i]);
}  // true for NaN
EW_INLINE M16 operator|(M16 a, M16 b) {
  M16 r;
  EW_LANES(a.v[i] | b.v[i]);
}
EW_INLINE F16 select(M16 m, F16 a, F16 b) {  // m ? a : b
  F16 r;
  EW_LANES((F4)(((I4)a.v[i] & m.v[i]) | ((I4)b.v[i] & ~m.v[i])));
}
EW_INLINE M16 lanes_between(int64_t begin, int64_t end) {  // lanes begin .. end-1 of 0 .. 16
  M16 r;
  for (int i = 0; i < 16; ++i) r.v[i / 4][i % 4] = i >= begin && i < end ? -1 : 0;
  return r;
}

EW_INLINE F16 max(F16 a, F16 b) { return select(b < a, a, b); }  // b if either is NaN, as on x86
EW_INLINE F16 min(F16 a, F16 b) { return select(a < b, a, b); }  // b if either is NaN
EW_INLINE F16 sqrt(F16 a) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i / 4][i % 4] = __builtin_sqrtf(a.v[i / 4][i % 4]);
  return r;
}
EW_INLINE F16 abs(F16 a) {
  F16 r;
  EW_LANES((F4)((I4)a.v[i] & 0x7fffffff));
}
EW_INLINE F16 copysign(F16 a, F16 sign) {
  F16 r;
  EW_LANES((F4)(((I4)a.v[i] & 0x7fffffff) | ((I4)sign.v[i] & INT32_MIN)));
}
EW_INLINE F16 pow2(F16 n) {  // 2^n for whole n in -126 .. 127
  F16 r;
  EW_LANES((F4)((__builtin_convertvector(n.v[i], I4) + 127) << 23));
}
EW_INLINE F16 times_pow2(F16 a, F16 n) { return a * pow2(n); }

// Elements at .. at + 3 of 16 rows as four columns.
EW_INLINE void load_columns(const float* const (&rows)[16], int64_t at, F16 (&columns)[4]) {
  for (int c = 0; c < 4; ++c) {
    for (int i = 0; i < 16; ++i) columns[c].v[i / 4][i % 4] = rows[i][at + c];
  }
}

#undef EW_LANES

// Sum and greatest of the lanes, as a fixed tree: lane i with i + 8, then i + 4, i + 2, i + 1.
EW_INLINE float sum_lanes(F16 a) {
  const F4 s = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
EW_INLINE float max_lanes(F16 a) {
  float lane[16];
  store(lane, a);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  }
  return lane[0];
}
// The greatest of each vector's lanes.
EW_INLINE F16 max_lanes(const F16 (&vectors)[16]) {
  float greatest[16];
  for (int i = 0; i < 16; ++i) greatest[i] = max_lanes(vectors[i]);
  return load(greatest);
}

}  // namespace
}  // namespace ew
