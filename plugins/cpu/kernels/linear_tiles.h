// linear_int8 and linear_int4 on AMX, for as many rows as make it worth while: see tiles.h. The integers are
// exact, and floats are added as in linear_int8.h and linear_int4.h: the same bits.
//
// A task takes its panels one by one, along K in chunks of whole groups. A chunk is unpacked to bytes with a
// sign, which all rows share in the first-level cache:
//
//   stored   | k=0..3: n=0 .. n=31 | k=4..7: .. | ..          unpacked   | k=0..3: n=0 .. n=15 | k=4..7: .. |
//                                                                        | k=0..3: n=16 .. n=31 | .. |
//
// Of a block of rows and 16 columns the sums of each group are a tile C, from one product, or from several in
// groups that are deeper than a tile. Those of a chunk are stored; then they are read as vectors and added to
// the block's floats, which stay in registers. One after the other: while tiles are at work, vectors have
// half of their units (measured on a Xeon of the fourth generation).
#pragma once

#include "kernels.h"
#include "linear_sweep.h"
#include "linear_tasks.h"
#include "tiles.h"

namespace ew {
namespace {

constexpr int64_t kBatchRows = 192;     // rows that share an unpacked chunk
constexpr int64_t kLeastTileRows = 32;  // of a call: with fewer, reading weights as one even stream is faster
constexpr int64_t kLeastTileDepth = 32;                    // a shallower tile is slower than VNNI
constexpr int64_t kChunk = 192;                            // k of a chunk
constexpr int64_t kLongestGroup = 4096;                    // and of a single group
constexpr int64_t kMostScales = 8192;                      // of a batch
constexpr int64_t kMostGroups = kChunk / kLeastTileDepth;  // of a chunk

// What both formats come to. A side without groups has scale 1 in all of them, and its own at the end.
struct TileLinear {
  int64_t group = 0, groups = 0;  // k, and how many
  int64_t values_step = 1;        // of a.scales from group to group; 0: 1 in all of them
  int64_t weight_groups = 1;      // rows of a panel's scales
  bool weight_last = false, values_last = false;

  int64_t depth() const { return tile_depth(group, 4, kTileRow); }
  int64_t batch() const {  // rows
    const int64_t most = kMostScales / groups / kTile * kTile;
    return most < kBatchRows ? most : kBatchRows;
  }
  bool fits(int64_t m) const {
    const int64_t filled = (m + kTile - 1) / kTile * kTile;
    return m >= kLeastTileRows && m * 5 >= filled * 4 && groups > 0 && depth() >= kLeastTileDepth &&
           group <= kLongestGroup && batch() > 0;
  }
};

// Bytes with a sign of `quads` times 4 k: of columns 0 .. 15, then of 16 .. 31.
EW_INLINE void unpack_int8(const uint8_t* w, int64_t quads, int8_t* to) {
  const __m512i sign = _mm512_set1_epi8(-128);
  for (int64_t q = 0; q < quads; ++q, w += kPanel * 4, to += kTileRow) {
    _mm512_store_si512(to, _mm512_xor_si512(_mm512_loadu_si512(w), sign));
    _mm512_store_si512(to + quads * kTileRow, _mm512_xor_si512(_mm512_loadu_si512(w + kTileRow), sign));
  }
}
template <bool Offsets>
EW_INLINE void unpack_int4(const uint8_t* w, int64_t quads, int8_t* to) {
  const __m512i zero = _mm512_set1_epi8(Offsets ? 0 : 8);
  for (int64_t q = 0; q < quads; q += 2, w += kPanel * 4, to += 2 * kTileRow) {
    for (int c = 0; c < 2; ++c) {
      int8_t* half = to + c * quads * kTileRow;
      _mm512_store_si512(half, _mm512_sub_epi8(low_nibbles(w + c * kTileRow).v, zero));
      _mm512_store_si512(half + kTileRow, _mm512_sub_epi8(high_nibbles(w + c * kTileRow).v, zero));
    }
  }
}

// Rows of a task that share what is unpacked, in blocks of a tile or of one row less. Their scales, and with
// Offsets the values' sums times these, are copied for vectors of which a row's are `kTile` apart.
struct TileBatch {
  int64_t row, rows, blocks;
  alignas(64) float scales[kMostScales];
  alignas(64) float shifts[kMostScales];
  alignas(64) int8_t panel[kLongestGroup * kPanel];
  alignas(64) float sums[kBatchRows * kSweepColumns];
  alignas(64) int32_t tiles[kMostGroups][2][kTile * kTile];  // of a block; rows past its own are unused

  int64_t first(int64_t block) const { return row + rows * block / blocks; }
  int64_t tile_rows() const { return (rows + blocks - 1) / blocks; }
};

template <bool Offsets, class Linear>
void begin_batch(const Linear& a, const TileLinear& t, TileBatch& batch) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i last = _mm512_set1_epi32(static_cast<int>(batch.tile_rows() - 1));
  const __m512i row = _mm512_min_epi32(lane, last);
  const auto at = [&](int64_t stride) {
    return _mm512_mullo_epi32(row, _mm512_set1_epi32(static_cast<int>(stride)));
  };
  const __m512i scale_at = at(a.scales_stride), sum_at = at(a.sums_stride);
  for (int64_t block = 0; block < batch.blocks; ++block) {
    const float* scales = a.scales + batch.first(block) * a.scales_stride;
    [[maybe_unused]] const int32_t* sums = a.sums + batch.first(block) * a.sums_stride;
    for (int64_t g = 0; g < t.groups; ++g) {
      const int64_t to = (block * t.groups + g) * kTile;
      const F16 scale = {t.values_step == 0 ? _mm512_set1_ps(1.0f)
                                            : _mm512_i32gather_ps(scale_at, scales + g, 4)};
      store(batch.scales + to, scale);
      if constexpr (Offsets)
        store(batch.shifts + to, to_float(lanes(_mm512_i32gather_epi32(sum_at, sums + g, 4))) * scale);
    }
  }
}

// The sums of groups begin .. begin+count-1, of a panel that is unpacked, to batch.tiles.
template <class Linear>
void multiply_tiles(const Linear& a, const TileLinear& t, TileBatch& batch, int64_t block, int64_t begin,
                    int64_t count) {
  const int64_t depth = t.depth(), stride = a.values_stride;
  const int8_t* x = a.values + batch.first(block) * stride + begin * t.group;
  const int8_t *left = batch.panel, *right = left + count * t.group * kTile;
  const auto tiles = [&]<int C>() {
    tile_zero<C>(), tile_zero<C + 1>();
    const int8_t* const end = x + t.group;
    for (; x < end; x += depth, left += depth * kTile, right += depth * kTile) {
      tile_load<4>(x, stride);
      tile_load<6>(left, kTileRow);
      tile_dot_int8<C, 4, 6>();
      tile_load<7>(right, kTileRow);
      tile_dot_int8<C + 1, 4, 7>();
    }
  };
  int64_t g = 0;
  for (; g + 2 <= count; g += 2) {
    tiles.template operator()<0>(), tiles.template operator()<2>();
    tile_store<0>(batch.tiles[g][0], kTileRow), tile_store<1>(batch.tiles[g][1], kTileRow);
    tile_store<2>(batch.tiles[g + 1][0], kTileRow), tile_store<3>(batch.tiles[g + 1][1], kTileRow);
  }
  if (g == count) return;
  tiles.template operator()<0>();
  tile_store<0>(batch.tiles[g][0], kTileRow), tile_store<1>(batch.tiles[g][1], kTileRow);
}

// Adds them to the floats of 16 columns at `sums`. ws and wo: their scales and offsets of group `begin`.
template <bool Offsets>
void add_tiles(const TileLinear& t, const TileBatch& batch, int64_t block, int64_t half, int64_t begin,
               int64_t count, const uint16_t* ws, [[maybe_unused]] const uint16_t* wo, float* sums) {
  F16 acc[kTile];
#pragma GCC unroll 16
  for (int r = 0; r < kTile; ++r) acc[r] = begin == 0 ? splat(0.0f) : load(sums + r * kSweepColumns);
  const float* x = batch.scales + (block * t.groups + begin) * kTile;
  [[maybe_unused]] const float* shift = batch.shifts + (block * t.groups + begin) * kTile;
  for (int64_t g = 0; g < count; ++g, x += kTile, shift += kTile) {
    const int32_t* isum = batch.tiles[g][half];
    const F16 w = t.weight_last ? splat(1.0f) : load_half(ws + g * kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < kTile; ++r)
      acc[r] = fma(to_float(lanes(_mm512_load_si512(isum + r * kTile))), w * splat(x[r]), acc[r]);
    if constexpr (Offsets) {
      const F16 offset = load_half(wo + g * kPanel);
#pragma GCC unroll 16
      for (int r = 0; r < kTile; ++r) acc[r] = fma(splat(shift[r]), offset, acc[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTile; ++r) store(sums + r * kSweepColumns, acc[r]);
}

// A batch's columns of panels panel .. panel_end-1 to y.
template <class Linear>
void store_batch(const Linear& a, const TileLinear& t, TileBatch& batch, int64_t panel, int64_t panel_end) {
  const int64_t columns = (panel_end - panel) * kPanel;
  for (int64_t b = 0; b < batch.blocks; ++b) {
    const int64_t first = batch.first(b), rows = batch.first(b + 1) - first;
    float* sums = batch.sums + b * kTile * kSweepColumns;
    for (int64_t r = 0; r < rows && (t.values_last || t.weight_last); ++r) {
      for (int64_t c = 0; c < columns; c += kTile) {
        float* at = sums + r * kSweepColumns + c;
        if (t.values_last) store(at, load(at) * splat(a.scales[(first + r) * a.scales_stride]));
        if (t.weight_last) store(at, load(at) * load_half(a.weight_scales + panel * kPanel + c));
      }
    }
    store_rows(a, first, rows, panel * kPanel, columns, sums, kSweepColumns);
  }
}

// group_bytes: those of a group as it is stored. unpack(stored, quads of k, to)
template <bool Offsets, class Linear, class Unpack>
void linear_tiles(const Linear& a, const TileLinear& t, int64_t group_bytes, const Unpack& unpack,
                  Workers& pool) {
  const int64_t step = t.group < kChunk ? kChunk / t.group : 1, most = t.batch();
  const auto panel_of = [&](TileBatch& batch, int64_t p, float* sums) {
    for (int64_t g = 0; g < t.groups; g += step) {
      const int64_t count = g + step < t.groups ? step : t.groups - g;
      const uint8_t* stored = a.weight + (p * t.groups + g) * group_bytes;
      unpack(stored, count * t.group / 4, batch.panel);
      const uint8_t* later = stored + count * group_bytes;  // each block fetches a piece of the next chunk
      const int64_t piece = count * group_bytes / batch.blocks;
      for (int64_t block = 0; block < batch.blocks; ++block, later += piece) {
        for (int64_t i = 0; i < piece; i += 64) __builtin_prefetch(later + i, 0, 3);
        multiply_tiles(a, t, batch, block, g, count);
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t at = (t.weight_last ? 0 : p * t.weight_groups + g) * kPanel + half * kTile;
          const uint16_t* wo = nullptr;
          if constexpr (Offsets) wo = a.weight_offsets + at;
          add_tiles<Offsets>(t, batch, block, half, g, count, a.weight_scales + at, wo,
                             sums + block * kTile * kSweepColumns + half * kTile);
        }
      }
    }
  };
  linear_tasks(
      pool, a.m, a.n, a.k, t.groups * group_bytes,
      [&](int64_t panel, int64_t panel_end, int64_t row, int64_t row_end) {
        TileBatch batch;
        const int64_t batches = (row_end - row + most - 1) / most;
        for (int64_t i = 0; i < batches; ++i) {
          batch.row = row + (row_end - row) * i / batches;
          batch.rows = row + (row_end - row) * (i + 1) / batches - batch.row;
          batch.blocks = (batch.rows + kTile - 1) / kTile;
          begin_batch<Offsets>(a, t, batch);
          const Tiles tiles(batch.tile_rows(), t.depth(), t.depth());
          for (int64_t begin = panel; begin < panel_end; begin += kSweep) {
            const int64_t end = begin + kSweep < panel_end ? begin + kSweep : panel_end;
            for (int64_t p = begin; p < end; ++p) panel_of(batch, p, batch.sums + (p - begin) * kPanel);
            store_batch(a, t, batch, begin, end);
          }
        }
      },
      kTile, kBatchRows);
}

}  // namespace
}  // namespace ew
