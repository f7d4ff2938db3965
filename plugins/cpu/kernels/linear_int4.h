// linear_int4: y[m, n] = sum over groups g of isum(m, n, g) * ws[n, g] * xs[m, g] + bias[n], and where
// weights have offsets sum(m, g) * xs[m, g] * wo[n, g] in each group. isum is the exact integer sum over the
// group's k of values[m, k] * weight[n, k], and sum that of values[m, k] alone.
//
// The weight is in layout panel32x8, two values of 0 .. 15 a byte, with the f16 scales and offsets beside it
// in panel32:
//
//   weight   | k=0..7: n=0 (4 bytes), n=1, .. n=31 | k=8..15: .. | ...     [ceil(N/32)][K/8][32][4]
//   scales   | g=0: n=0 .. 31 | g=1: .. | ...                              [ceil(N/32)][groups][32]
//
//   4 bytes of a column, and the 4 values of a row that meet each half of them:
//
//            byte 0     byte 1     byte 2     byte 3
//     low    k          k+1        k+2        k+3         w & 15        with values k .. k+3
//     high   k+4        k+5        k+6        k+7         w >> 4 & 15   with values k+4 .. k+7
//
// Weights without offsets are stored + 8, which is taken back with the groups' sums of values. Halves of
// bytes are taken apart in registers, for as many rows as these hold at a time. Every instruction set has the
// same integers; the order of the float sums is docs/inside/numerics.md's.
//
// A weight in sparse32 (sparse_panel.h) is spread to halves of bytes in registers for up to kSparseInt4Most
// rows, in blocks that may have more rows than those of a dense one, since they share the work; for more it
// is made a dense panel, once for all rows of a task, in memory that stays in the first-level cache. It has
// no offsets: what isn't kept would be one.
#pragma once

#include "dot.h"
#include "kernels.h"
#include "linear_tasks.h"
#include "parallel.h"
#include "sparse_panel.h"

namespace ew {
namespace {

constexpr int64_t kMostOctets = kNibbleDots / 2;  // 8 values make two dots

// A panel as int4_block reads it: next() goes on by 8 k, whose first four are `low` and the others `high`, of
// 16 columns and of the 16 behind them.
struct DenseNibbles {
  const uint8_t* w;
  Ahead ahead;
  EW_INLINE void next() {
    prefetch(ahead);
    at = w;
    w += kPanel * 4;
  }
  EW_INLINE Nibbles low(int c) const { return low_nibbles(at + c * 64); }
  EW_INLINE Nibbles high(int c) const { return high_nibbles(at + c * 64); }
  const uint8_t* at = nullptr;
};
struct SparseNibbles {
  SparsePanel<kSparseInt4> panel;
  EW_INLINE void next() { panel.next(); }
  EW_INLINE Nibbles low(int c) const {
    return nibbles_of(spread_low(panel.values + c * 32, panel.places[c]));
  }
  EW_INLINE Nibbles high(int c) const {
    return nibbles_of(spread_high(panel.values + c * 32, shift<4>(panel.places[c])));
  }
};
template <int R, bool Offsets, class Source>
void int4_block(const LinearInt4Args& a, int64_t row, int64_t panel, Source source) {
  const int64_t groups = a.k / a.group;
  const int8_t* values = a.values + row * a.values_stride;
  const float* scales = a.scales + row * a.scales_stride;
  const int32_t* sums = a.sums + row * a.sums_stride;
  const int64_t of_panel = panel * groups * kPanel;

  F16 acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  for (int64_t group = 0; group < groups; ++group) {
    I16 sum[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sum[r][0] = sum[r][1] = Offsets ? splat_int(0) : minus_8_times(sums + r * a.sums_stride + group);
    }
    for (int64_t left = a.group / 8; left > 0; left -= kMostOctets) {
      ShortSum dots[R][2];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        dots[r][0] = begin_dots(sum[r][0]);
        dots[r][1] = begin_dots(sum[r][1]);
      }
      const int8_t* const end = values + 8 * (left < kMostOctets ? left : kMostOctets);
      for (; values < end; values += 8) {
        source.next();
        const Nibbles low[2] = {source.low(0), source.low(1)};
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const Bytes x = splat_bytes(values + r * a.values_stride);
          dots[r][0] = dot(dots[r][0], low[0], x);
          dots[r][1] = dot(dots[r][1], low[1], x);
        }
        const Nibbles high[2] = {source.high(0), source.high(1)};
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const Bytes x = splat_bytes(values + r * a.values_stride + 4);
          dots[r][0] = dot(dots[r][0], high[0], x);
          dots[r][1] = dot(dots[r][1], high[1], x);
        }
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        sum[r][0] = end_dots(sum[r][0], dots[r][0]);
        sum[r][1] = end_dots(sum[r][1], dots[r][1]);
      }
    }
    const int64_t at = of_panel + group * kPanel;
    const uint16_t *scale = a.weight_scales + at, *offset = Offsets ? a.weight_offsets + at : scale;
    const F16 ws[2] = {load_half(scale), load_half(scale + 16)};
    const F16 wo[2] = {load_half(offset), load_half(offset + 16)};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F16 x = splat(scales[r * a.scales_stride + group]);
      acc[r][0] = fma(to_float(sum[r][0]), ws[0] * x, acc[r][0]);
      acc[r][1] = fma(to_float(sum[r][1]), ws[1] * x, acc[r][1]);
      if constexpr (Offsets) {
        const F16 values_sum = to_float(splat_int(sums[r * a.sums_stride + group])) * x;
        acc[r][0] = fma(values_sum, wo[0], acc[r][0]);
        acc[r][1] = fma(values_sum, wo[1], acc[r][1]);
      }
    }
  }
  store_panel<R>(acc, a, row, panel);
}

inline void linear_int4(const LinearInt4Args& a, ThreadPool& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  const int64_t dense_bytes = a.k / 2 * kPanel;
  const int64_t panel_bytes = a.sparse ? sparse_bytes(kSparseInt4, a.k) : dense_bytes;
  uint8_t* spare = nullptr;
  if (a.sparse && a.m > kSparseInt4Most)
    spare = static_cast<uint8_t*>(a.workspace->reserve(pool_size(pool) * dense_bytes));
  linear_tasks(pool, a.m, a.n, a.k, panel_bytes,
               [&](int64_t panel, int64_t panel_end, int64_t row, int64_t row_end, int worker) {
                 for (int64_t p = panel; p < panel_end; ++p) {
                   const uint8_t *stored = a.weight + p * panel_bytes, *dense = stored;
                   if (a.sparse && row_end - row <= kSparseInt4Most) {
                     for_blocks_of<kSparseInt4Rows>(
                         row, row_end, [&]<int R>(int64_t first, int64_t, int64_t) {
                           int4_block<R, false>(a, first, p, SparseNibbles{stored});
                         });
                     continue;
                   }
                   if (a.sparse) {
                     uint8_t* own = spare + worker * dense_bytes;
                     spread_panel(SparsePanel<kSparseInt4>{stored}, a.k / 8, own);
                     dense = own;
                   }
                   const auto block = [&]<int R>(int64_t first, int64_t i, int64_t blocks) {
                     const DenseNibbles source = {dense, ahead_of(stored, panel_bytes, i, blocks)};
                     if (a.weight_offsets == nullptr) {
                       int4_block<R, false>(a, first, p, source);
                     } else {
                       int4_block<R, true>(a, first, p, source);
                     }
                   };
                   if (row_end - row <= kInt4Alone) {
                     for_blocks_of<kInt4Alone>(row, row_end, block);
                   } else {
                     for_blocks_of<kInt4Rows>(row, row_end, block);
                   }
                 }
               });
}

}  // namespace
}  // namespace ew
