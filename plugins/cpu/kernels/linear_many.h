// Linears of rounded values for many rows, as prompts have: what linear_int8 and linear_int4 do with groups
// of 16 to 128 on both sides, where the instruction set says so (kManyRows). The integers are exact and
// floats are added in the same order, so the bits are those of their blocks for fewer rows.
//
// All products of 32 k are written out, so that R x 2 sums of integers, as many of floats and what they are
// made of stay in registers: in a loop over k GCC 12 keeps some of them in memory. What a group's sum of
// integers begins at is worked out once for all panels of a task: what is taken back for weights that are
// stored without a sign, -128 times the values' sum. Where weights have offsets it begins at 0, and the
// values' sum times their scale is worked out ahead.
//
// Panels are bytes in the order of panel32x4. Where a weight isn't stored so, each sweep of panels is opened
// once for all rows of the task.
//
// A few blocks go over each panel one after the other, while it is in the first-level cache; more go over the
// panels of a sweep, so that a block's values are.
#pragma once

#include <algorithm>

#include "dot.h"
#include "group_scales.h"
#include "kernels.h"
#include "linear_sweep.h"
#include "linear_tasks.h"

namespace ew {
namespace {

constexpr int64_t kManyLeast = 10;                         // rows
constexpr int64_t kOpenedLeast = 30;                       // where panels aren't stored as bytes
constexpr int kManyBlock = kManyRows > 0 ? kManyRows : 2;  // most rows of a block
constexpr int64_t kTogether = 24 / kManyBlock;             // most blocks that share a panel at a time

// What the formats come to.
struct ManyRows {
  int64_t size = 0, groups = 0;  // of k in a group, and how many
  int32_t zero = 0;              // what is stored for a weight's 0, if no offsets say it
  bool opened = false;           // panels aren't stored as bytes
  int64_t stored = 0;            // bytes of one as it is stored

  bool fits(int64_t m, int64_t k) const {
    const int64_t blocks = (m + kManyBlock - 1) / kManyBlock;
    return kManyRows > 0 && m >= (opened ? kOpenedLeast : kManyLeast) && m >= blocks * (kManyBlock - 1) &&
           (size == 16 || size == 32 || size == 64 || size == 128) && groups > 0 && groups * size == k;
  }
  int64_t panel() const { return groups * size * kPanel; }  // bytes
  int64_t numbers(int64_t rows) const { return (rows * groups * 4 + 63) / 64 * 64; }
  // Bytes of a worker, for tasks of `rows` rows, which begin at whole blocks.
  int64_t spare(int64_t rows) const {
    return numbers(rows + kManyBlock) + (opened ? std::max(panel(), kSweepBytes) : 0);
  }
};

// A block's rows as many_block reads them.
struct ManyValues {
  const int8_t* values;
  const float* scales;
  const int32_t* numbers;  // starts of sums, or the bits of products
  int64_t values_stride, scales_stride, numbers_stride;
};

// Scalars alone: a copy of an object waits until what it was written by has left the processor's queue.
template <int R, int Size, bool Offsets>
void many_block(const ManyValues& x, int64_t groups, const uint8_t* w, const uint16_t* scales_of_panel,
                const uint16_t* offsets_of_panel, int64_t scale_block, const char* ahead, int64_t step,
                float* out) {
  constexpr int kPart = Size < 32 ? Size : 32;  // k that are written out
  const GroupScales weight_scales(scales_of_panel, scale_block);
  const GroupScales weight_offsets(offsets_of_panel, scale_block);
  const int8_t* values = x.values;
  F16 acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    ahead += step;
    I16 sum[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
      sum[r][0] = sum[r][1] = splat_int(Offsets ? 0 : x.numbers[r * x.numbers_stride + g]);
    for (int part = 0; part < Size / kPart; ++part) {
#pragma GCC unroll 8
      for (int q = 0; q < kPart / 4; ++q) {
        const Quads left = load_quads(w + q * kPanel * 4), right = load_quads(w + q * kPanel * 4 + 64);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const Quad four = splat_quad(values + r * x.values_stride + q * 4);
          sum[r][0] = dot(sum[r][0], left, four);
          sum[r][1] = dot(sum[r][1], right, four);
        }
      }
      w += kPart * kPanel;
      values += kPart;
    }
    const F16 left = weight_scales.load(g, 0), right = weight_scales.load(g, 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F16 scale = splat(x.scales[r * x.scales_stride + g]);
      acc[r][0] = fma(to_float(sum[r][0]), left * scale, acc[r][0]);
      acc[r][1] = fma(to_float(sum[r][1]), right * scale, acc[r][1]);
    }
    if constexpr (Offsets) {
      const F16 first = weight_offsets.load(g, 0), second = weight_offsets.load(g, 16);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F16 product = splat(bits_as<float>(x.numbers[r * x.numbers_stride + g]));
        acc[r][0] = fma(product, first, acc[r][0]);
        acc[r][1] = fma(product, second, acc[r][1]);
      }
    }
  }
  keep_sums<R>(acc, out);
}

// open(panel, to) gives a panel's bytes, which it may have written to `to`.
template <int Size, bool Offsets, class Linear, class Open>
void many_of(const Linear& a, const ManyRows& t, int64_t panel, int64_t panel_end, int64_t row,
             int64_t row_end, uint8_t* own, const Open& open) {
  int32_t* const numbers = reinterpret_cast<int32_t*>(own);
  for (int64_t r = row; r < row_end; ++r) {
    const int32_t* const sums = a.sums + r * a.sums_stride;
    const float* const scales = a.scales + r * a.scales_stride;
    int32_t* const to = numbers + (r - row) * t.groups;
    for (int64_t g = 0; g < t.groups; ++g)
      to[g] = Offsets ? bits_as<int32_t>(static_cast<float>(sums[g]) * scales[g]) : -t.zero * sums[g];
  }
  uint8_t* const bytes = own + t.numbers(row_end - row);
  float sums[kTogether * kManyBlock * kSweepColumns];
  const int64_t fit = kSweepBytes / t.panel(), most = fit < 1 ? 1 : fit < kSweep ? fit : kSweep;
  const int64_t panels = panel_end - panel, sweeps = (panels + most - 1) / most;
  const int64_t blocks = (row_end - row + kManyBlock - 1) / kManyBlock, stored = t.stored;
  const int64_t of_scales = scales_of_panel(t.groups, a.scale_block);
  const bool together = blocks <= kTogether;
  for (int64_t s = 0; s < sweeps; ++s) {
    const int64_t begin = panel + panels * s / sweeps, end = panel + panels * (s + 1) / sweeps;
    const uint8_t* at[kSweep];
    for (int64_t p = begin; p < end; ++p) at[p - begin] = open(p, bytes + (p - begin) * t.panel());
    // All blocks together fetch the next sweep, or the next panel.
    const int64_t step = together || s + 1 < sweeps ? (stored / t.groups / 64 + blocks - 1) / blocks * 64 : 0;
    const char* ahead = reinterpret_cast<const char*>(a.weight) + (together ? 1 : end - begin) * stored;
    const auto block = [&]<int R>(int64_t first, int64_t p, const char* fetched, float* to) {
      const ManyValues x = {a.values + first * a.values_stride,
                            a.scales + first * a.scales_stride,
                            numbers + (first - row) * t.groups,
                            a.values_stride,
                            a.scales_stride,
                            t.groups};
      const uint16_t* const scales = a.weight_scales + p * of_scales;
      const uint16_t* offsets = nullptr;
      if constexpr (Offsets) offsets = a.weight_offsets + p * of_scales;
      many_block<R, Size, Offsets>(x, t.groups, at[p - begin], scales, offsets, a.scale_block,
                                   fetched + p * stored, step, to);
    };
    if (together) {
      for (int64_t p = begin; p < end; ++p) {
        for_even_blocks_of<kManyBlock>(row, row_end, [&]<int R>(int64_t first, int64_t i, int64_t) {
          float* to = sums + (first - row) * kSweepColumns + (p - begin) * kPanel;
          block.template operator()<R>(first, p, ahead + i * t.groups * step, to);
        });
      }
      store_rows(a, row, row_end - row, begin * kPanel, (end - begin) * kPanel, sums, kSweepColumns);
      continue;
    }
    for_even_blocks_of<kManyBlock>(row, row_end, [&]<int R>(int64_t first, int64_t, int64_t) {
      for (int64_t p = begin; p < end; ++p)
        block.template operator()<R>(first, p, ahead, sums + (p - begin) * kPanel);
      ahead += t.groups * step;
      store_rows(a, first, R, begin * kPanel, (end - begin) * kPanel, sums, kSweepColumns);
    });
  }
}

// Does a task whose rows are enough, for `t` that fits the call; false if they are not.
template <class Linear, class Open>
bool many_rows(const Linear& a, const ManyRows& t, int64_t panel, int64_t panel_end, int64_t row,
               int64_t row_end, uint8_t* own, const Open& open) {
  if (!t.fits(row_end - row, a.k)) return false;
  if constexpr (kManyRows > 0) {
    const auto of_size = [&]<int Size>() {
      if constexpr (requires { a.weight_offsets; }) {
        if (a.weight_offsets != nullptr)
          return many_of<Size, true>(a, t, panel, panel_end, row, row_end, own, open);
      }
      many_of<Size, false>(a, t, panel, panel_end, row, row_end, own, open);
    };
    if (t.size == 16) of_size.template operator()<16>();
    if (t.size == 32) of_size.template operator()<32>();
    if (t.size == 64) of_size.template operator()<64>();
    if (t.size == 128) of_size.template operator()<128>();
  }
  return true;
}

}  // namespace
}  // namespace ew
