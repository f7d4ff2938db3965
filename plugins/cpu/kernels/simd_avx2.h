// Vectors of 16 floats on AVX2: two registers. See simd_portable.h for what each function means.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define EW_INLINE inline __attribute__((always_inline))

namespace ew {
namespace {

constexpr int kMaxRows = 3;  // 3 x 4 accumulators, 3 broadcasts and 1 weight of 16 registers
constexpr int kRegisters = 8;
constexpr int kStreamPanels = 2;

struct F16 {
  __m256 lo, hi;
};
struct M16 {
  __m256 lo, hi;
};

EW_INLINE F16 splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
EW_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
EW_INLINE void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
EW_INLINE void keep(F16& a) { asm("" : "+x"(a.lo), "+x"(a.hi)); }
EW_INLINE M16 first_lanes(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int count = static_cast<int>(n);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane))};
}
EW_INLINE F16 load_n(const float* p, int64_t n) {
  const M16 m = first_lanes(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.lo)),
          _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi))};
}
EW_INLINE void store_n(float* p, F16 a, int64_t n) {
  const M16 m = first_lanes(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), a.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), a.hi);
}

EW_INLINE F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
EW_INLINE F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
EW_INLINE F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
EW_INLINE F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
EW_INLINE F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
EW_INLINE F16 fnma(F16 a, F16 b, F16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
EW_INLINE F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
EW_INLINE F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
EW_INLINE F16 sqrt(F16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
EW_INLINE F16 abs(F16 a) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(bit, a.lo), _mm256_andnot_ps(bit, a.hi)};
}
EW_INLINE F16 copysign(F16 a, F16 sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, a.lo), _mm256_and_ps(bit, sign.lo)),
          _mm256_or_ps(_mm256_andnot_ps(bit, a.hi), _mm256_and_ps(bit, sign.hi))};
}
EW_INLINE __m256 pow2(__m256 n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
EW_INLINE F16 pow2(F16 n) { return {pow2(n.lo), pow2(n.hi)}; }
EW_INLINE F16 times_pow2(F16 a, F16 n) { return a * pow2(n); }

EW_INLINE M16 operator<(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
EW_INLINE M16 operator!=(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_NEQ_UQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_NEQ_UQ)};
}
EW_INLINE M16 operator|(M16 a, M16 b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
EW_INLINE M16 lanes_between(int64_t begin, int64_t end) {
  const M16 b = first_lanes(begin), e = first_lanes(end);
  return {_mm256_andnot_ps(b.lo, e.lo), _mm256_andnot_ps(b.hi, e.hi)};
}
EW_INLINE F16 select(M16 m, F16 a, F16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}

EW_INLINE void load_columns(const float* const (&rows)[16], int64_t at, F16 (&columns)[4]) {
  const auto half = [&](const float* const* of, __m256(&to)[4]) {
    const auto two = [&](int i) {  // rows i and i + 4
      const __m256 v = _mm256_castps128_ps256(_mm_loadu_ps(of[i] + at));
      return _mm256_insertf128_ps(v, _mm_loadu_ps(of[i + 4] + at), 1);
    };
    const __m256 a = two(0), b = two(1), c = two(2), d = two(3);
    const __m256d low = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
    const __m256d high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
    const __m256d next_low = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
    const __m256d next_high = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
    to[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, next_low));
    to[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, next_low));
    to[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high, next_high));
    to[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high, next_high));
  };
  __m256 first[4], second[4];
  half(rows, first);
  half(rows + 8, second);
  for (int i = 0; i < 4; ++i) columns[i] = {first[i], second[i]};
}

EW_INLINE float sum_lanes(F16 a) {
  const __m256 half = _mm256_add_ps(a.lo, a.hi);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
EW_INLINE float max_lanes(F16 a) {
  const __m256 half = _mm256_max_ps(a.lo, a.hi);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
EW_INLINE F16 max_lanes(const F16 (&vectors)[16]) {
  float greatest[16];
  for (int i = 0; i < 16; ++i) greatest[i] = max_lanes(vectors[i]);
  return load(greatest);
}

}  // namespace
}  // namespace ew
