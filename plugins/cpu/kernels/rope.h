// rope_table and rope.
//
//   table, a row a token:      | cos 0 .. F-1 | sin 0 .. F-1 |
//   x, not interleaved:        | a 0 .. F-1 | b 0 .. F-1 | rest |       pair i is (a_i, b_i)
//   x, interleaved:            | a0 b0 a1 b1 ... | rest |
//   out                        a' = a cos - b sin,  b' = b cos + a sin,  rest as it is
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "vector_math.h"

namespace ew {
namespace {

// The angle is a float product, as in every model's own code; libm's sinf and cosf are within an ulp at any
// angle, which a short polynomial isn't at position 131072. It is computed once a step.
void rope_table(const RopeTableArgs& a, Workers& pool) {
  run_rows(pool, a.tokens, a.freqs * 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* out = a.out + t * a.out_stride;
      const float position = static_cast<float>(a.positions[t]);
      for (int64_t f = 0; f < a.freqs; ++f) {
        const float angle = position * a.inv_freq[f];
        out[f] = __builtin_cosf(angle) * a.scale;
        out[a.freqs + f] = __builtin_sinf(angle) * a.scale;
      }
    }
  });
}

EW_INLINE void rotate_halves(const float* x, const float* table, int64_t freqs, float* out) {
  for (int64_t i = 0; i < freqs; i += 16) {
    const int64_t n = freqs - i;
    const F16 c = load_some(table + i, n), s = load_some(table + freqs + i, n);
    const F16 first = load_some(x + i, n), second = load_some(x + freqs + i, n);
    store_some(out + i, fnma(second, s, first * c), n);
    store_some(out + freqs + i, fma(first, s, second * c), n);
  }
}

EW_INLINE void rotate_pairs(const float* x, const float* table, int64_t freqs, float* out) {
  for (int64_t i = 0; i < freqs; ++i) {
    const float c = table[i], s = table[freqs + i], first = x[2 * i], second = x[2 * i + 1];
    out[2 * i] = first * c - second * s;
    out[2 * i + 1] = second * c + first * s;
  }
}

// x [D] of one head, rotated by a token's row of the table.
EW_INLINE void rotate(const RopeArgs& a, const float* table, const float* x, float* out) {
  if (a.interleaved) {
    rotate_pairs(x, table, a.freqs, out);
  } else {
    rotate_halves(x, table, a.freqs, out);
  }
  if (x == out) return;
  for (int64_t i = 2 * a.freqs; i < a.size; ++i) out[i] = x[i];
}

// All heads of token t.
EW_INLINE void rope_token(const RopeArgs& a, int64_t t) {
  for (int64_t h = 0; h < a.heads; ++h) {
    rotate(a, a.table + t * a.table_stride, a.x.data + t * a.x.stride0 + h * a.x.stride1,
           a.out.data + t * a.out.stride0 + h * a.out.stride1);
  }
}

void rope(const RopeArgs& a, Workers& pool) {
  run_rows(pool, a.tokens, a.heads * a.size, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) rope_token(a, t);
  });
}

}  // namespace
}  // namespace ew
