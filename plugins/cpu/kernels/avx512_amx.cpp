// What AMX adds to avx512.cpp, avx512_vnni.cpp and avx512_bf16.cpp, whose kernels take what fills no tiles.
#define EW_ISA_AVX512
#define EW_VNNI
#define EW_BF16
#include "attention.h"
#include "attention_tiles.h"
#include "experts.h"
#include "linear_tiles.h"
#include "ring_attention.h"

namespace ew {

void use_avx512_amx(KernelTable* table);

namespace {

const KernelTable& without_tiles() {
  static const KernelTable* const table = kernels_for("avx512_bf16");
  return *table;
}

void attend_by_tiles(const PagedAttentionArgs& a, Workers& pool) {
  if (!TileProducts::takes(a.cache)) return without_tiles().paged_attention(a, pool);
  attend<TileProducts>(a, pool);
}

void attend_in_a_ring_by_tiles(const RingAttentionArgs& a, Workers& pool) {
  if (!TileProducts::takes(a.attention.cache)) return without_tiles().ring_attention(a, pool);
  attend_in_a_ring<TileProducts>(a, pool);
}

void int8_by_tiles(const LinearInt8Args& a, Workers& pool) {
  const int64_t quads = (a.k + 3) / 4, size = a.weight_group > 0 ? a.weight_group : a.activation_group;
  TileLinear t;
  t.group = size > 0 ? size : quads * 4;
  t.groups = quads * 4 / (t.group + (t.group == 0));
  t.values_last = a.weight_group > 0 && a.activation_group == 0;
  t.weight_last = a.weight_group == 0 && a.activation_group > 0;
  t.values_step = t.values_last ? 0 : 1;
  t.weight_groups = a.weight_group > 0 ? t.groups : 1;
  if (a.n <= 0 || a.sparse || a.codes != nullptr || a.scale_block > 0 || t.groups * t.group != quads * 4 ||
      !t.fits(a.m))
    return without_tiles().linear_int8(a, pool);
  linear_tiles<false>(a, t, t.group * kPanel, unpack_int8, pool);
}

void int4_by_tiles(const LinearInt4Args& a, Workers& pool) {
  TileLinear t;
  t.group = a.group, t.groups = t.weight_groups = a.k / a.group;
  const bool plain = !a.sparse && a.bits == 4 && a.scale_block == 0;
  if (a.n <= 0 || !plain || !t.fits(a.m)) return without_tiles().linear_int4(a, pool);
  if (a.weight_offsets == nullptr)
    return linear_tiles<false>(a, t, t.group * kPanel / 2, unpack_int4<false>, pool);
  linear_tiles<true>(a, t, t.group * kPanel / 2, unpack_int4<true>, pool);
}

// As in peak.h: products of full tiles alone.
template <bool Bytes>
int64_t peak_of_tiles(int64_t rounds) {
  const Tiles tiles(kTile, kTileRow, kTileRow);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
  for (int64_t round = 0; round < rounds; ++round) {
    if constexpr (Bytes) {
      tile_dot_int8<0, 4, 6>(), tile_dot_int8<1, 4, 7>(), tile_dot_int8<2, 5, 6>(), tile_dot_int8<3, 5, 7>();
    } else {
      tile_dot_bf16<0, 4, 6>(), tile_dot_bf16<1, 4, 7>(), tile_dot_bf16<2, 5, 6>(), tile_dot_bf16<3, 5, 7>();
    }
  }
  return rounds * 4 * kTile * kTile * (Bytes ? kTileRow : kTileRow / 2);
}

}  // namespace

void use_avx512_amx(KernelTable* table) {
  table->peak_int8 = peak_of_tiles<true>;
  table->peak_bf16 = peak_of_tiles<false>;
  table->paged_attention = attend_by_tiles;
  table->ring_attention = attend_in_a_ring_by_tiles;
  table->linear_int8 = int8_by_tiles;
  table->grouped_linear_int8 = grouped_linear<LinearInt8Args, int8_by_tiles>;
  table->linear_int4 = int4_by_tiles;
  table->grouped_linear_int4 = grouped_linear<LinearInt4Args, int4_by_tiles>;
}

}  // namespace ew
