// linear_fp8: y[m, n] = sum_k x[m, k] * (value[n, k] * scale[n, k's group]) + bias[n], x, products and sums
// in f32. The value times its scale is exact, so the bits are those of `linear` with the weight as f32.
//
// The weight is 8-bit floats, e4m3fn, in layout panel32, with the f16 scales beside it in panel32:
//
//   weight   | k=0: n=0 .. 31 (a byte each) | k=1: .. | ...                [ceil(N/32)][K][32]
//   scales   | g=0: n=0 .. 31 | g=1: .. | ...                              [ceil(N/32)][groups][32]
//
// Some k of a panel are made floats in the first-level cache, by way of f16 (fp8.h), and all rows of a task
// meet them there as they meet an f32 weight.
#pragma once

#include "dot.h"
#include "fp8.h"
#include "kernels.h"
#include "linear_epilogue.h"
#include "linear_tasks.h"
#include "microkernel.h"

namespace ew {
namespace {

constexpr int64_t kFp8Ahead = 4096;  // bytes that a prefetch is ahead
constexpr int64_t kFp8Depth = 128;   // k that are made floats at a time: 16 KB

// The weights of k0 .. k1-1 of a panel, [k1 - k0][32].
inline void widen_fp8(const LinearFp8Args& a, int64_t panel, int64_t k0, int64_t k1, float* out) {
  if (k0 == k1) return;
  const int64_t size = a.group > 0 ? a.group : a.k, groups = (a.k + size - 1) / size;
  const uint8_t* codes = a.weight + (panel * a.k + k0) * kPanel;
  for (int64_t k = k0; k < k1;) {
    const int64_t group = k / size, end = (group + 1) * size < k1 ? (group + 1) * size : k1;
    const uint16_t* scales = a.weight_scales + (panel * groups + group) * kPanel;
    const F16 left = load_half(scales) * splat(kFp8OfHalf),
              right = load_half(scales + 16) * splat(kFp8OfHalf);
    for (; k < end; ++k, codes += kPanel, out += kPanel) {
      __builtin_prefetch(codes + kFp8Ahead);
      uint16_t halves[kPanel];
      for (int i = 0; i < kPanel; ++i) halves[i] = fp8_as_half(codes[i]);
      store(out, load_half(halves) * left);
      store(out + 16, load_half(halves + 16) * right);
    }
  }
}

// R rows of a panel, k0 <= k < k1; sums that are not at K's end are kept in `spilled` [R][32].
template <int R>
void fp8_block(const LinearFp8Args& a, int64_t row, int64_t panel, int64_t k0, int64_t k1, const float* wide,
               float* spilled) {
  F16 acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    acc[r][0] = k0 > 0 ? load(spilled + r * kPanel) : splat(0.0f);
    acc[r][1] = k0 > 0 ? load(spilled + r * kPanel + 16) : splat(0.0f);
  }
  chain<R, 1, 2, Fetch::none>(a.x + row * a.x_stride + k0, a.x_stride, wide, kPanel, 0, k1 - k0, 0, acc);
  if (k1 == a.k) {
    store_block<R, 2>(acc, a, row, panel * kPanel);
    return;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(spilled + r * kPanel, acc[r][0]);
    store(spilled + r * kPanel + 16, acc[r][1]);
  }
}

inline void linear_fp8(const LinearFp8Args& a, Workers& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  linear_tasks(pool, a.m, a.n, a.k, a.k * kPanel,
               [&](int64_t panel, int64_t panel_end, int64_t row, int64_t row_end) {
                 float wide[kFp8Depth * kPanel], spilled[kTaskRows * kPanel];
                 for (int64_t p = panel; p < panel_end; ++p) {
                   int64_t k0 = 0;
                   do {
                     const int64_t k1 = a.k - k0 < kFp8Depth ? a.k : k0 + kFp8Depth;
                     widen_fp8(a, p, k0, k1, wide);
                     for_row_blocks(row_end - row, [&]<int R>(int64_t r) {
                       fp8_block<R>(a, row + r, p, k0, k1, wide, spilled + r * kPanel);
                     });
                     k0 = k1;
                   } while (k0 < a.k);
                 }
               });
}

}  // namespace
}  // namespace ew
