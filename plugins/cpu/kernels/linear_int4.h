// linear_int4: y[m, n] = sum over groups g of isum(m, n, g) * ws[n, g] * xs[m, g] + bias[n], and where
// weights have offsets sum(m, g) * xs[m, g] * wo[n, g] in each group. isum is the exact integer sum over the
// group's k of values[m, k] * weight[n, k], and sum that of values[m, k] alone. A weight's value has 4 bits,
// or 5 or 6.
//
// Of 4 bits it is in layout panel32x8, two values of 0 .. 15 a byte, with the scales and offsets of groups
// beside it (group_scales.h):
//
//   weight   | k=0..7: n=0 (4 bytes), n=1, .. n=31 | k=8..15: .. | ...     [ceil(N/32)][K/8][32][4]
//
//   4 bytes of a column, and the 4 values of a row that meet each half of them:
//
//            byte 0     byte 1     byte 2     byte 3
//     low    k          k+1        k+2        k+3         w & 15        with values k .. k+3
//     high   k+4        k+5        k+6        k+7         w >> 4 & 15   with values k+4 .. k+7
//
// Of 5 and 6 bits it is in planes32: what is above the 4 lowest bits lies behind them, in a plane of 64
// bytes. A vector of 64 values (16 columns of 4 k) finds its own in each byte of the plane, at a place that
// goes by the vector's number: v of 8 in 16 k, or in 8 k the two at 2v of 4.
//
//   5 bits   | k=0..7, as above: v=0 .. 3 | k=8..15: v=4 .. 7 | plane | k=16 ..     320 bytes for 16 k
//   6 bits   | k=0..7, as above: v=0 .. 3 | plane | k=8 ..                          192 bytes for 8 k
//
//   v        low half of n=0..15: 0, of n=16..31: 1, high half of n=0..15: 2, of n=16..31: 3; then + 4
//
// Weights without offsets are stored + 8 (16, 32), which is taken back with the groups' sums of values.
// Halves of bytes are taken apart in registers, for as many rows as these hold at a time. Every instruction
// set has the same integers; the order of the float sums is docs/inside/numerics.md's.
//
// A weight in sparse32 (sparse_panel.h) is spread to halves of bytes in registers for up to kSparseInt4Most
// rows, in blocks that may have more rows than those of a dense one, since they share the work; for more it
// is made a dense panel, once for all rows of a task, in memory that stays in the first-level cache. It has
// no offsets: what isn't kept would be one.
#pragma once

#include "dot.h"
#include "group_scales.h"
#include "kernels.h"
#include "linear_tasks.h"
#include "parallel.h"
#include "sparse_panel.h"

namespace ew {
namespace {

// How many octets of k sums of 16 bits have room for: 8 values make two dots.
template <int Bits>
constexpr int64_t kMostOctets = (kNibbleDots >> (Bits - 4)) / 2;

// A panel as int4_block reads it: next() goes on by kOctets times 8 k, with Fetch as in linear_int8.h. Of
// octet O low<O, C>() has the first four k, and high the others, of 16 columns (C = 0) and of the 16 behind
// them.
struct DenseNibbles {
  static constexpr int kBits = 4, kOctets = 1;
  const uint8_t* w;
  Ahead ahead;
  template <bool Fetch>
  EW_INLINE void next() {
    if constexpr (Fetch) prefetch(ahead);
    at = w;
    w += kPanel * 4;
  }
  template <int O, int C>
  EW_INLINE Nibbles low() const {
    return low_nibbles(at + C * 64);
  }
  template <int O, int C>
  EW_INLINE Nibbles high() const {
    return high_nibbles(at + C * 64);
  }
  const uint8_t* at = nullptr;
};
template <int Bits>
struct DensePlanes {
  static constexpr int kBits = Bits, kOctets = Bits == 5 ? 2 : 1, kLines = Bits == 5 ? 5 : 3,
                       kMore = Bits - 4;
  const uint8_t* w;
  Ahead ahead;
  template <bool Fetch>
  EW_INLINE void next() {
    if constexpr (Fetch) {
#pragma GCC unroll 5
      for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead.at + i * 64);
      ahead.at += ahead.step * kLines / 2;
    }
    at = w;
    w += kLines * 64;
  }
  template <int O, int C>
  EW_INLINE Nibbles low() const {
    return with_plane<(O * 4 + C) * kMore, (1 << kMore) - 1>(low_nibbles(at + O * 128 + C * 64), plane());
  }
  template <int O, int C>
  EW_INLINE Nibbles high() const {
    return with_plane<(O * 4 + 2 + C) * kMore, (1 << kMore) - 1>(high_nibbles(at + O * 128 + C * 64),
                                                                 plane());
  }
  EW_INLINE const uint8_t* plane() const { return at + kOctets * 128; }
  const uint8_t* at = nullptr;
};
struct SparseNibbles {
  static constexpr int kBits = 4, kOctets = 1;
  SparsePanel<kSparseInt4> panel;
  template <bool>
  EW_INLINE void next() {
    panel.next();
  }
  template <int O, int C>
  EW_INLINE Nibbles low() const {
    return nibbles_of(spread_low(panel.values + C * 32, panel.places[C]));
  }
  template <int O, int C>
  EW_INLINE Nibbles high() const {
    return nibbles_of(spread_high(panel.values + C * 32, shift<4>(panel.places[C])));
  }
};

// Octet O of what source.next() came to, for R rows of values and V vectors of columns from C on.
template <int R, int O, int C, int V, class Source>
EW_INLINE void dot_octet(const Source& source, const int8_t* values, int64_t stride, ShortSum (&dots)[R][V]) {
  const Nibbles low[2] = {source.template low<O, C>(), source.template low<O, C + V - 1>()};
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const Bytes x = splat_bytes(values + r * stride + 8 * O);
#pragma GCC unroll 2
    for (int c = 0; c < V; ++c) dots[r][c] = dot(dots[r][c], low[c], x);
  }
  const Nibbles high[2] = {source.template high<O, C>(), source.template high<O, C + V - 1>()};
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const Bytes x = splat_bytes(values + r * stride + 8 * O + 4);
#pragma GCC unroll 2
    for (int c = 0; c < V; ++c) dots[r][c] = dot(dots[r][c], high[c], x);
  }
}

template <int R, bool Offsets, class Source>
void int4_block(const LinearInt4Args& a, int64_t row, int64_t panel, Source source) {
  constexpr int V = int4_vectors(R), kBits = Source::kBits, kOctets = Source::kOctets;
  const int64_t groups = a.k / a.group;
  const int8_t* of_group = a.values + row * a.values_stride;
  const float* scales = a.scales + row * a.scales_stride;
  const int32_t* sums = a.sums + row * a.sums_stride;
  const int64_t of_panel = panel * scales_of_panel(groups, a.scale_block);
  const GroupScales weight_scales(a.weight_scales + of_panel, a.scale_block);
  const GroupScales weight_offsets((Offsets ? a.weight_offsets : a.weight_scales) + of_panel, a.scale_block);

  F16 acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  for (int64_t group = 0; group < groups; ++group, of_group += a.group) {
    const Source begin = source;
    const auto add_group = [&]<int C>() __attribute__((always_inline)) {  // of vectors C .. C+V-1
      source = begin;
      const int8_t* values = of_group;
      I16 sum[R][V];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const int32_t* of_values = sums + r * a.sums_stride + group;
        sum[r][0] = Offsets ? splat_int(0) : minus_shifted<kBits - 1>(of_values);
        if constexpr (V == 2) sum[r][1] = sum[r][0];
      }
      for (int64_t left = a.group / 8; left > 0; left -= kMostOctets<kBits>) {
        ShortSum dots[R][V];
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (int c = 0; c < V; ++c) dots[r][c] = begin_dots(sum[r][c]);
        }
        const int8_t* const end = values + 8 * (left < kMostOctets<kBits> ? left : kMostOctets<kBits>);
        for (; values < end; values += 8 * kOctets) {
          source.template next<V == 2>();
          dot_octet<R, 0, C, V>(source, values, a.values_stride, dots);
          if constexpr (kOctets == 2) dot_octet<R, 1, C, V>(source, values, a.values_stride, dots);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (int c = 0; c < V; ++c) sum[r][c] = end_dots(sum[r][c], dots[r][c]);
        }
      }
      const F16 ws[2] = {weight_scales.load(group, C * 16), weight_scales.load(group, (C + V - 1) * 16)};
      const F16 wo[2] = {weight_offsets.load(group, C * 16), weight_offsets.load(group, (C + V - 1) * 16)};
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F16 x = splat(scales[r * a.scales_stride + group]);
        const F16 values_sum = to_float(splat_int(sums[r * a.sums_stride + group])) * x;
#pragma GCC unroll 2
        for (int c = 0; c < V; ++c) {
          acc[r][C + c] = fma(to_float(sum[r][c]), ws[c] * x, acc[r][C + c]);
          if constexpr (Offsets) acc[r][C + c] = fma(values_sum, wo[c], acc[r][C + c]);
        }
      }
    };
    add_group.template operator()<0>();
    if constexpr (V == 1) add_group.template operator()<1>();
  }
  store_panel<R>(acc, a, row, panel);
}

inline void linear_int4(const LinearInt4Args& a, ThreadPool& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  const int64_t dense_bytes = a.k * a.bits / 8 * kPanel;
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
                     const auto from = [&](const auto& source) {
                       if (a.weight_offsets == nullptr) {
                         int4_block<R, false>(a, first, p, source);
                       } else {
                         int4_block<R, true>(a, first, p, source);
                       }
                     };
                     const Ahead ahead = ahead_of(stored, panel_bytes, i, blocks);
                     if (a.bits == 4) return from(DenseNibbles{dense, ahead});
                     if (a.bits == 5) return from(DensePlanes<5>{dense, ahead});
                     from(DensePlanes<6>{dense, ahead});
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
