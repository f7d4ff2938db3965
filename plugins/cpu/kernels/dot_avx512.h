// Packed products on AVX-512: see dot_portable.h. EW_VNNI and EW_BF16 say that the file is compiled for
// processors with AVX512_VNNI and AVX512_BF16.
#pragma once

#include "simd.h"

namespace ew {
namespace {

// In the compiler's type of 16 integers: of __m512i, 8 longer ones, it keeps needless copies in memory.
struct I16 {
  __v16si v;
};
EW_INLINE I16 lanes(__m512i a) { return {(__v16si)a}; }
EW_INLINE __m512i bits(I16 a) { return (__m512i)a.v; }

EW_INLINE I16 splat_int(int32_t a) { return lanes(_mm512_set1_epi32(a)); }
EW_INLINE I16 minus_128_times(const int32_t* p) {  // loaded by itself: from a scalar register it costs more
  return lanes(_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(_mm512_set1_epi32(*p), 7)));
}
EW_INLINE I16 operator+(I16 a, I16 b) { return lanes(_mm512_add_epi32(bits(a), bits(b))); }
EW_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(bits(a))}; }
EW_INLINE I16 nearest_int(F16 a) { return lanes(_mm512_cvtps_epi32(a.v)); }
EW_INLINE int32_t sum_lanes(I16 a) { return _mm512_reduce_add_epi32(bits(a)); }
EW_INLINE void store_bytes(int8_t* p, I16 a, int64_t n) {
  _mm_mask_storeu_epi8(p, first_lanes(n).v, _mm512_cvtepi32_epi8(bits(a)));
}
EW_INLINE F16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
EW_INLINE __m512i splat_bits(const void* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

#if defined(EW_VNNI)

constexpr int kInt8Rows = 8;  // of 4 .. 12: the least time with groups of 32 and without groups

struct Quads {
  __m512i v;
};
struct Quad {
  __m512i v;
};
EW_INLINE Quads load_quads(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
EW_INLINE Quad splat_quad(const int8_t* p) {
  Quad x = {splat_bits(p)};
  asm("" : "+v"(x.v));  // one load for all columns, not one for each: loads are the bottleneck
  return x;
}
EW_INLINE I16 dot(I16 acc, Quads w, Quad x) { return lanes(_mm512_dpbusd_epi32(bits(acc), w.v, x.v)); }

#else

constexpr int kInt8Rows = 10;  // 10 x 2 integer accumulators, 2 x 2 weights and 2 values

struct Quads {
  __m512i even, odd;  // 16-bit lanes
};
using Quad = Quads;
EW_INLINE Quads load_quads(const uint8_t* p) {
  const __m512i packed = _mm512_loadu_si512(p);
  return {_mm512_and_si512(packed, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(packed, 8)};
}
EW_INLINE Quad splat_quad(const int8_t* p) {
  const __m512i packed = splat_bits(p);
  return {_mm512_srai_epi16(_mm512_slli_epi16(packed, 8), 8), _mm512_srai_epi16(packed, 8)};
}
// maddubs would saturate its sums of 16 bits; madd of widened bytes is exact.
EW_INLINE I16 dot(I16 acc, Quads w, Quad x) {
  return lanes(_mm512_add_epi32(_mm512_add_epi32(bits(acc), _mm512_madd_epi16(w.even, x.even)),
                                _mm512_madd_epi16(w.odd, x.odd)));
}

#endif

constexpr int kBf16Rows = 12;
constexpr int bf16_vectors(int) { return 2; }

#if defined(EW_BF16)

struct Pairs {
  __m512i v;
};
using Pair = Pairs;
EW_INLINE Pairs load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
EW_INLINE Pair splat_pair(const uint16_t* p) {
  Pair x = {splat_bits(p)};
  asm("" : "+v"(x.v));  // as in splat_quad
  return x;
}
EW_INLINE F16 dot(F16 acc, Pairs w, Pair x) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)x.v)};
}

#else

struct Pairs {
  F16 first, second;
};
using Pair = Pairs;
EW_INLINE Pairs widen(__m512i packed) {
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(packed, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(packed, _mm512_set1_epi32(-65536)))}};
}
EW_INLINE Pairs load_pairs(const uint16_t* p) { return widen(_mm512_loadu_si512(p)); }
EW_INLINE Pair splat_pair(const uint16_t* p) { return widen(splat_bits(p)); }
EW_INLINE F16 dot(F16 acc, Pairs w, Pair x) { return fma(x.second, w.second, fma(x.first, w.first, acc)); }

#endif

}  // namespace
}  // namespace ew
