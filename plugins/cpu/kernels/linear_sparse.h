// linear and linear_bf16 of weights in sparse32 (sparse_panel.h): y[m, n] = the sum over the kept k of
// x[m, k] * weight[n, k], + bias[n]. Every (m, n) is one chain over the kept k in ascending order, of bf16
// one over the pairs of those of each quad.
//
// Weights stay as they are: of the 4 values of a row that meet a quad, each column's two are chosen by a
// shuffle in registers. That is half the products of a dense weight and as many shuffles.
#pragma once

#include "dot.h"
#include "kernels.h"
#include "linear_epilogue.h"
#include "linear_tasks.h"
#include "sparse_panel.h"

namespace ew {
namespace {

constexpr int kSparseRows = kMaxRows > 1 ? kMaxRows * 2 / 3 : 1;  // shuffled rows take registers of their own

// A quad of R rows of f32. x is at its first k.
template <int R>
EW_INLINE void sparse_quad(const SparsePanel<kSparseF32>& panel, const float* x, int64_t stride,
                           F16 (&acc)[R][2]) {
  const float* w = reinterpret_cast<const float*>(panel.values);
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    const F16 first = load(w + c * 16), second = load(w + kPanel + c * 16);
    const I16 places = panel.places[c], behind = shift<2>(places);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r][c] = fma(choose(x + r * stride, places), first, acc[r][c]);
      acc[r][c] = fma(choose(x + r * stride, behind), second, acc[r][c]);
    }
  }
}

// And of bf16.
template <int R>
EW_INLINE void sparse_quad(const SparsePanel<kSparseBf16>& panel, const uint16_t* x, int64_t stride,
                           F16 (&acc)[R][2]) {
  const uint16_t* w = reinterpret_cast<const uint16_t*>(panel.values);
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    const Pairs weight = load_pairs(w + c * 32);
    const PairPlaces places = pair_places(panel.places[c]);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][c] = dot(acc[r][c], weight, choose_pairs(x + r * stride, places));
  }
}

template <int R, SparseFormat Format, class Linear>
void sparse_block(const Linear& a, int64_t row, int64_t p, SparsePanel<Format> panel) {
  const auto* x = a.x + row * a.x_stride;
  F16 acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  for (int64_t k = 0; k < a.k; k += 4) {
    panel.next();
    sparse_quad<R>(panel, x + k, a.x_stride, acc);
  }
  store_panel<R>(acc, a, row, p);
}

template <class Linear>
void linear_sparse(const Linear& a, Workers& pool) {
  constexpr SparseFormat kFormat = sizeof(*a.x) == 4 ? kSparseF32 : kSparseBf16;
  const uint8_t* weight = reinterpret_cast<const uint8_t*>(a.weight);
  const int64_t panel_bytes = sparse_bytes(kFormat, a.k);
  linear_tasks(pool, a.m, a.n, a.k, panel_bytes,
               [&](int64_t panel, int64_t panel_end, int64_t row, int64_t row_end) {
                 for (int64_t p = panel; p < panel_end; ++p) {
                   for_blocks_of<kSparseRows>(row, row_end, [&]<int R>(int64_t first, int64_t, int64_t) {
                     sparse_block<R, kFormat>(a, first, p, SparsePanel<kFormat>{weight + p * panel_bytes});
                   });
                 }
               });
}

}  // namespace
}  // namespace ew
