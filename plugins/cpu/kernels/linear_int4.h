// linear_int4: y[m, n] = sum over groups g of isum(m, n, g) * ws[n, g] * xs[m, g] + bias[n], and where
// weights have offsets sum(m, g) * xs[m, g] * wo[n, g] in each group. isum is the exact integer sum over the
// group's k of values[m, k] * weight[n, k], and sum that of values[m, k] alone. A weight's value has 4 bits,
// or 2, 3, 5 or 6.
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
// Of 2 and 3 bits it is in planes32 too, and all bits lie in planes: two bits of the vectors v = 0 .. 3 in
// one of 64 bytes, v at place 2v, and of 3 bits the third of eight vectors in another.
//
//   2 bits   | k=0..7: v=0 .. 3 | k=8 ..                                             64 bytes for 8 k
//   3 bits   | k=0..7: v=0 .. 3 | k=8..15: v=4 .. 7 | plane | k=16 ..              192 bytes for 16 k
//
// Weights without offsets are stored + 8 (2, 4, 16, 32), which is taken back with the groups' sums of values.
// Bytes are taken apart in registers, for as many rows as these hold at a time. Every instruction
// set has the same integers; the order of the float sums is docs/inside/numerics.md's.
//
// Many rows are for linear_many.h and linear_short.h.
//
// A weight in sparse32 (sparse_panel.h) is spread to halves of bytes in registers for up to kSparseInt4Most
// rows, in blocks that may have more rows than those of a dense one, since they share the work; for more it
// is made a dense panel, once for all rows of a task, in memory that stays in the first-level cache. It has
// no offsets: what isn't kept would be one.
#pragma once

#include <algorithm>

#include "dot.h"
#include "group_scales.h"
#include "kernels.h"
#include "linear_many.h"
#if defined(EW_SHORT_SUMS)
#include "linear_short.h"
#endif
#include "linear_tasks.h"
#include "parallel.h"
#include "sparse_panel.h"

namespace ew {
namespace {

// How many octets of k sums of 16 bits have room for: 8 values make two dots.
template <int Bits>
constexpr int64_t kMostOctets = (Bits < 4 ? kNibbleDots << (4 - Bits) : kNibbleDots >> (Bits - 4)) / 2;

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
  static constexpr int kBits = Bits, kOctets = Bits % 2 == 1 ? 2 : 1, kLines = kOctets * Bits / 2;
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
    return vector<O * 4 + C>();
  }
  template <int O, int C>
  EW_INLINE Nibbles high() const {
    return vector<O * 4 + 2 + C>();
  }
  template <int V>
  EW_INLINE Nibbles vector() const {
    constexpr int kOctet = V / 4, kFirst = Bits < 4 ? 2 : 4, kMore = Bits - kFirst;
    const uint8_t* const of_octet = at + kOctet * 32 * kFirst;
    Nibbles found;
    if constexpr (Bits < 4) {
      found = quarters<V % 4>(of_octet);
    } else if constexpr (V % 4 < 2) {
      found = low_nibbles(of_octet + V % 2 * 64);
    } else {
      found = high_nibbles(of_octet + V % 2 * 64);
    }
    if constexpr (kMore > 0)
      found = with_plane<V * kMore, (1 << kMore) - 1, kFirst>(found, at + kOctets * 32 * kFirst);
    return found;
  }
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

// The values of a panel as bytes, in the order of panel32x4.
template <class Source>
void unpack_panel(Source source, int64_t k, uint8_t* out) {
  for (int64_t left = k / 8; left > 0; left -= Source::kOctets) {
    source.template next<false>();
    const auto octet = [&]<int O>() __attribute__((always_inline)) {
      store_bytes(out, source.template low<O, 0>());
      store_bytes(out + 64, source.template low<O, 1>());
      store_bytes(out + 128, source.template high<O, 0>());
      store_bytes(out + 192, source.template high<O, 1>());
      out += kPanel * 8;
    };
    octet.template operator()<0>();
    if constexpr (Source::kOctets == 2) octet.template operator()<1>();
  }
}

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

// With Group, the size of all groups is that: a loop less where one row waits for each instruction.
template <int R, bool Offsets, int64_t Group = 0, class Source>
void int4_block(const LinearInt4Args& a, int64_t row, int64_t panel, Source source) {
  constexpr int V = int4_vectors(R), kBits = Source::kBits, kOctets = Source::kOctets;
  const int64_t size = Group > 0 ? Group : a.group, groups = a.k / size;
  const int8_t* of_group = a.values + row * a.values_stride;
  const float* scales = a.scales + row * a.scales_stride;
  const int32_t* sums = a.sums + row * a.sums_stride;
  const int64_t of_panel = panel * scales_of_panel(groups, a.scale_block);
  const GroupScales weight_scales(a.weight_scales + of_panel, a.scale_block);
  const GroupScales weight_offsets((Offsets ? a.weight_offsets : a.weight_scales) + of_panel, a.scale_block);

  F16 acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  for (int64_t group = 0; group < groups; ++group, of_group += size) {
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
      for (int64_t left = size / 8; left > 0; left -= kMostOctets<kBits>) {
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

// Calls fn.template operator()<Bits, the dense panel that has them>().
template <class F>
EW_INLINE void with_bits(int64_t bits, const F& fn) {
  if (bits == 2) return fn.template operator()<2, DensePlanes<2>>();
  if (bits == 3) return fn.template operator()<3, DensePlanes<3>>();
  if (bits == 4) return fn.template operator()<4, DenseNibbles>();
  if (bits == 5) return fn.template operator()<5, DensePlanes<5>>();
  fn.template operator()<6, DensePlanes<6>>();
}

inline void linear_int4(const LinearInt4Args& a, Workers& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  const int64_t dense_bytes = a.k * a.bits / 8 * kPanel, groups = a.k / a.group;
  const int64_t panel_bytes = a.sparse ? sparse_bytes(kSparseInt4, a.k) : dense_bytes;
  const auto unpack = [&](int64_t panel, int64_t group, int64_t count, uint8_t* to) {
    const uint8_t* w = a.weight + panel * panel_bytes + group * (dense_bytes / groups);
    with_bits(a.bits, [&]<int, class Source>() { unpack_panel(Source{w, {}}, count * a.group, to); });
  };
#if defined(EW_SHORT_SUMS)
  const ShortLinear many_short(a);
  if (many_short.fits(pool)) return many_short.run(pool, unpack);
#endif
  const int32_t zero = a.weight_offsets == nullptr ? 1 << (a.bits - 1) : 0;
  ManyRows many = {a.group, groups, zero, true, panel_bytes};
  if (a.sparse || a.workspace == nullptr || !many.fits(a.m, a.k)) many.groups = 0;
  const int64_t task_rows = std::min(a.m, tuned(pool.tuning().task_rows, kTaskRows));
  const int64_t spare_bytes = std::max(many.groups > 0 ? many.spare(task_rows) : 0, dense_bytes);
  uint8_t* spare = nullptr;
  if (many.groups > 0 || (a.sparse && a.m > kSparseInt4Most))
    spare = static_cast<uint8_t*>(a.workspace->reserve(pool.size() * spare_bytes));
  const auto task = [&](int64_t panel, int64_t panel_end, int64_t row, int64_t row_end, int worker) {
    uint8_t* const own = spare == nullptr ? nullptr : spare + worker * spare_bytes;
    const auto open = [&](int64_t p, uint8_t* to) -> const uint8_t* {
      unpack(p, 0, groups, to);
      return to;
    };
    if (many_rows(a, many, panel, panel_end, row, row_end, own, open)) return;
    for (int64_t p = panel; p < panel_end; ++p) {
      const uint8_t *stored = a.weight + p * panel_bytes, *dense = stored;
      const auto of_size = [&]<int R, int64_t Group>(int64_t first, const auto& source) {
        if (a.weight_offsets == nullptr) {
          int4_block<R, false, Group>(a, first, p, source);
        } else {
          int4_block<R, true, Group>(a, first, p, source);
        }
      };
      const auto block = [&]<int R, class Source>(int64_t first, const Source& source) {
        if constexpr (R == 1) {
          if (a.group == 32) return of_size.template operator()<R, 32>(first, source);
          if constexpr (Source::kBits == 4) {
            if (a.group == 64) return of_size.template operator()<R, 64>(first, source);
          }
        }
        of_size.template operator()<R, 0>(first, source);
      };
      if (a.sparse && row_end - row <= kSparseInt4Most) {
        for_blocks_of<kSparseInt4Rows>(row, row_end, [&]<int R>(int64_t first, int64_t, int64_t) {
          int4_block<R, false>(a, first, p, SparseNibbles{stored});
        });
        continue;
      }
      if (a.sparse) {
        spread_panel(SparsePanel<kSparseInt4>{stored}, a.k / 8, own);
        dense = own;
      }
      const auto packed = [&]<int R>(int64_t first, int64_t i, int64_t blocks) {
        const Ahead ahead = ahead_of(stored, panel_bytes, i, blocks);
        with_bits(a.bits,
                  [&]<int, class Source>() { block.template operator()<R>(first, Source{dense, ahead}); });
      };
      if (row_end - row <= kInt4Alone) {
        for_blocks_of<kInt4Alone>(row, row_end, packed);
      } else {
        for_blocks_of<kInt4Rows>(row, row_end, packed);
      }
    }
  };
  linear_tasks(pool, a.m, a.n, a.k, panel_bytes, task, many.groups > 0 ? kManyBlock : 1);
}

}  // namespace
}  // namespace ew
