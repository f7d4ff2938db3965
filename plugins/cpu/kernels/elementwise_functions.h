// The functions of `elementwise`, one line each: the enum, the names of lowered programs, the counts of
// operands and the loops of elementwise.h are made of them. A new one also needs a line in
// ../tests/reference.cpp, which tests compare it with, and in passes/lowering/lower_elementwise.py.
//
//   vector(name, operands, result): of F16 x, y, z, 16 lanes each, and `one`; see simd.h and vector_math.h
//   scalar(name, operands, result): of floats x, y, where there is no vector form
//   special(name, operands): has a path of its own
#pragma once

// clang-format off
#define EW_ELEMENTWISE_FUNCTIONS(vector, scalar, special)                                                  \
  vector(add, 2, x + y)                           /* of i32 too: add, sub, mul, maximum, minimum, and */   \
  vector(sub, 2, x - y)                           /* what compares                                     */  \
  vector(mul, 2, x * y)                                                                                    \
  vector(div, 2, x / y)                                                                                    \
  vector(maximum, 2, nan_or(x, y, max(x, y)))                                                              \
  vector(minimum, 2, nan_or(x, y, min(x, y)))                                                              \
  vector(lt, 2, select(x < y, one, zero()))       /* lt to ne compare: 1 or 0 as f32; with a NaN nothing */\
  vector(le, 2, select(x < y, one, select(x != y, zero(), one)))                        /* holds but ne */ \
  vector(gt, 2, select(y < x, one, zero()))                                                                \
  vector(ge, 2, select(y < x, one, select(x != y, zero(), one)))                                           \
  vector(eq, 2, select(x != y, zero(), one))                                                               \
  vector(ne, 2, select(x != y, one, zero()))                                                               \
  vector(logical_and, 2, select(x != zero(), select(y != zero(), one, zero()), zero()))                    \
  vector(logical_or, 2, select((x != zero()) | (y != zero()), one, zero()))                                \
  vector(logical_not, 1, select(x != zero(), zero(), one))                                                 \
  vector(where, 3, select(x != zero(), y, z))     /* condition (f32, true if not 0), then, else */         \
  vector(neg, 1, neg(x))                                                                                   \
  vector(abs, 1, abs(x))                                                                                   \
  vector(exp, 1, exp(x))                                                                                   \
  vector(sqrt, 1, sqrt(x))                                                                                 \
  vector(rsqrt, 1, one / sqrt(x))                                                                          \
  vector(tanh, 1, tanh(x))                                                                                 \
  vector(sigmoid, 1, sigmoid(x))                                                                           \
  vector(silu, 1, silu(x))                                                                                 \
  vector(gelu, 1, gelu(x))                                                                                 \
  vector(gelu_tanh, 1, gelu_tanh(x))                                                                       \
  vector(relu, 1, relu(x))                                                                                 \
  vector(erf, 1, erf(x))                                                                                   \
  scalar(pow, 2, power(x, y))                                                                              \
  scalar(log, 1, __builtin_logf(x))                                                                        \
  scalar(sin, 1, __builtin_sinf(x))                                                                        \
  scalar(cos, 1, __builtin_cosf(x))                                                                        \
  scalar(floor, 1, __builtin_floorf(x))                                                                    \
  scalar(round, 1, __builtin_rintf(x))            /* ties to even */                                       \
  special(cast, 1)                                /* i32 -> f32 */
// clang-format on
