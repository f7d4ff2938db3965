// The two products of attention on AMX, for the 16 rows of a tile and the keys of a step: see tiles.h.
//
// A score is a sum over tiles of the head size, of as many d as divide it (32 at most): from 0, each tile's
// product added in ascending order. p.v is a sum over the blocks of the step, one tile deep each, from 0 in
// ascending order; then o = fma(o, factor, that sum) + 0. The last makes -0 to 0, which hides whether blocks
// of which the row sees nothing were among them: the rows of a tile share theirs.
//
// Blocks are read whole: of a slot that no row sees the weight is 0, and its value must be finite.
#pragma once

#include "attention_products.h"
#include "tiles.h"

namespace ew {
namespace {

struct TileProducts : PairProducts {
  static constexpr int kRows = kTile;
  static constexpr bool kTiles = true;
  static constexpr int64_t kLeastDepth = 8;

  static int64_t depth(const KvCache& c) { return tile_depth(c.key_size, 2, 32); }
  static bool takes(const KvCache& c) {
    return c.format != KvFormat::f32 && depth(c) >= kLeastDepth && c.value_size % kTile == 0;
  }

  // scores[r][slot] of blocks first .. past-1, for `tile_rows` rows, from q.
  static void scores(const KvCache& c, const uint16_t* q, const uint16_t* const* k, int64_t first,
                     int64_t past, float* out) {
    const int64_t deep = depth(c), size = c.key_size;
    int64_t b = first;
    for (; b + 1 < past; b += 2) {
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      for (int64_t d = 0; d < size; d += deep) {
        const uint16_t *left = k[b] + d * kBlock, *right = k[b + 1] + d * kBlock;
        tile_load<4>(q + d, size * 2);
        tile_load<6>(left, kBlock * 4);
        tile_dot_bf16<0, 4, 6>();
        tile_load<6>(left + 32, kBlock * 4);
        tile_dot_bf16<1, 4, 6>();
        tile_load<6>(right, kBlock * 4);
        tile_dot_bf16<2, 4, 6>();
        tile_load<6>(right + 32, kBlock * 4);
        tile_dot_bf16<3, 4, 6>();
      }
      float* to = out + b * kBlock;
      tile_store<0>(to, kStep * 4), tile_store<1>(to + 16, kStep * 4);
      tile_store<2>(to + 32, kStep * 4), tile_store<3>(to + 48, kStep * 4);
    }
    if (b == past) return;
    tile_zero<0>(), tile_zero<1>();
    for (int64_t d = 0; d < size; d += deep) {
      const uint16_t* block = k[b] + d * kBlock;
      tile_load<4>(q + d, size * 2);
      tile_load<6>(block, kBlock * 4);
      tile_dot_bf16<0, 4, 6>();
      tile_load<6>(block + 32, kBlock * 4);
      tile_dot_bf16<1, 4, 6>();
    }
    tile_store<0>(out + b * kBlock, kStep * 4), tile_store<1>(out + b * kBlock + 16, kStep * 4);
  }

  // o[r] = fma(o[r], factors[r], p.v) + 0, for blocks first .. past-1.
  static void values(const uint16_t* p, const uint16_t* const* v, int64_t first, int64_t past, int64_t width,
                     int64_t rows, const float* factors, float* o) {
    int64_t c = 0;
    for (; c + 64 <= width; c += 64) {
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      for (int64_t b = first; b < past; ++b) {
        const uint16_t* block = v[b] + c * 2;
        tile_load<5>(p + b * kBlock, kStep * 2);
        tile_load<7>(block, width * 4);
        tile_dot_bf16<0, 5, 7>();
        tile_load<7>(block + 32, width * 4);
        tile_dot_bf16<1, 5, 7>();
        tile_load<7>(block + 64, width * 4);
        tile_dot_bf16<2, 5, 7>();
        tile_load<7>(block + 96, width * 4);
        tile_dot_bf16<3, 5, 7>();
      }
      alignas(64) float sums[kTile * 64];
      tile_store<0>(sums, 256), tile_store<1>(sums + 16, 256);
      tile_store<2>(sums + 32, 256), tile_store<3>(sums + 48, 256);
      for (int64_t r = 0; r < rows; ++r) {
        float* to = o + r * width + c;
        const F16 factor = splat(factors[r]);
        for (int i = 0; i < 64; i += 16)
          store(to + i, fma(load(to + i), factor, load(sums + r * 64 + i)) + zero());
      }
    }
    for (; c < width; c += 16) {
      tile_zero<0>();
      for (int64_t b = first; b < past; ++b) {
        tile_load<5>(p + b * kBlock, kStep * 2);
        tile_load<7>(v[b] + c * 2, width * 4);
        tile_dot_bf16<0, 5, 7>();
      }
      alignas(64) float sums[kTile * 16];
      tile_store<0>(sums, 64);
      for (int64_t r = 0; r < rows; ++r) {
        float* to = o + r * width + c;
        store(to, fma(load(to), splat(factors[r]), load(sums + r * 16)) + zero());
      }
    }
  }

  // The same for one row, of which the slots begin .. end-1 of some blocks are seen. The others' values may
  // be anything.
  static void values_of_row(const uint16_t* p, const uint16_t* const* v, int64_t begin, int64_t end,
                            uint32_t seen_blocks, int64_t width, const float* factor, float* o) {
    alignas(64) uint16_t row[kTile * kStep] = {}, seen[kStepBlocks][kBlock * kTile];
    __builtin_memcpy(row, p, kStep * sizeof *p);
    const int64_t first = begin / kBlock, past = (end + kBlock - 1) / kBlock;
    const uint16_t* blocks[kStepBlocks] = {};
    for (int64_t c = 0; c < width; c += kTile) {
      for (int64_t b = first; b < past; ++b) {
        for (int64_t slot = 0; slot < kBlock; ++slot) {
          const bool sees =
              b * kBlock + slot >= begin && b * kBlock + slot < end && (seen_blocks >> b & 1u) != 0;
          for (int64_t i = 0; i < kTile; ++i) {
            seen[b][slot / 2 * 32 + i * 2 + slot % 2] =
                sees ? v[b][(slot / 2 * width + c + i) * 2 + slot % 2] : uint16_t{0};
          }
        }
        blocks[b] = seen[b];
      }
      values(row, blocks, first, past, kTile, 1, factor, o + c);
    }
  }

  struct Scope {
    Tiles tiles;
    Scope(const KvCache& c, int64_t rows)
        : tiles((rows + (rows + kTile - 1) / kTile - 1) / ((rows + kTile - 1) / kTile), depth(c) * 2,
                kBlock * 2) {}
  };
};

}  // namespace
}  // namespace ew
