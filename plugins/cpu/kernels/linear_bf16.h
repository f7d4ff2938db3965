// linear_bf16: y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], factors in bf16, sums in f32.
//
// The weight is in layout panel32x2, zero in the columns past N and behind an odd K:
//
//   | k=0,1: n=0 (2 numbers), n=1, .. n=31 | k=2,3: .. | ...              [ceil(N/32)][ceil(K/2)][32][2]
//
// so that a pair of a row, broadcast, meets 16 columns in one instruction where there is VDPBF16. Every
// (m, n) is one chain over the pairs, in ascending order.
#pragma once

#include "dot.h"
#include "kernels.h"
#include "linear_sparse.h"
#include "linear_sweep.h"
#include "linear_tasks.h"

namespace ew {
namespace {

template <int R>
void bf16_block(const LinearBf16Args& a, int64_t row, int64_t panel, Ahead ahead, float* sums) {
  const int64_t pairs = (a.k + 1) / 2;
  const uint16_t* x = a.x + row * a.x_stride;
  constexpr int kVectors = bf16_vectors(R);
  F16 acc[R][2];
#pragma GCC unroll 2
  for (int first = 0; first < 2; first += kVectors) {
    const uint16_t* w = a.weight + panel * pairs * kPanel * 2 + first * 32;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) acc[r][first + c] = splat(0.0f);
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
      if (first == 0) prefetch_for<R>(ahead, w);
      Pairs weight[kVectors];
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) weight[c] = load_pairs(w + c * 32);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Pair value = splat_pair(x + r * a.x_stride + pair * 2);
#pragma GCC unroll 2
        for (int c = 0; c < kVectors; ++c) acc[r][first + c] = dot(acc[r][first + c], weight[c], value);
      }
      w += kPanel * 2;
    }
  }
  keep_sums<R>(acc, sums);
}

inline void linear_bf16(const LinearBf16Args& a, Workers& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  if (a.sparse) return linear_sparse(a, pool);
  const int64_t panel_size = (a.k + 1) / 2 * kPanel * 2, panel_bytes = panel_size * 2;
  linear_tasks(pool, a.m, a.n, a.k, panel_bytes,
               [&](int64_t panel, int64_t panel_end, int64_t row, int64_t row_end) {
                 sweep_panels<kBf16Rows>(a, a.weight, panel_bytes, panel, panel_end, row, row_end,
                                         [&]<int R>(int64_t first, int64_t p, Ahead ahead, float* sums) {
                                           bf16_block<R>(a, first, p, ahead, sums);
                                         });
               });
}

}  // namespace
}  // namespace ew
