// Products of packed weights, 16 columns at a time, on any processor. This file says what each function of
// the three dot_*.h means.
//
//   int8   64 bytes: column 0 k .. k+3 | column 1 k .. k+3 | ...    value + 128, in bytes without sign
//   bf16   64 bytes: column 0 k, k+1   | column 1 k, k+1   | ...
//
// Activations come as the same 4 bytes (with sign) or the same pair for all columns.
#pragma once

#include "simd.h"

namespace ew {
namespace {

constexpr int kInt8Rows = 1;  // most rows of an int8 microkernel
constexpr int kBf16Rows = 1;  // and of one for bf16
// How many of a panel's 2 vectors of columns one for bf16 goes over at a time.
constexpr int bf16_vectors(int) { return 2; }

typedef uint32_t U4 __attribute__((vector_size(16)));

struct I16 {
  I4 v[4];
};

#define EW_LANES(expression)                                                   \
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) { r.v[i] = expression; } \
  return r

EW_INLINE I16 splat_int(int32_t a) {
  const I4 s = {a, a, a, a};
  return {{s, s, s, s}};
}
EW_INLINE I16 minus_128_times(const int32_t* p) {  // of *p, in all lanes
  return splat_int(static_cast<int32_t>(0u - 128u * static_cast<uint32_t>(*p)));
}
EW_INLINE I16 operator+(I16 a, I16 b) {  // wraps around
  I16 r;
  EW_LANES((I4)((U4)a.v[i] + (U4)b.v[i]));
}
EW_INLINE F16 to_float(I16 a) {
  F16 r;
  EW_LANES(__builtin_convertvector(a.v[i], F4));
}
// The nearest integers, ties to even, of numbers below 2^22.
EW_INLINE I16 nearest_int(F16 a) {
  const F4 magic = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f};
  I16 r;
  EW_LANES((I4)(a.v[i] + magic) - (I4)magic);
}
EW_INLINE int32_t sum_lanes(I16 a) {
  const I4 s = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
// The first n lanes (0 .. 16), each in -128 .. 127, as bytes.
EW_INLINE void store_bytes(int8_t* p, I16 a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<int8_t>(a.v[i / 4][i % 4]);
}

// 16 numbers of format f16. Exact, subnormal numbers included: a product puts the exponent's bias right.
EW_INLINE F16 load_half(const uint16_t* p) {
  typedef uint16_t H4 __attribute__((vector_size(8), aligned(2), may_alias));
  const F4 bias = {0x1p112f, 0x1p112f, 0x1p112f, 0x1p112f};
  F16 r;
  for (int i = 0; i < 4; ++i) {
    const U4 bits = __builtin_convertvector(reinterpret_cast<const H4*>(p)[i], U4), rest = bits & 0x7fffu;
    const U4 special = (U4)(rest >= 0x7c00u);  // infinity and NaN
    const U4 finite = (U4)((F4)(rest << 13) * bias);
    r.v[i] = (F4)((bits & 0x8000u) << 16 | (special & (rest << 13 | 0x7f800000u)) | (~special & finite));
  }
  return r;
}

typedef int16_t S8 __attribute__((vector_size(16)));
typedef uint16_t U8 __attribute__((vector_size(16)));

struct Quads {  // int8 weights
  S8 even[4], odd[4];
};
struct Quad {  // and what they are multiplied with: values k and k+2, k+1 and k+3
  S8 even, odd;
};

EW_INLINE Quads load_quads(const uint8_t* p) {
  Quads r;
  for (int i = 0; i < 4; ++i) {
    U8 bits;
    __builtin_memcpy(&bits, p + i * 16, sizeof bits);
    r.even[i] = (S8)(bits & 0xff);
    r.odd[i] = (S8)(bits >> 8);
  }
  return r;
}
EW_INLINE Quad splat_quad(const int8_t* p) {
  const S8 even = {p[0], p[2], p[0], p[2], p[0], p[2], p[0], p[2]};
  const S8 odd = {p[1], p[3], p[1], p[3], p[1], p[3], p[1], p[3]};
  return {even, odd};
}
// acc + the sum of the 4 products of each column, wrapping as integers of 32 bits do. A product of a byte
// without sign and one with it fits in 16 bits.
EW_INLINE I16 dot(I16 acc, Quads w, Quad x) {
  I16 r;
  for (int i = 0; i < 4; ++i) {
    const I4 even = (I4)(w.even[i] * x.even), odd = (I4)(w.odd[i] * x.odd);
    const I4 sum =
        ((((I4)((U4)even << 16)) >> 16) + (even >> 16)) + ((((I4)((U4)odd << 16)) >> 16) + (odd >> 16));
    r.v[i] = (I4)((U4)acc.v[i] + (U4)sum);
  }
  return r;
}

struct Pairs {  // bf16 weights, as f32: those of k and those of k+1
  F16 first, second;
};
using Pair = Pairs;

EW_INLINE Pairs load_pairs(const uint16_t* p) {
  Pairs r;
  for (int i = 0; i < 4; ++i) {
    I4 bits;
    __builtin_memcpy(&bits, p + i * 8, sizeof bits);
    r.first.v[i] = (F4)((U4)bits << 16);
    r.second.v[i] = (F4)((U4)bits & 0xffff0000u);
  }
  return r;
}
EW_INLINE Pair splat_pair(const uint16_t* p) {
  uint32_t first = static_cast<uint32_t>(p[0]) << 16, second = static_cast<uint32_t>(p[1]) << 16;
  float a, b;
  __builtin_memcpy(&a, &first, sizeof a);
  __builtin_memcpy(&b, &second, sizeof b);
  return {splat(a), splat(b)};
}
// acc + the products of k, then + those of k+1 (dot_avx512.h: with VDPBF16 it is that instruction's sum).
EW_INLINE F16 dot(F16 acc, Pairs w, Pair x) { return fma(x.second, w.second, fma(x.first, w.first, acc)); }

#undef EW_LANES

}  // namespace
}  // namespace ew
