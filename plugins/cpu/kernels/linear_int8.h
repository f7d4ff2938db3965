// linear_int8: y[m, n] = sum over groups g of isum(m, n, g) * ws[n, g] * xs[m, g] + bias[n], where isum is
// the exact integer sum over the group's k of values[m, k] * weight[n, k].
//
// The weight is in layout panel32x4, bytes of value + 128, with the scales of groups beside it
// (group_scales.h):
//
//   weight   | k=0..3: n=0 (4 bytes), n=1, .. n=31 | k=4..7: .. | ...     [ceil(N/32)][ceil(K/4)][32][4]
//   scales   | g=0: n=0 .. 31 | g=1: .. | ...                             [ceil(N/32)][groups][32]
//
// so that 4 values of a row, broadcast, meet 16 columns in one instruction where there is VNNI, whose first
// factor has no sign. What the 128 add is taken back with the groups' sums of values. Both are exact, and so
// every instruction set has the same integers; the order of the float sums is docs/inside/numerics.md's.
//
// Per group of 32 and row VNNI takes 16 instructions, and the scales 4 more that need the same units: so four
// fifths of the peak are all there is.
//
// A weight of places in a table (`codes`) is in panel32x8, as linear_int4.h draws it. It is looked up in
// registers, or for many rows a panel at a time for all rows of a task.
//
// A weight in sparse32 (sparse_panel.h) is spread to the same bytes: in registers for a few rows, which wait
// for memory, else a panel at a time for all rows of a task.
#pragma once

#include <algorithm>

#include "dot.h"
#include "group_scales.h"
#include "kernels.h"
#include "linear_many.h"
#include "linear_sweep.h"
#include "linear_tasks.h"
#include "parallel.h"
#include "sparse_panel.h"

namespace ew {
namespace {

constexpr float kOne = 1.0f;

// The four combinations of groups in one form: a side without groups has the factor 1 in every group, which
// changes no bit, and its scale is applied at the end. With no groups there is one group over K.
struct Int8Groups {
  int64_t quads = 0, count = 0;   // the group's size in 4 k, and the number of groups
  const int32_t* sums = nullptr;  // sums[m * sums_stride + g]
  int64_t sums_stride = 0;
  const float* scales = nullptr;  // of values: scales[m * scales_stride + g], or 1
  int64_t scales_stride = 0, scales_step = 0;
  int64_t weight_groups = 1;                      // rows of a panel's scales
  bool weight_last = false, values_last = false;  // scales that are applied at the end
};

// A panel as int8_block reads it: next() goes on by 4 k, whose 16 columns quads<0>() has, and quads<1>() the
// 16 behind them. With Fetch it prefetches: not where columns are read in two passes, which compute for so
// long that the processor's own prefetches are in time.
template <int Lines>
struct DenseQuads {
  const uint8_t* w;
  Ahead ahead;
  const uint8_t* at = nullptr;
  template <bool Fetch>
  EW_INLINE void next() {
    if constexpr (Fetch) prefetch<Lines>(ahead);
    at = w;
    w += kPanel * 4;
  }
  template <int C>
  EW_INLINE Quads quads() const {
    return load_quads(at + C * 64);
  }
};
// Of a weight of places in a table: 4 k are the low halves of 128 bytes, the next 4 the high ones.
template <int Lines>
struct CodedQuads {
  const uint8_t* w;
  Ahead ahead;
  const uint8_t* codes;
  bool high = true;
  template <bool Fetch>
  EW_INLINE void next() {
    high = !high;
    if (high) {
      w += kPanel * 4;
    } else {
      if constexpr (Fetch) prefetch<Lines>(ahead);
    }
  }
  template <int C>
  EW_INLINE Quads quads() const {
    return quads_of(high ? look_up_halves<true>(w - kPanel * 4 + C * 64, codes)
                         : look_up_halves<false>(w + C * 64, codes));
  }
};
struct SparseQuads {
  SparsePanel<kSparseInt8> panel;
  template <bool>
  EW_INLINE void next() {
    panel.next();
  }
  template <int C>
  EW_INLINE Quads quads() const {
    return quads_of(spread_bytes(panel.values + C * 32, panel.places[C]));
  }
};

template <int R, class Source>
void int8_block(const LinearInt8Args& a, const Int8Groups& g, int64_t row, int64_t panel, KTile tile,
                Source source, float* out) {
  constexpr int V = int8_vectors(R);
  const int64_t quads = (a.k + 3) / 4;
  const int8_t* values = a.values + row * a.values_stride;
  const GroupScales weight_scales(a.weight_scales + panel * scales_of_panel(g.weight_groups, a.scale_block),
                                  a.scale_block);
  const float* scales = g.scales + row * g.scales_stride;
  const int32_t* sums = g.sums + row * g.sums_stride;

  F16 acc[R][2];
  begin_sums<R>(acc, tile, out);
  for (int64_t group = tile.begin, first = group * g.quads; group < tile.end; ++group) {
    const int64_t end = first + g.quads < quads ? first + g.quads : quads;
    const Source begin = source;
    const auto add_group = [&]<int C>() __attribute__((always_inline)) {  // of vectors C .. C+V-1
      source = begin;
      I16 sum[R][V];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        sum[r][0] = begin_int8(sums + r * g.sums_stride + group);
        if constexpr (V == 2) sum[r][1] = sum[r][0];
      }
      for (int64_t quad = first; quad < end; ++quad) {
        source.template next<V == 2>();
        const Quads left = source.template quads<C>(), right = source.template quads<C + V - 1>();
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const Quad x = splat_quad(values + r * a.values_stride + quad * 4);
          sum[r][0] = dot(sum[r][0], left, x);
          if constexpr (V == 2) sum[r][1] = dot(sum[r][1], right, x);
        }
      }
      if constexpr (C == 0) weight_scales.prefetch(group, kNearBytes);
      const F16 left = g.weight_last ? splat(1.0f) : weight_scales.load(group, C * 16);
      const F16 right = V == 1 ? left : g.weight_last ? splat(1.0f) : weight_scales.load(group, 16);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F16 x = splat(scales[r * g.scales_stride + group * g.scales_step]);
        acc[r][C] = fma(to_float(sum[r][0]), left * x, acc[r][C]);
        if constexpr (V == 2) acc[r][1] = fma(to_float(sum[r][1]), right * x, acc[r][1]);
      }
    };
    add_group.template operator()<0>();
    if constexpr (V == 1) add_group.template operator()<1>();
    first = end;
  }
  if (tile.end < g.count) return keep_sums<R>(acc, out);
  if (g.values_last) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F16 x = splat(a.scales[(row + r) * a.scales_stride]);
      acc[r][0] = acc[r][0] * x;
      acc[r][1] = acc[r][1] * x;
    }
  }
  if (g.weight_last) {
    const F16 left = weight_scales.load(0, 0), right = weight_scales.load(0, 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r][0] = acc[r][0] * left;
      acc[r][1] = acc[r][1] * right;
    }
  }
  keep_sums<R>(acc, out);
}

// A panel of places in a table as bytes, an even number of `quads`.
inline void look_up_panel(const uint8_t* w, const uint8_t* codes, int64_t quads, uint8_t* out) {
  for (; quads > 0; quads -= 2, w += kPanel * 4, out += kPanel * 8) {
    for (int c = 0; c < 2; ++c) {
      store_spread(out + c * 64, look_up_halves<false>(w + c * 64, codes));
      store_spread(out + kPanel * 4 + c * 64, look_up_halves<true>(w + c * 64, codes));
    }
  }
}

// The sums of values in the weight's groups, where activations have no groups of their own.
inline void sum_groups(const LinearInt8Args& a, int64_t count, int32_t* sums, Workers& pool) {
  run_rows(pool, a.m, a.k / 4 + count, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const int8_t* values = a.values + m * a.values_stride;
      for (int64_t g = 0; g < count; ++g) {
        const int64_t past = (g + 1) * a.weight_group < a.k ? (g + 1) * a.weight_group : a.k;
        int32_t sum = 0;
        for (int64_t k = g * a.weight_group; k < past; ++k) sum += values[k];
        sums[m * count + g] = sum;
      }
    }
  });
}

inline void linear_int8(const LinearInt8Args& a, Workers& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  const int64_t quads = (a.k + 3) / 4;
  Int8Groups g;
  const int64_t size = a.weight_group > 0 ? a.weight_group : a.activation_group;
  g.quads = size > 0 ? size / 4 : quads;
  g.count = quads == 0 ? 0 : (quads + g.quads - 1) / g.quads;
  g.sums = a.sums;
  g.sums_stride = a.sums_stride;
  g.weight_last = a.weight_group == 0 && a.activation_group > 0;
  g.values_last = a.weight_group > 0 && a.activation_group == 0;
  g.weight_groups = a.weight_group > 0 ? g.count : 1;
  g.scales = g.values_last ? &kOne : a.scales;
  g.scales_stride = g.values_last ? 0 : a.scales_stride;
  g.scales_step = g.values_last ? 0 : 1;
  const int64_t sums_bytes = g.values_last ? (a.m * g.count * 4 + 63) / 64 * 64 : 0;
  const int64_t spread_bytes = quads * kPanel * 4;  // a panel that is not sparse
  const int64_t halved = a.codes == nullptr ? 1 : 2;
  const int64_t panel_bytes = a.sparse ? sparse_bytes(kSparseInt8, a.k) : spread_bytes / halved;
  ManyRows many = {size, g.count, 128, a.sparse || a.codes != nullptr, panel_bytes};
  if (a.workspace == nullptr || a.weight_group != a.activation_group || !many.fits(a.m, a.k)) many.groups = 0;
  uint8_t* spare = nullptr;
  int64_t spare_of = 0;  // bytes of a worker
  if (many.groups > 0) spare_of = many.spare(std::min(a.m, tuned(pool.tuning().task_rows, kTaskRows)));
  // Panels that are made bytes once for all rows of a task.
  const bool spread =
      a.sparse ? a.m > kInt8Rows
               : a.codes != nullptr && a.workspace != nullptr && many.groups == 0 && a.m >= kManyLeast;
  if (spread && spare_of < spread_bytes) spare_of = spread_bytes;
  if (sums_bytes + spare_of > 0)
    spare = static_cast<uint8_t*>(a.workspace->reserve(sums_bytes + pool.size() * spare_of));
  if (g.values_last) {
    int32_t* sums = reinterpret_cast<int32_t*>(spare);
    sum_groups(a, g.count, sums, pool);
    g.sums = sums;
    g.sums_stride = g.count;
  }
  const int64_t group_bytes = g.quads * kPanel * 4 / halved;
  const bool full = g.count * g.quads == quads;  // no group is shorter than the others
  const KTile all = {0, g.count};
  const auto make_bytes = [&](const uint8_t* stored, uint8_t* to) {
    if (a.sparse) {
      spread_panel(SparsePanel<kSparseInt8>{stored}, quads, to);
    } else {
      look_up_panel(stored, a.codes, quads, to);
    }
  };
  linear_tasks(
      pool, a.m, a.n, a.k, panel_bytes,
      [&](int64_t panel, int64_t panel_end, int64_t row, int64_t row_end, int worker) {
        uint8_t* const own = spare + sums_bytes + worker * spare_of;
        const auto open = [&](int64_t p, uint8_t* to) -> const uint8_t* {
          const uint8_t* const stored = a.weight + p * panel_bytes;
          if (!many.opened) return stored;
          make_bytes(stored, to);
          return to;
        };
        if (many_rows(a, many, panel, panel_end, row, row_end, own, open)) return;
        if (!a.sparse && !spread && full && tiled_along_k<kInt8Rows>(g.count, row, row_end)) {
          return sweep_tiles<kInt8Rows>(
              a, a.weight, g.count, group_bytes, panel, panel_end, row, row_end,
              [&]<int R>(int64_t first, int64_t p, KTile tile, Ahead ahead, float* out) {
                const uint8_t* w = a.weight + p * panel_bytes + tile.begin * group_bytes;
                if (a.codes != nullptr) {
                  int8_block<R>(a, g, first, p, tile, CodedQuads<1>{w, ahead, a.codes}, out);
                } else {
                  int8_block<R>(a, g, first, p, tile, DenseQuads<1>{w, ahead}, out);
                }
              });
        }
        const auto dense = [&]<int R>(int64_t first, int64_t p, Ahead ahead, float* out) {
          const uint8_t* w = a.weight + p * panel_bytes;
          if (a.codes != nullptr) {
            int8_block<R>(a, g, first, p, all, CodedQuads<2>{w, ahead, a.codes}, out);
          } else {
            int8_block<R>(a, g, first, p, all, DenseQuads<2>{w, ahead}, out);
          }
        };
        if (!a.sparse && !spread)
          return sweep_panels<kInt8Rows>(a, a.weight, panel_bytes, panel, panel_end, row, row_end, dense);
        const auto sparse = [&]<int R>(int64_t first, int64_t p, Ahead, float* out) {
          int8_block<R>(a, g, first, p, all, SparseQuads{{a.weight + p * panel_bytes}}, out);
        };
        if (a.sparse && row_end - row <= kInt8Rows)
          return sweep_panels<kInt8Rows>(a, a.weight, panel_bytes, panel, panel_end, row, row_end, sparse);
        for (int64_t p = panel; p < panel_end; ++p) {
          make_bytes(a.weight + p * panel_bytes, own);
          sweep_panels<kInt8Rows>(a, a.weight, panel_bytes, p, p + 1, row, row_end,
                                  [&]<int R>(int64_t first, int64_t, Ahead ahead, float* out) {
                                    int8_block<R>(a, g, first, p, all, DenseQuads<2>{own, ahead}, out);
                                  });
        }
      },
      many.groups > 0 ? kManyBlock : 1);
}

}  // namespace
}  // namespace ew
