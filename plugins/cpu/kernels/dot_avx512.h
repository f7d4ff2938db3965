// Packed products on AVX-512: see dot_portable.h. EW_VNNI and EW_BF16 say that the file is compiled for
// processors with AVX512_VNNI and AVX512_BF16.
#pragma once

#include "simd.h"
#include "sparse_places.h"

namespace ew {
namespace {

// In the compiler's type of 16 integers: of __m512i, 8 longer ones, it keeps needless copies in memory.
struct I16 {
  __v16si v;
};
EW_INLINE I16 lanes(__m512i a) { return {(__v16si)a}; }
EW_INLINE __m512i bits(I16 a) { return (__m512i)a.v; }

EW_INLINE I16 splat_int(int32_t a) { return lanes(_mm512_set1_epi32(a)); }
template <int Shift>
EW_INLINE I16 minus_shifted(const int32_t* p) {  // loaded by itself: from a scalar register it costs more
  return lanes(_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(_mm512_set1_epi32(*p), Shift)));
}
EW_INLINE I16 operator+(I16 a, I16 b) { return lanes(_mm512_add_epi32(bits(a), bits(b))); }
EW_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(bits(a))}; }
EW_INLINE I16 nearest_int(F16 a) { return lanes(_mm512_cvtps_epi32(a.v)); }
EW_INLINE int32_t sum_lanes(I16 a) { return _mm512_reduce_add_epi32(bits(a)); }
EW_INLINE void sum_lanes(const I16 (&vectors)[16], int32_t (&sums)[16]) {
  __m512 v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = _mm512_castsi512_ps(bits(vectors[i]));
  const auto add = [](__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  };
  _mm512_storeu_ps(sums, reduce_lanes(v, add));
}
EW_INLINE void store_bytes(int8_t* p, I16 a, int64_t n) {
  _mm_mask_storeu_epi8(p, first_lanes(n).v, _mm512_cvtepi32_epi8(bits(a)));
}
EW_INLINE F16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
EW_INLINE F16 load_bytes(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
EW_INLINE __m512i splat_bits(const void* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

struct Nibbles {  // of 4 bits in bytes, or fewer, or more
  __m512i v;
};
struct Bytes {
  __m512i v;
};
EW_INLINE Nibbles low_nibbles(const uint8_t* p) {
  return {_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15))};
}
EW_INLINE Nibbles high_nibbles(const uint8_t* p) {
  return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15))};
}
template <int At>
EW_INLINE Nibbles quarters(const uint8_t* p) {
  return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 2 * At), _mm512_set1_epi8(3))};
}
template <int At, int Mask, int To>
EW_INLINE Nibbles with_plane(Nibbles low, const uint8_t* plane) {
  const __m512i bits = _mm512_loadu_si512(plane);
  const __m512i moved = At < To ? _mm512_slli_epi16(bits, At < To ? To - At : 0)
                                : _mm512_srli_epi16(bits, At < To ? 0 : At - To);
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  return {_mm512_ternarylogic_epi32(low.v, moved, _mm512_set1_epi8(Mask << To), kOrAnd)};
}
EW_INLINE Nibbles load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
EW_INLINE void store_bytes(uint8_t* p, Nibbles a) { _mm512_storeu_si512(p, a.v); }
EW_INLINE Bytes splat_bytes(const int8_t* p) {
  Bytes x = {splat_bits(p)};
  asm("" : "+v"(x.v));  // one load for all columns, not one for each: loads are the bottleneck
  return x;
}

EW_INLINE I16 load_places(const uint8_t* p) { return lanes(_mm512_loadu_si512(p)); }
template <int Bits>
EW_INLINE I16 shift(I16 a) {
  return lanes(_mm512_srli_epi32(bits(a), Bits));
}

EW_INLINE I16 to_index(I16 places) { return places; }  // a permutation of 16 lanes takes all 4 bits

struct Spread {
  __m512i v;
};
// 4 bytes of each column out of the 3 lowest of its lane: the kept ones and that of zero.
EW_INLINE Spread spread(__m512i kept, I16 places) {
  const __m512i column = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kColumn)));
  const __m512i from = _mm512_permutexvar_epi32(bits(places), _mm512_load_si512(kSpread.of));  // their 4 bits
  return {_mm512_shuffle_epi8(kept, _mm512_or_si512(from, column))};
}
EW_INLINE __m512i load_kept(const uint8_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
EW_INLINE Spread spread_bytes(const uint8_t* values, I16 places) {
  return spread(_mm512_or_si512(load_kept(values), _mm512_set1_epi32(128 << 16)), places);
}
EW_INLINE __m512i halves(__m512i kept) {
  const __m512i low = _mm512_and_si512(kept, _mm512_set1_epi32(0x0f0f));
  return _mm512_or_si512(low, _mm512_set1_epi32(8 << 16));
}
EW_INLINE Spread spread_low(const uint8_t* values, I16 places) {
  return spread(halves(load_kept(values)), places);
}
EW_INLINE Spread spread_high(const uint8_t* values, I16 places) {
  return spread(halves(_mm512_srli_epi32(load_kept(values), 4)), places);
}
template <bool High>
EW_INLINE Spread look_up_halves(const uint8_t* p, const uint8_t* table) {
  const __m512i codes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_shuffle_epi8(codes, (High ? high_nibbles(p) : low_nibbles(p)).v)};
}
EW_INLINE void store_spread(uint8_t* p, Spread a) { _mm512_storeu_si512(p, a.v); }
// As low_nibbles and high_nibbles take them apart.
EW_INLINE void store_nibbles(uint8_t* p, Spread low, Spread high) {
  _mm512_storeu_si512(p, _mm512_or_si512(low.v, _mm512_slli_epi16(high.v, 4)));
}
EW_INLINE Spread load_spread(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
EW_INLINE Nibbles nibbles_of(Spread a) { return {a.v}; }

EW_INLINE F16 choose(const float* x, I16 places) {
  return {_mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(x)), bits(places))};
}

struct PairPlaces {
  __m512i v;
};
EW_INLINE PairPlaces pair_places(I16 places) {
  return {_mm512_permutexvar_epi32(bits(places), _mm512_load_si512(kChosen.of))};
}
EW_INLINE __m512i chosen_bits(const uint16_t* x, PairPlaces places) {
  int64_t four;
  __builtin_memcpy(&four, x, sizeof four);
  return _mm512_shuffle_epi8(_mm512_set1_epi64(four), places.v);
}

#if defined(EW_VNNI)

constexpr int kInt4Rows = 6;                       // of 4 .. 10: the least time with offsets and without
constexpr int kInt4Alone = 8;                      // rows in one block, if they are all
constexpr int kSparseInt4Rows = 10;                // of 6 .. 12
constexpr int64_t kSparseInt4Most = 20;            // of 16 .. 48: beyond, a dense panel is made sooner
constexpr int64_t kNibbleDots = int64_t{1} << 40;  // sums have 32 bits at once

using ShortSum = I16;
EW_INLINE ShortSum begin_dots(I16 sum) { return sum; }
EW_INLINE ShortSum dot(ShortSum acc, Nibbles w, Bytes x) {
  return lanes(_mm512_dpbusd_epi32(bits(acc), w.v, x.v));
}
EW_INLINE ShortSum first_dot(ShortSum acc, Nibbles w, Bytes x) { return dot(acc, w, x); }
EW_INLINE I16 end_dots(I16, ShortSum dots) { return dots; }

constexpr int kManyRows = 6;  // of 4, 5, 6 and 8
constexpr int kInt8Rows = 8;  // of 4 .. 12: the least time with groups of 32 and without groups

struct Quads {
  __m512i v;
};
struct Quad {
  __m512i v;
};
EW_INLINE Quads load_quads(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
EW_INLINE Quads quads_of(Spread a) { return {a.v}; }
EW_INLINE Quad splat_quad(const int8_t* p) {
  Quad x = {splat_bits(p)};
  asm("" : "+v"(x.v));  // one load for all columns, not one for each: loads are the bottleneck
  return x;
}
EW_INLINE I16 begin_int8(const int32_t* sum) { return minus_shifted<7>(sum); }
EW_INLINE I16 dot(I16 acc, Quads w, Quad x) { return lanes(_mm512_dpbusd_epi32(bits(acc), w.v, x.v)); }

#else

constexpr int kInt4Rows = 6;            // of 4 .. 8
constexpr int kInt4Alone = kInt4Rows;   // rows in one block, if they are all
constexpr int kSparseInt4Rows = 8;      // of 6 .. 10
constexpr int64_t kSparseInt4Most = 8;  // of 8 .. 16
constexpr int64_t kNibbleDots = 8;

struct ShortSum {
  __v32hi v;  // 16-bit lanes
};
EW_INLINE ShortSum begin_dots(I16) { return {__v32hi{}}; }
// maddubs can't saturate here: two products of 15 * 128 at most. kNibbleDots of its results have room too.
EW_INLINE ShortSum dot(ShortSum acc, Nibbles w, Bytes x) {
  acc.v += (__v32hi)_mm512_maddubs_epi16(w.v, x.v);
  asm volatile("" : "+v"(acc.v));  // now: many products at once would not fit in registers
  return acc;
}
EW_INLINE ShortSum first_dot(ShortSum, Nibbles w, Bytes x) {
  ShortSum acc = {(__v32hi)_mm512_maddubs_epi16(w.v, x.v)};
  asm volatile("" : "+v"(acc.v));
  return acc;
}
EW_INLINE I16 end_dots(I16 sum, ShortSum dots) {
  const __m512i pairs = _mm512_madd_epi16((__m512i)dots.v, _mm512_set1_epi16(1));
  return lanes(_mm512_add_epi32(bits(sum), pairs));
}

#define EW_SHORT_SUMS  // linear_short.h
constexpr int kShortRows = 8, kShortVectors = 2;
// Two lanes of 16 bits for each of 16 columns, which begin at the halves of *start, or at 0.
EW_INLINE ShortSum begin_short(const int32_t* start) {
  return {start == nullptr ? __v32hi{} : (__v32hi)_mm512_set1_epi32(*start)};
}
EW_INLINE I16 pairs_of(ShortSum dots) {
  return lanes(_mm512_madd_epi16((__m512i)dots.v, _mm512_set1_epi16(1)));
}

constexpr int kManyRows = 0;
constexpr int kInt8Rows = 10;  // 10 x 2 integer accumulators, 2 x 2 weights and 2 values

struct Quads {
  __m512i even, odd;  // 16-bit lanes
};
using Quad = Quads;
EW_INLINE Quads quads_of(Spread a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(a.v, 8)};
}
EW_INLINE Quads load_quads(const uint8_t* p) { return quads_of(load_spread(p)); }
EW_INLINE Quad splat_quad(const int8_t* p) {
  const __m512i packed = splat_bits(p);
  return {_mm512_srai_epi16(_mm512_slli_epi16(packed, 8), 8), _mm512_srai_epi16(packed, 8)};
}
EW_INLINE I16 begin_int8(const int32_t* sum) { return minus_shifted<7>(sum); }
// maddubs would saturate its sums of 16 bits; madd of widened bytes is exact.
EW_INLINE I16 dot(I16 acc, Quads w, Quad x) {
  return lanes(_mm512_add_epi32(_mm512_add_epi32(bits(acc), _mm512_madd_epi16(w.even, x.even)),
                                _mm512_madd_epi16(w.odd, x.odd)));
}

#endif

constexpr int kBf16Rows = 12;
constexpr int kTileBlocks = 4;
constexpr int int8_vectors(int) { return 2; }
constexpr int int4_vectors(int) { return 2; }
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
EW_INLINE Pairs choose_pairs(const uint16_t* x, PairPlaces places) { return {chosen_bits(x, places)}; }
// What attention needs of pairs: the first n, with zeros behind them; those of which one element is left.
EW_INLINE Pairs load_pairs_n(const uint16_t* p, int64_t n) {
  return {_mm512_maskz_loadu_epi32(first_lanes(n).v, p)};
}
EW_INLINE Pairs one_of_pairs(Pairs a, bool second) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi32(second ? -65536 : 65535))};
}
// 32 neighbours to bf16, to the nearest, ties to even (numbers below 2^-126 to zero).
EW_INLINE void store_pairs(uint16_t* p, F16 low, F16 high) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
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
EW_INLINE Pairs choose_pairs(const uint16_t* x, PairPlaces places) { return widen(chosen_bits(x, places)); }

#endif

}  // namespace
}  // namespace ew
