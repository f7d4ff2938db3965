// Elementary functions on 16 floats, from add, multiply and fma alone, so that a value's result doesn't
// depend on its place. The polynomials are minimax fits (Lawson's iteration in double on Chebyshev nodes)
// made for this file; the ranges and reductions are the usual ones of Cody and Waite, "Software Manual for
// the Elementary Functions" (1980). tests/test_kernels_math.cpp holds the errors that are promised here.
#pragma once

#include "simd.h"

namespace ew {
namespace {

// The first min(n, 16) lanes.
EW_INLINE F16 load_some(const float* p, int64_t n) { return n >= 16 ? load(p) : load_n(p, n); }
EW_INLINE void store_some(float* p, F16 a, int64_t n) {
  if (n >= 16) {
    store(p, a);
  } else {
    store_n(p, a, n);
  }
}

EW_INLINE F16 zero() { return splat(0.0f); }
EW_INLINE F16 neg(F16 a) { return splat(-0.0f) - a; }

// NaN where a or b is.
EW_INLINE F16 nan_or(F16 a, F16 b, F16 otherwise) { return select((a != a) | (b != b), a + b, otherwise); }

// Nearest whole number, ties to even, for |a| < 2^22: adding 1.5 * 2^23 rounds to units.
EW_INLINE F16 nearest(F16 a) {
  const F16 magic = splat(12582912.0f);
  return (a + magic) - magic;
}

// e^r where x = n ln 2 + r, so that e^x is 2^n times that. -110 <= x <= 89, or NaN.
EW_INLINE F16 exp_fraction(F16 x, F16& n) {
  n = nearest(x * splat(1.44269504f));
  F16 r =
      fnma(n, splat(0.693359375f), x);  // ln 2 = 0.693359375 (10 bits: the product is exact) - 2.12194440e-4
  r = fma(n, splat(2.12194440e-4f), r);
  F16 p = splat(0.0013950601f);
  p = fma(p, r, splat(0.00836895313f));
  p = fma(p, r, splat(0.041666206f));
  p = fma(p, r, splat(0.166665182f));
  p = fma(p, r, splat(0.5f));
  return fma(p * r, r, r) + splat(1.0f);
}

// e^x within 2 ulp (4 without fma). Exactly 1 at 0, exactly 0 below -110 and at -inf.
EW_INLINE F16 exp(F16 x) {
  F16 n;
  const F16 p = exp_fraction(max(splat(-110.0f), min(splat(89.0f), x)), n);  // in this order a NaN stays
  const F16 half =
      nearest(n * splat(0.5f));  // in two steps, so that 2^128 and subnormal results come out right
  return p * pow2(half) * pow2(n - half);
}

// tanh within 3 ulp: an odd polynomial near 0, 1 - 2 / (e^2x + 1) elsewhere.
EW_INLINE F16 tanh(F16 x) {
  const F16 a = abs(x), s = x * x;
  F16 p = splat(-0.00571704516f);
  p = fma(p, s, splat(0.020650588f));
  p = fma(p, s, splat(-0.0537434965f));
  p = fma(p, s, splat(0.133314908f));
  p = fma(p, s, splat(-0.333332837f));
  const F16 near = fma(p * s, x, x);
  const F16 far = splat(1.0f) - splat(2.0f) / (exp(a + a) + splat(1.0f));
  return select(a < splat(0.625f), near, copysign(far, x));
}

// erf within 1.5e-7: an odd polynomial up to 1, then 1 - e^q(|x|) where q approximates ln erfc on [1, 4].
EW_INLINE F16 erf(F16 x) {
  const F16 a = min(splat(4.0f), abs(x)), s = x * x;
  F16 p = splat(7.88912294e-05f);
  p = fma(p, s, splat(-0.000802084222f));
  p = fma(p, s, splat(0.00518953567f));
  p = fma(p, s, splat(-0.0268544443f));
  p = fma(p, s, splat(0.112836003f));
  p = fma(p, s, splat(-0.37612626f));
  p = fma(p, s, splat(1.12837911f));
  F16 q = splat(0.000187971629f);
  q = fma(q, a, splat(-0.00296400557f));
  q = fma(q, a, splat(0.0219064746f));
  q = fma(q, a, splat(-0.103256203f));
  q = fma(q, a, splat(-0.637965024f));
  q = fma(q, a, splat(-1.12720227f));
  q = fma(q, a, splat(-0.000312469754f));
  F16 n;  // q is in [-19, 0], where a single product with a power of 2 has the bits of exp
  const F16 far = exp_fraction(q, n);
  return select(a < splat(1.0f), p * x, copysign(splat(1.0f) - times_pow2(far, n), x));
}

EW_INLINE F16 sigmoid(F16 x) { return splat(1.0f) / (splat(1.0f) + exp(neg(x))); }
EW_INLINE F16 silu(F16 x) { return x / (splat(1.0f) + exp(neg(x))); }
EW_INLINE F16 relu(F16 x) { return max(zero(), x); }  // a NaN stays
// x times the normal distribution's function, within 4e-7 and 2 ulp: relu(x) - |x| / p(|x|)^16, where p is a
// minimax fit of the tail's 16th root, 1 / p. (The form is that of Abramowitz and Stegun's 7.1.28.) By way of
// erf, whose exponential is a long chain of operations, it takes twice the time.
EW_INLINE F16 gelu(F16 x) {
  const F16 a = min(splat(1e4f), abs(x));  // in this order a NaN stays; p(20)^16 is infinite
  F16 p = splat(8.58797591e-07f);
  p = fma(p, a, splat(-2.23757729e-06f));
  p = fma(p, a, splat(7.8460238e-05f));
  p = fma(p, a, splat(-6.31174271e-06f));
  p = fma(p, a, splat(0.00346130738f));
  p = fma(p, a, splat(0.0220619179f));
  p = fma(p, a, splat(0.052077353f));
  p = fma(p, a, splat(1.04427373f));
  const F16 p2 = p * p, p4 = p2 * p2, p8 = p4 * p4;
  return fnma(a, splat(1.0f) / (p8 * p8), relu(x));
}
EW_INLINE F16 gelu_tanh(F16 x) {
  const F16 cubic = fma(x * x * x, splat(0.044715f), x);
  return splat(0.5f) * x * (splat(1.0f) + tanh(cubic * splat(0.797884561f)));
}

}  // namespace
}  // namespace ew
