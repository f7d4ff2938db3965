// Products of packed weights, 16 columns at a time, on any processor. This file says what each function of
// the three dot_*.h means.
//
//   int8   64 bytes: column 0 k .. k+3 | column 1 k .. k+3 | ...    value + 128, in bytes without sign
//   int4   64 bytes: column 0 k .. k+3 in the bytes' low halves, k+4 .. k+7 in their high ones | column 1 ...
//   bf16   64 bytes: column 0 k, k+1   | column 1 k, k+1   | ...
//
// Activations come as the same 4 bytes (with sign) or the same pair for all columns.
//
// Of weights of which two of every four k are kept (linear_sparse.h), a column's places are a lane of 32
// bits, those of the quad at hand the lowest 4. Integers are spread to the 4 bytes of the above, and meet
// activations as those do; of floats it is the activations that are chosen, column by column.
#pragma once

#include "simd.h"
#include "sparse_places.h"

namespace ew {
namespace {

constexpr int kInt8Rows = 1;           // most rows of an int8 microkernel
constexpr int kManyRows = 0;           // most rows of a block in linear_many.h; 0: none are
constexpr int kTileBlocks = 4;         // most blocks of such rows that share a tile along K; 1: none do
constexpr int kInt4Rows = 1;           // of one for int4
constexpr int kInt4Alone = kInt4Rows;  // rows in one block, if they are all
// Of one for int4 in sparse32 that is spread in registers, and most rows that it is spread anew for.
constexpr int kSparseInt4Rows = 1;
constexpr int64_t kSparseInt4Most = 1;
constexpr int kBf16Rows = 1;  // and of one for bf16
// How many of a panel's 2 vectors of columns a microkernel of so many rows goes over at a time.
constexpr int int8_vectors(int) { return 2; }
constexpr int int4_vectors(int) { return 2; }
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
template <int Shift>
EW_INLINE I16 minus_shifted(const int32_t* p) {  // -2^Shift times *p, in all lanes
  return splat_int(static_cast<int32_t>(0u - (static_cast<uint32_t>(*p) << Shift)));
}
EW_INLINE F16 load_bytes(const int8_t* p) {
  F16 r;
  EW_LANES((F4{static_cast<float>(p[4 * i]), static_cast<float>(p[4 * i + 1]),
               static_cast<float>(p[4 * i + 2]), static_cast<float>(p[4 * i + 3])}));
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
// The sum of each vector's lanes.
EW_INLINE void sum_lanes(const I16 (&vectors)[16], int32_t (&sums)[16]) {
  for (int i = 0; i < 16; ++i) sums[i] = sum_lanes(vectors[i]);
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
// What a group's sum of products begins with. Where dot() takes weights as they are stored it is -128 times
// the sum of the group's values, else 0.
EW_INLINE I16 begin_int8(const int32_t* sum) { return minus_shifted<7>(sum); }
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

// Products of 4 bits need no more than 16 for a while: one is at most 15 * 128 in magnitude, a lane takes two
// of them in each dot, and after kNibbleDots of these it is at most 8 * 2 * 15 * 128 = 30720, below 2^15.
// With 5 bits it is half as many, with 6 a quarter, with 3 twice as many, with 2 four times.
constexpr int64_t kNibbleDots = 8;

struct Nibbles {  // 4 values of each column: halves of 64 bytes, 0 .. 15, or of fewer bits, or more
  S8 even[4], odd[4];
};
using Bytes = Quad;  // and what they are multiplied with
struct ShortSum {
  S8 v[4];
};

EW_INLINE Nibbles low_nibbles(const uint8_t* p) {
  Nibbles r;
  for (int i = 0; i < 4; ++i) {
    U8 bits;
    __builtin_memcpy(&bits, p + i * 16, sizeof bits);
    r.even[i] = (S8)(bits & 0xf);
    r.odd[i] = (S8)(bits >> 8 & 0xf);
  }
  return r;
}
EW_INLINE Nibbles high_nibbles(const uint8_t* p) {
  Nibbles r;
  for (int i = 0; i < 4; ++i) {
    U8 bits;
    __builtin_memcpy(&bits, p + i * 16, sizeof bits);
    r.even[i] = (S8)(bits >> 4 & 0xf);
    r.odd[i] = (S8)(bits >> 12);
  }
  return r;
}
// Two bits of each byte of 64: those at place 2 * `At`.
template <int At>
EW_INLINE Nibbles quarters(const uint8_t* p) {
  constexpr uint16_t kAt = 2 * At;
  Nibbles r;
  for (int i = 0; i < 4; ++i) {
    U8 bits;
    __builtin_memcpy(&bits, p + i * 16, sizeof bits);
    r.even[i] = (S8)(bits >> kAt & 3);
    r.odd[i] = (S8)(bits >> (8 + kAt) & 3);
  }
  return r;
}
// With bits from `To` on: those at place `At` of each byte of 64, of which `Mask` says how many.
template <int At, int Mask, int To>
EW_INLINE Nibbles with_plane(Nibbles low, const uint8_t* plane) {
  constexpr uint16_t kAt = At, kMask = Mask;
  for (int i = 0; i < 4; ++i) {
    U8 bits;
    __builtin_memcpy(&bits, plane + i * 16, sizeof bits);
    low.even[i] |= (S8)((bits >> kAt & kMask) << To);
    low.odd[i] |= (S8)((bits >> (8 + kAt) & kMask) << To);
  }
  return low;
}
// A byte of each.
EW_INLINE Nibbles load_bytes(const uint8_t* p) {
  const Quads quads = load_quads(p);
  Nibbles r;
  for (int i = 0; i < 4; ++i) r.even[i] = quads.even[i], r.odd[i] = quads.odd[i];
  return r;
}
EW_INLINE void store_bytes(uint8_t* p, const Nibbles& a) {
  for (int i = 0; i < 4; ++i) {
    const U8 bytes = (U8)a.even[i] | (U8)a.odd[i] << 8;
    __builtin_memcpy(p + i * 16, &bytes, sizeof bytes);
  }
}
EW_INLINE Bytes splat_bytes(const int8_t* p) { return splat_quad(p); }
// A sum of at most kNibbleDots dots that goes on from `sum`, and `sum` with what it came to. The first of
// them needs no sum to be added to, where that begins at zero.
EW_INLINE ShortSum begin_dots(I16) { return {}; }
EW_INLINE ShortSum dot(ShortSum acc, Nibbles w, Bytes x) {
  for (int i = 0; i < 4; ++i) acc.v[i] += w.even[i] * x.even + w.odd[i] * x.odd;
  return acc;
}
EW_INLINE ShortSum first_dot(ShortSum acc, Nibbles w, Bytes x) { return dot(acc, w, x); }
EW_INLINE I16 end_dots(I16 sum, ShortSum dots) {
  I16 r;
  EW_LANES(sum.v[i] + ((((I4)((U4)dots.v[i] << 16)) >> 16) + ((I4)dots.v[i] >> 16)));
}

EW_INLINE I16 load_places(const uint8_t* p) {
  I16 r;
  __builtin_memcpy(r.v, p, sizeof r.v);
  return r;
}
template <int Bits>
EW_INLINE I16 shift(I16 a) {  // to the right, zeros coming in
  I16 r;
  EW_LANES((I4)((U4)a.v[i] >> Bits));
}

// The lowest 4 bits of each lane as the functions below look them up, which the instruction sets do in ways
// of their own.
EW_INLINE I16 to_index(I16 places) { return places; }

struct Spread {  // 4 bytes of each column; what is not kept is the byte that stands for zero
  alignas(16) uint8_t bytes[64];
};
// Of 2 bytes of each column, or of their low or high halves.
template <int Shift, int Mask>
EW_INLINE Spread spread(const uint8_t* values, I16 places, uint8_t zero) {
  Spread r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t from = kSpread.of[places.v[i / 4][i % 4] & 15];
    const uint8_t kept[3] = {static_cast<uint8_t>(values[2 * i] >> Shift & Mask),
                             static_cast<uint8_t>(values[2 * i + 1] >> Shift & Mask), zero};
    for (int k = 0; k < 4; ++k) r.bytes[4 * i + k] = kept[from >> (8 * k) & 3];
  }
  return r;
}
EW_INLINE Spread spread_bytes(const uint8_t* values, I16 places) {
  return spread<0, 255>(values, places, 128);
}
EW_INLINE Spread spread_low(const uint8_t* values, I16 places) { return spread<0, 15>(values, places, 8); }
EW_INLINE Spread spread_high(const uint8_t* values, I16 places) { return spread<4, 15>(values, places, 8); }
// What the low, or high, halves of 64 bytes stand for: bytes of a table of 16.
template <bool High>
EW_INLINE Spread look_up_halves(const uint8_t* p, const uint8_t* table) {
  Spread r;
  for (int i = 0; i < 64; ++i) r.bytes[i] = table[High ? p[i] >> 4 : p[i] & 15];
  return r;
}
EW_INLINE void store_spread(uint8_t* p, const Spread& a) { __builtin_memcpy(p, a.bytes, sizeof a.bytes); }
// The reverse of low_nibbles and high_nibbles.
EW_INLINE void store_nibbles(uint8_t* p, const Spread& low, const Spread& high) {
  for (int i = 0; i < 64; ++i) p[i] = static_cast<uint8_t>(low.bytes[i] | high.bytes[i] << 4);
}
EW_INLINE Quads quads_of(const Spread& a) { return load_quads(a.bytes); }
EW_INLINE Nibbles nibbles_of(const Spread& a) { return load_bytes(a.bytes); }

// Of 4 values of a row each column's, at the place that the lowest 2 bits of its lane give.
EW_INLINE F16 choose(const float* x, I16 places) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i / 4][i % 4] = x[places.v[i / 4][i % 4] & 3];
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

using PairPlaces = I16;
EW_INLINE PairPlaces pair_places(I16 places) { return places; }
// Of 4 values of a row each column's two.
EW_INLINE Pairs choose_pairs(const uint16_t* x, PairPlaces places) {
  float wide[4];
  for (int k = 0; k < 4; ++k) {
    const uint32_t bits = static_cast<uint32_t>(x[k]) << 16;
    __builtin_memcpy(wide + k, &bits, sizeof bits);
  }
  return {choose(wide, places), choose(wide, shift<2>(places))};
}

#undef EW_LANES

}  // namespace
}  // namespace ew
