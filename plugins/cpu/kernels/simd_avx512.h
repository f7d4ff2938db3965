// Vectors of 16 floats on AVX-512: one register. See simd_portable.h for what each function means.
#pragma once

// GCC 12's own header warns of its _mm512_undefined_ps (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

#define EW_INLINE inline __attribute__((always_inline))

namespace ew {
namespace {

constexpr int kMaxRows = 12;  // 12 x 2 accumulators, 2 weights and 1 broadcast of 32 registers
constexpr int kRegisters = 32;
constexpr int kStreamPanels = 4;

struct F16 {
  __m512 v;
};
struct M16 {
  __mmask16 v;
};

EW_INLINE F16 splat(float a) { return {_mm512_set1_ps(a)}; }
EW_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
EW_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
EW_INLINE void keep(F16& a) { asm("" : "+v"(a.v)); }
EW_INLINE M16 first_lanes(int64_t n) { return {static_cast<__mmask16>((1u << n) - 1)}; }
EW_INLINE F16 load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n).v, p)}; }
EW_INLINE void store_n(float* p, F16 a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n).v, a.v); }

EW_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
EW_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
EW_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
EW_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
EW_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
EW_INLINE F16 fnma(F16 a, F16 b, F16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
EW_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
EW_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
EW_INLINE F16 sqrt(F16 a) { return {_mm512_sqrt_ps(a.v)}; }
EW_INLINE F16 abs(F16 a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.v)}; }
EW_INLINE F16 copysign(F16 a, F16 sign) {
  const __m512 bit = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(bit, a.v), _mm512_and_ps(bit, sign.v))};
}
EW_INLINE F16 pow2(F16 n) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
EW_INLINE F16 times_pow2(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

EW_INLINE M16 operator<(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
EW_INLINE M16 operator!=(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }
EW_INLINE M16 operator|(M16 a, M16 b) { return {static_cast<__mmask16>(a.v | b.v)}; }
EW_INLINE M16 lanes_between(int64_t begin, int64_t end) {
  return {static_cast<__mmask16>(first_lanes(end).v & ~first_lanes(begin).v)};
}
EW_INLINE F16 select(M16 m, F16 a, F16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }

EW_INLINE void load_columns(const float* const (&rows)[16], int64_t at, F16 (&columns)[4]) {
  const auto four = [&](int i) {  // rows i, i + 4, i + 8, i + 12
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(rows[i] + at));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(rows[i + 4] + at), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(rows[i + 8] + at), 2);
    return _mm512_insertf32x4(v, _mm_loadu_ps(rows[i + 12] + at), 3);
  };
  const __m512 a = four(0), b = four(1), c = four(2), d = four(3);
  const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
  const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
  const __m512d next_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
  const __m512d next_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
  columns[0] = {_mm512_castpd_ps(_mm512_unpacklo_pd(low, next_low))};
  columns[1] = {_mm512_castpd_ps(_mm512_unpackhi_pd(low, next_low))};
  columns[2] = {_mm512_castpd_ps(_mm512_unpacklo_pd(high, next_high))};
  columns[3] = {_mm512_castpd_ps(_mm512_unpackhi_pd(high, next_high))};
}

EW_INLINE float sum_lanes(F16 a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
EW_INLINE float max_lanes(F16 a) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// Reduces 16 vectors by an `op` whose order doesn't matter: lane i of the result is that of vector i's lanes.
template <class Op>
EW_INLINE __m512 reduce_lanes(__m512 (&v)[16], const Op& op) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    v[i] = op(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
    v[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto fold = [&](__m512 a, __m512 b) __attribute__((always_inline)) {
    return op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return fold(fold(v[0], v[1]), fold(v[2], v[3]));
}
EW_INLINE F16 max_lanes(const F16 (&vectors)[16]) {
  __m512 v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = vectors[i].v;
  return {reduce_lanes(v, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); })};
}

}  // namespace
}  // namespace ew
