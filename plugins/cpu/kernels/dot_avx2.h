// Packed products on AVX2: see dot_portable.h. EW_VNNI says that the file is compiled for processors with
// AVX-VNNI, the form of VNNI without AVX-512.
#pragma once

#include "simd.h"
#include "sparse_places.h"

namespace ew {
namespace {

// In the compiler's type of 8 integers: of __m256i, 4 longer ones, it keeps needless copies in memory.
struct I16 {
  __v8si lo, hi;
};
EW_INLINE I16 lanes(__m256i lo, __m256i hi) { return {(__v8si)lo, (__v8si)hi}; }
EW_INLINE __m256i low(I16 a) { return (__m256i)a.lo; }
EW_INLINE __m256i high(I16 a) { return (__m256i)a.hi; }

EW_INLINE I16 splat_int(int32_t a) { return lanes(_mm256_set1_epi32(a), _mm256_set1_epi32(a)); }
template <int Shift>
EW_INLINE I16 minus_shifted(const int32_t* p) {
  const __m256i a = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(_mm256_set1_epi32(*p), Shift));
  return lanes(a, a);
}
EW_INLINE I16 operator+(I16 a, I16 b) {
  return lanes(_mm256_add_epi32(low(a), low(b)), _mm256_add_epi32(high(a), high(b)));
}
EW_INLINE F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(low(a)), _mm256_cvtepi32_ps(high(a))}; }
EW_INLINE I16 nearest_int(F16 a) { return lanes(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)); }
EW_INLINE int32_t sum_lanes(I16 a) {
  const __m256i half = _mm256_add_epi32(low(a), high(a));
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
  return _mm_cvtsi128_si32(s) + _mm_extract_epi32(s, 1);
}
EW_INLINE void sum_lanes(const I16 (&vectors)[16], int32_t (&sums)[16]) {
  for (int i = 0; i < 16; ++i) sums[i] = sum_lanes(vectors[i]);
}
EW_INLINE void store_bytes(int8_t* p, I16 a, int64_t n) {
  const __m256i words =
      _mm256_permute4x64_epi64(_mm256_packs_epi32(low(a), high(a)), 0xd8);  // in order again
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  if (n >= 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  } else {
    __builtin_memcpy(p, &bytes, static_cast<size_t>(n));
  }
}
EW_INLINE F16 load_half(const uint16_t* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
EW_INLINE F16 load_bytes(const int8_t* p) {
  const __m128i* from = reinterpret_cast<const __m128i*>(p);
  const __m128i* next = reinterpret_cast<const __m128i*>(p + 8);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(next)))};
}
EW_INLINE __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
EW_INLINE __m256i splat_bits(const void* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return _mm256_set1_epi32(bits);
}

struct Nibbles {  // of 4 bits in bytes, or fewer, or more
  __m256i lo, hi;
};
struct Bytes {
  __m256i v;
};
EW_INLINE __m256i low_halves(__m256i packed) { return _mm256_and_si256(packed, _mm256_set1_epi8(15)); }
EW_INLINE Nibbles low_nibbles(const uint8_t* p) {
  return {low_halves(load_bits(p)), low_halves(load_bits(p + 32))};
}
EW_INLINE Nibbles high_nibbles(const uint8_t* p) {
  return {low_halves(_mm256_srli_epi16(load_bits(p), 4)),
          low_halves(_mm256_srli_epi16(load_bits(p + 32), 4))};
}
template <int At, int Mask, int To>
EW_INLINE __m256i plane_bits(const uint8_t* plane) {
  const __m256i bits = load_bits(plane);
  const __m256i moved = At < To ? _mm256_slli_epi16(bits, At < To ? To - At : 0)
                                : _mm256_srli_epi16(bits, At < To ? 0 : At - To);
  return _mm256_and_si256(moved, _mm256_set1_epi8(Mask << To));
}
template <int At>
EW_INLINE Nibbles quarters(const uint8_t* p) {
  return {plane_bits<2 * At, 3, 0>(p), plane_bits<2 * At, 3, 0>(p + 32)};
}
template <int At, int Mask, int To>
EW_INLINE Nibbles with_plane(Nibbles low, const uint8_t* plane) {
  return {_mm256_or_si256(low.lo, plane_bits<At, Mask, To>(plane)),
          _mm256_or_si256(low.hi, plane_bits<At, Mask, To>(plane + 32))};
}
EW_INLINE Nibbles load_bytes(const uint8_t* p) { return {load_bits(p), load_bits(p + 32)}; }
EW_INLINE void store_bytes(uint8_t* p, Nibbles a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
EW_INLINE Bytes splat_bytes(const int8_t* p) { return {splat_bits(p)}; }

EW_INLINE I16 load_places(const uint8_t* p) { return lanes(load_bits(p), load_bits(p + 32)); }
template <int Bits>
EW_INLINE I16 shift(I16 a) {
  return lanes(_mm256_srli_epi32(low(a), Bits), _mm256_srli_epi32(high(a), Bits));
}
// A permutation of 8 lanes takes 3 bits. Of two places, the second behind the first, these are the low ones
// of their Gray code; of all quads at once.
EW_INLINE I16 to_index(I16 places) {
  const I16 next = shift<1>(places);
  return lanes(_mm256_xor_si256(low(places), low(next)), _mm256_xor_si256(high(places), high(next)));
}
EW_INLINE __m256i look_up(const PlaceTable& table, __m256i index) {
  return _mm256_permutevar8x32_epi32(load_bits(table.of), index);
}

struct Spread {
  __m256i lo, hi;
};
// 4 bytes of each of 8 columns out of the 3 lowest of its lane: the kept ones and that of zero.
EW_INLINE __m256i spread_8(__m256i kept, __m256i places) {
  const __m256i column =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kColumn)));
  return _mm256_shuffle_epi8(kept, _mm256_or_si256(look_up(kSpreadOfIndex, places), column));
}
EW_INLINE __m256i load_kept(const uint8_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
EW_INLINE __m256i with_zero(__m256i kept, int zero) {
  return _mm256_or_si256(kept, _mm256_set1_epi32(zero << 16));
}
EW_INLINE Spread spread_bytes(const uint8_t* values, I16 places) {
  return {spread_8(with_zero(load_kept(values), 128), low(places)),
          spread_8(with_zero(load_kept(values + 16), 128), high(places))};
}
EW_INLINE Spread spread_low(const uint8_t* values, I16 places) {
  return {spread_8(with_zero(low_halves(load_kept(values)), 8), low(places)),
          spread_8(with_zero(low_halves(load_kept(values + 16)), 8), high(places))};
}
EW_INLINE Spread spread_high(const uint8_t* values, I16 places) {
  const __m256i lo = _mm256_srli_epi32(load_kept(values), 4),
                hi = _mm256_srli_epi32(load_kept(values + 16), 4);
  return {spread_8(with_zero(low_halves(lo), 8), low(places)),
          spread_8(with_zero(low_halves(hi), 8), high(places))};
}
template <bool High>
EW_INLINE Spread look_up_halves(const uint8_t* p, const uint8_t* table) {
  const __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  const Nibbles places = High ? high_nibbles(p) : low_nibbles(p);
  return {_mm256_shuffle_epi8(codes, places.lo), _mm256_shuffle_epi8(codes, places.hi)};
}
EW_INLINE void store_spread(uint8_t* p, Spread a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
EW_INLINE void store_nibbles(uint8_t* p, Spread low, Spread high) {
  store_spread(p, {_mm256_or_si256(low.lo, _mm256_slli_epi16(high.lo, 4)),
                   _mm256_or_si256(low.hi, _mm256_slli_epi16(high.hi, 4))});
}
EW_INLINE Spread load_spread(const uint8_t* p) { return {load_bits(p), load_bits(p + 32)}; }
EW_INLINE Nibbles nibbles_of(Spread a) { return {a.lo, a.hi}; }

EW_INLINE F16 choose(const float* x, I16 places) {
  const __m256 four = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x));
  return {_mm256_permutevar_ps(four, low(places)), _mm256_permutevar_ps(four, high(places))};
}

#if defined(EW_VNNI)

constexpr int kInt4Rows = 2;                       // of 2 .. 4 the least time
constexpr int kInt4Alone = kInt4Rows;              // rows in one block, if they are all
constexpr int kSparseInt4Rows = 3;                 // of 2 .. 5
constexpr int64_t kSparseInt4Most = 3;             // beyond, a dense panel is made sooner
constexpr int64_t kNibbleDots = int64_t{1} << 40;  // sums have 32 bits at once

using ShortSum = I16;
EW_INLINE ShortSum begin_dots(I16 sum) { return sum; }
EW_INLINE ShortSum dot(ShortSum acc, Nibbles w, Bytes x) {
  return lanes(_mm256_dpbusd_avx_epi32(low(acc), w.lo, x.v), _mm256_dpbusd_avx_epi32(high(acc), w.hi, x.v));
}
EW_INLINE ShortSum first_dot(ShortSum acc, Nibbles w, Bytes x) { return dot(acc, w, x); }
EW_INLINE I16 end_dots(I16, ShortSum dots) { return dots; }

constexpr int int4_vectors(int) { return 2; }

constexpr int kInt8Rows = 3;  // 3 x 4 integer accumulators, a weight and 3 values of 16 registers
constexpr int kManyRows = 3;
constexpr int kTileBlocks = 4;
constexpr int int8_vectors(int) { return 2; }

struct Quads {
  __m256i lo, hi;
};
struct Quad {
  __m256i v;
};
EW_INLINE Quads load_quads(const uint8_t* p) { return {load_bits(p), load_bits(p + 32)}; }
EW_INLINE Quads quads_of(Spread a) { return {a.lo, a.hi}; }
EW_INLINE Quad splat_quad(const int8_t* p) { return {splat_bits(p)}; }
EW_INLINE I16 begin_int8(const int32_t* sum) { return minus_shifted<7>(sum); }
EW_INLINE I16 dot(I16 acc, Quads w, Quad x) {
  return lanes(_mm256_dpbusd_avx_epi32(low(acc), w.lo, x.v), _mm256_dpbusd_avx_epi32(high(acc), w.hi, x.v));
}

#else

// 6 accumulators of 16 columns, and more registers for what they meet: of 2 .. 6 the least time.
constexpr int kInt4Rows = 6;
constexpr int kInt4Alone = kInt4Rows;  // rows in one block, if they are all
constexpr int kSparseInt4Rows = 4;     // of 2 .. 4
constexpr int64_t kSparseInt4Most = 4;
constexpr int64_t kNibbleDots = 8;
constexpr int int4_vectors(int rows) { return rows > 2 ? 1 : 2; }

struct ShortSum {  // 16-bit lanes
  __v16hi lo, hi;
};
EW_INLINE ShortSum begin_dots(I16) { return {__v16hi{}, __v16hi{}}; }
// maddubs can't saturate here: two products of 15 * 128 at most. kNibbleDots of its results have room too.
EW_INLINE ShortSum dot(ShortSum acc, Nibbles w, Bytes x) {
  acc.lo += (__v16hi)_mm256_maddubs_epi16(w.lo, x.v);
  acc.hi += (__v16hi)_mm256_maddubs_epi16(w.hi, x.v);
  asm volatile("" : "+x"(acc.lo), "+x"(acc.hi));  // now: many products at once would not fit in registers
  return acc;
}
EW_INLINE ShortSum first_dot(ShortSum, Nibbles w, Bytes x) {
  ShortSum acc = {(__v16hi)_mm256_maddubs_epi16(w.lo, x.v), (__v16hi)_mm256_maddubs_epi16(w.hi, x.v)};
  asm volatile("" : "+x"(acc.lo), "+x"(acc.hi));
  return acc;
}
EW_INLINE I16 end_dots(I16 sum, ShortSum dots) {
  const __m256i ones = _mm256_set1_epi16(1);
  return lanes(_mm256_add_epi32(low(sum), _mm256_madd_epi16((__m256i)dots.lo, ones)),
               _mm256_add_epi32(high(sum), _mm256_madd_epi16((__m256i)dots.hi, ones)));
}

#define EW_SHORT_SUMS  // linear_short.h
// 6 rows of 16 columns: 12 sums, 2 weights, a value and a product of 16 registers.
constexpr int kShortRows = 6, kShortVectors = 1;
// Two lanes of 16 bits for each of 16 columns, which begin at the halves of *start, or at 0.
EW_INLINE ShortSum begin_short(const int32_t* start) {
  const __m256i both = start == nullptr ? _mm256_setzero_si256() : _mm256_set1_epi32(*start);
  return {(__v16hi)both, (__v16hi)both};
}
EW_INLINE I16 pairs_of(ShortSum dots) {
  const __m256i ones = _mm256_set1_epi16(1);
  return lanes(_mm256_madd_epi16((__m256i)dots.lo, ones), _mm256_madd_epi16((__m256i)dots.hi, ones));
}

// 6 accumulators of 16 columns, 2 weights and their magnitudes; of 2 .. 6 the least time.
constexpr int kInt8Rows = 6;
constexpr int kManyRows = 0;
constexpr int kTileBlocks = 1;  // products take longer than reading weights
constexpr int int8_vectors(int rows) { return rows > 2 ? 1 : 2; }

struct Quads {  // with their sign, and without
  __m256i lo, hi, size_lo, size_hi;
};
struct Quad {
  __m256i v;
};
EW_INLINE Quads quads_of(Spread a) {
  const __m256i sign = _mm256_set1_epi8(-128);
  const __m256i lo = _mm256_xor_si256(a.lo, sign), hi = _mm256_xor_si256(a.hi, sign);
  return {lo, hi, _mm256_abs_epi8(lo), _mm256_abs_epi8(hi)};
}
EW_INLINE Quads load_quads(const uint8_t* p) { return quads_of(load_spread(p)); }
EW_INLINE Quad splat_quad(const int8_t* p) { return {splat_bits(p)}; }
EW_INLINE I16 begin_int8(const int32_t*) { return splat_int(0); }
// maddubs of a weight and a value would saturate, and madd needs both in 16 bits. But with the weight's sign
// at the value, two products are 2 * 128 * 127 at most, since values are above -128. A weight may be -128.
EW_INLINE __m256i dot(__m256i w, __m256i size, __m256i x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
}
EW_INLINE I16 dot(I16 acc, Quads w, Quad x) {
  acc.lo += (__v8si)dot(w.lo, w.size_lo, x.v);
  acc.hi += (__v8si)dot(w.hi, w.size_hi, x.v);
  asm volatile("" : "+x"(acc.lo), "+x"(acc.hi));  // as above
  return acc;
}

#endif

// 4 x 2 accumulators, 4 weights, 2 values and a mask. With more accumulators GCC 12 keeps some in memory,
// whose way there and back is then the bottleneck; one row alone needs as many as there can be.
constexpr int kBf16Rows = 4;
constexpr int bf16_vectors(int rows) { return rows > 2 ? 1 : 2; }

struct Pairs {
  F16 first, second;
};
struct Pair {
  __m256 first, second;
};
EW_INLINE __m256 first_of(__m256i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)); }
EW_INLINE __m256 second_of(__m256i bits) {
  return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)));
}
EW_INLINE Pairs load_pairs(const uint16_t* p) {
  const __m256i lo = load_bits(p), hi = load_bits(p + 16);
  return {{first_of(lo), first_of(hi)}, {second_of(lo), second_of(hi)}};
}
EW_INLINE Pair splat_pair(const uint16_t* p) {
  const __m256i bits = splat_bits(p);
  return {first_of(bits), second_of(bits)};
}
EW_INLINE F16 dot(F16 acc, Pairs w, Pair x) {
  acc = fma({x.first, x.first}, w.first, acc);
  return fma({x.second, x.second}, w.second, acc);
}

struct PairPlaces {
  __m256i lo, hi;
};
EW_INLINE PairPlaces pair_places(I16 places) {
  return {look_up(kChosenOfIndex, low(places)), look_up(kChosenOfIndex, high(places))};
}
EW_INLINE Pairs choose_pairs(const uint16_t* x, PairPlaces places) {
  int64_t bits;
  __builtin_memcpy(&bits, x, sizeof bits);
  const __m256i four = _mm256_set1_epi64x(bits);
  const __m256i lo = _mm256_shuffle_epi8(four, places.lo), hi = _mm256_shuffle_epi8(four, places.hi);
  return {{first_of(lo), first_of(hi)}, {second_of(lo), second_of(hi)}};
}
EW_INLINE F16 dot(F16 acc, Pairs w, Pairs x) { return fma(x.second, w.second, fma(x.first, w.first, acc)); }

}  // namespace
}  // namespace ew
