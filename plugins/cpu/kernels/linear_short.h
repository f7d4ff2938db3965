// linear_int4 for many rows, as prompts have, where products of bytes are sums of 16 bits (with VNNI see
// linear_many.h). The integers are exact and floats are added in the same order, so the bits are those of
// int4_block.
//
// A task goes over its panels in chunks of some groups along K. A chunk's values become bytes, in the order
// of panel32x4, and its scales floats, once for all rows of the task. Both stay in the first-level cache,
// while the rows' sums come from memory and go back.
//
// A value w of B bits is stored as w + 2^(B-1). The sum over Q quads of a column is in two lanes of 16 bits:
// those of the first pairs of k, and of the second. Each begins at what is taken back, -2^(B-1) times the sum
// of its x, which is worked out once for all panels of a task. So a lane's sum is at most Q 2 2^(B-1) 127,
// and has room where its intermediate sums, which wrap around, have none.
//
//   lanes      | n=0: k, k+1 of each quad | n=0: k+2, k+3 | n=1: ..
//   starts     | -2^(B-1) (x[k] + x[k+1] + ..) | -2^(B-1) (x[k+2] + x[k+3] + ..)
//
// Where weights have offsets, values have no sign, and lanes begin at 0: a sum is at most Q 2 (2^B - 1) 127.
//
// With AVX2 a group of 32 values of 4 bits, of 6 rows and 16 columns, takes 96 products and 84 sums of 16
// bits, and for its integers and floats 12 times 4 instructions, with offsets 12 times 5. Of these 132 or 144
// need the two units that multiply: 46 or 43 multiply-adds a cycle are all there is.
#pragma once

#include <algorithm>

#include "dot.h"
#include "group_scales.h"
#include "kernels.h"
#include "linear_tasks.h"

namespace ew {
namespace {

constexpr int64_t kShortLeast = 30;                // rows
constexpr int64_t kShortChunk = 16384;             // bytes of a chunk's values, if groups allow
constexpr int64_t kShortBytes = int64_t{1} << 18;  // of the values of a task's rows

// Groups along K of a panel, with their values as bytes.
struct ShortChunk {
  int64_t first, groups;
  uint8_t* values;
  float *scales, *offsets;  // [groups][32]
};
// A block's rows: the number of the first, and from there on what begin_row() wrote and sums [rows][32].
struct ShortRows {
  int64_t first;
  const int32_t* numbers;
  float* sums;
};

// Of 4, 8 or 16 quads of values: -2^shift times the sum of the first two of each, and of the last two, in 16
// bits each.
EW_INLINE int32_t minus_pair_sums(const int8_t* values, int64_t quads, int shift) {
  const __m128i ones = _mm_set1_epi8(1);
  __m128i sum = _mm_setzero_si128();
  for (int64_t q = 0; q < quads; q += 4) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + 4 * q));
    sum = _mm_sub_epi16(sum, _mm_maddubs_epi16(ones, x));
  }
  sum = _mm_add_epi16(sum, _mm_unpackhi_epi64(sum, sum));
  sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 1));
  return _mm_cvtsi128_si32(_mm_sll_epi16(sum, _mm_cvtsi32_si128(shift)));
}

class ShortLinear {
 public:
  explicit ShortLinear(const LinearInt4Args& args) : a_(args), groups_(a_.k / a_.group) {
    const int64_t largest = a_.weight_offsets != nullptr ? (1 << a_.bits) - 1 : 1 << (a_.bits - 1);
    for (const int64_t quads : {16, 8, 4}) {
      if (part_ == 0 && quads * 2 * 127 * largest <= 32767 && a_.group % (4 * quads) == 0) part_ = quads;
    }
    parts_ = part_ == 0 ? 0 : a_.group / (4 * part_);
    numbers_ = a_.weight_offsets != nullptr ? groups_ : groups_ * parts_;
  }
  // The rows of every task make blocks of kShortRows, or one less, unless a tuning makes tasks smaller.
  bool fits(const Workers& pool) const {
    const int64_t rows = tuned(pool.tuning().task_rows, kTaskRows);
    return part_ > 0 && groups_ > 0 && !a_.sparse && a_.workspace != nullptr && a_.m >= kShortLeast &&
           evenly<kShortRows>(a_.m) && (rows >= kTaskRows || rows >= a_.m);
  }

  // unpack(panel, first group, how many, to) writes values as bytes.
  template <class Unpack>
  void run(Workers& pool, const Unpack& unpack) const {
    const int64_t chunk = std::clamp<int64_t>(kShortChunk / (a_.group * kPanel), 1, groups_);
    const int64_t fit = kShortBytes / a_.k, panels = (a_.n + kPanel - 1) / kPanel;
    // As many rows as stay in the second-level cache, if there are panels enough for all threads.
    const int64_t most =
        tuned(pool.tuning().task_rows, fit < kTaskRows || panels < 4 * pool.size() ? kTaskRows : fit);
    const int64_t rows = std::min(a_.m, most + kShortRows);  // tasks begin at whole blocks
    const int64_t sums_bytes = rows * kPanel * 4, scales_bytes = chunk * kPanel * 4;
    const int64_t numbers_bytes = (rows * numbers_ * 4 + 63) / 64 * 64;
    const int64_t own_bytes = sums_bytes + 2 * scales_bytes + numbers_bytes + chunk * a_.group * kPanel;
    uint8_t* const memory = static_cast<uint8_t*>(a_.workspace->reserve(pool.size() * own_bytes));
    const auto task = [&](int64_t panel, int64_t panel_end, int64_t row, int64_t row_end, int worker) {
      uint8_t* at = memory + worker * own_bytes;
      const auto next = [&](int64_t bytes) {
        at += bytes;
        return at - bytes;
      };
      float* const sums = reinterpret_cast<float*>(next(sums_bytes));
      int32_t* const numbers = reinterpret_cast<int32_t*>(next(numbers_bytes));
      ShortChunk c = {};
      c.scales = reinterpret_cast<float*>(next(scales_bytes));
      c.offsets = reinterpret_cast<float*>(next(scales_bytes));
      c.values = at;
      for (int64_t r = row; r < row_end; ++r) begin_row(r, numbers + (r - row) * numbers_);
      for (int64_t p = panel; p < panel_end; ++p) {
        std::fill_n(sums, (row_end - row) * kPanel, 0.0f);
        for (c.first = 0; c.first < groups_; c.first += chunk) {
          c.groups = std::min(chunk, groups_ - c.first);
          unpack(p, c.first, c.groups, c.values);
          widen(a_.weight_scales, p, c, c.scales);
          if (a_.weight_offsets != nullptr) widen(a_.weight_offsets, p, c, c.offsets);
          for_even_blocks_of<kShortRows>(row, row_end, [&]<int R>(int64_t first, int64_t, int64_t) {
            const int64_t block = first - row;
            add_chunk<R>({first, numbers + block * numbers_, sums + block * kPanel}, c);
          });
        }
        store_rows(a_, row, row_end - row, p * kPanel, kPanel, sums, kPanel);
      }
    };
    linear_tasks(pool, a_.m, a_.n, a_.k, a_.k * a_.bits / 8 * kPanel, task, kShortRows, most);
  }

 private:
  // Writes the numbers at which a row's sums begin; with offsets, the sums of its groups times their scales.
  void begin_row(int64_t row, int32_t* to) const {
    const int8_t* values = a_.values + row * a_.values_stride;
    const int32_t* sums = a_.sums + row * a_.sums_stride;
    const float* scales = a_.scales + row * a_.scales_stride;
    for (int64_t i = 0; i < numbers_; ++i) {
      to[i] = a_.weight_offsets != nullptr
                  ? bits_as<int32_t>(static_cast<float>(sums[i]) * scales[i])
                  : minus_pair_sums(values + i * 4 * part_, part_, static_cast<int>(a_.bits) - 1);
    }
  }
  void widen(const uint16_t* scales, int64_t panel, const ShortChunk& c, float* to) const {
    const GroupScales of_panel(scales + panel * scales_of_panel(groups_, a_.scale_block), a_.scale_block);
    for (int64_t g = 0; g < c.groups; ++g, to += kPanel) {
      store(to, of_panel.load(c.first + g, 0));
      store(to + 16, of_panel.load(c.first + g, 16));
    }
  }

  template <int R>
  void add_chunk(const ShortRows& rows, const ShortChunk& chunk) const {
    const auto of_size = [&]<int Q>() __attribute__((always_inline)) {
      const auto with = [&]<bool Offsets>() __attribute__((always_inline)) {
        if (parts_ == 1) return add_groups<R, Q, Offsets, true>(rows, chunk);
        add_groups<R, Q, Offsets, false>(rows, chunk);
      };
      if (a_.weight_offsets != nullptr) return with.template operator()<true>();
      with.template operator()<false>();
    };
    if (part_ == 4) return of_size.template operator()<4>();
    if (part_ == 8) return of_size.template operator()<8>();
    of_size.template operator()<16>();
  }
  template <int R, int Q, bool Offsets, bool OnePart>
  __attribute__((noinline)) void add_groups(const ShortRows& rows, const ShortChunk& chunk) const {
    constexpr int V = kShortVectors;
    // Copies: a store of sums might change what is behind a pointer, so that GCC would read it again.
    const int64_t stride = a_.values_stride, scales_stride = a_.scales_stride, step = numbers_;
    const int64_t groups = chunk.groups, parts = parts_;
    for (int64_t c = 0; c < kPanel; c += 16 * V) {
      const uint8_t* w = chunk.values + c * 4;
      const int8_t* values = a_.values + rows.first * stride + chunk.first * a_.group;
      const float* scales = a_.scales + rows.first * scales_stride + chunk.first;
      const float *ws = chunk.scales + c, *wo = chunk.offsets + c;
      const int32_t* numbers = rows.numbers + chunk.first * (Offsets ? 1 : parts);
      float* sums = rows.sums + c;
      for (int64_t g = 0; g < groups; ++g, ws += kPanel, wo += kPanel) {
        I16 sum[R][V];
        int64_t part = 0;
        do {
          ShortSum dots[R][V];
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) dots[r][v] = begin_short(Offsets ? nullptr : numbers + r * step);
          }
#pragma GCC unroll 16
          for (int q = 0; q < Q; ++q, w += kPanel * 4) {
            Nibbles quad[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) quad[v] = load_bytes(w + v * 64);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
              const Bytes x = splat_bytes(values + r * stride + q * 4);
#pragma GCC unroll 2
              for (int v = 0; v < V; ++v) {
                dots[r][v] =
                    Offsets && q == 0 ? first_dot(dots[r][v], quad[v], x) : dot(dots[r][v], quad[v], x);
              }
            }
          }
          values += Q * 4;
          numbers += Offsets ? 0 : 1;
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
              sum[r][v] = OnePart || part == 0 ? pairs_of(dots[r][v]) : end_dots(sum[r][v], dots[r][v]);
          }
        } while (!OnePart && ++part < parts);
        asm volatile("" : "+r"(sums));  // in memory from group to group: kept elsewhere they are stored twice
        F16 weight_scales[V], weight_offsets[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          weight_scales[v] = load(ws + v * 16);
          if constexpr (Offsets) weight_offsets[v] = load(wo + v * 16);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const F16 scale = splat(scales[r * scales_stride + g]);
          float* const to = sums + r * kPanel;
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) {
            F16 acc = fma(to_float(sum[r][v]), weight_scales[v] * scale, load(to + v * 16));
            if constexpr (Offsets)
              acc = fma(splat(bits_as<float>(numbers[r * step + g])), weight_offsets[v], acc);
            store(to + v * 16, acc);
          }
        }
      }
    }
  }

  const LinearInt4Args& a_;
  int64_t groups_, part_ = 0, parts_ = 0;  // part: quads of a sum of 16 bits, parts: how many a group has
  int64_t numbers_ = 0;                    // of a row
};

}  // namespace
}  // namespace ew
