#include "kv_cache.h"

#include <cstring>

#include "../cpu/kernels/kv_format.h"

namespace ew {

void read_cache(const KvCache& c, int64_t blocks, float* k, float* v) {
  const int64_t pieces = c.pieces(blocks);
  if (c.format == KvFormat::f32) {  // whose pieces are what is asked for
    const int64_t keys = kv_piece_bytes(c.format, c.key_size),
                  values = kv_piece_bytes(c.format, c.value_size);
    for (int64_t i = 0; i < pieces; ++i) {
      std::memcpy(k + i * kBlock * c.key_size, key_piece(c, 0, i), static_cast<size_t>(keys));
      std::memcpy(v + i * kBlock * c.value_size, value_piece(c, 0, i), static_cast<size_t>(values));
    }
    return;
  }
  const auto scale_of = [&](const char* piece, int64_t size, int64_t slot) {
    float scale = 1;
    if (has_scales(c.format)) std::memcpy(&scale, piece + kBlock * size + slot * 4, sizeof scale);
    return scale;
  };
  for (int64_t i = 0; i < pieces; ++i) {
    const char *keys = key_piece(c, 0, i), *values = value_piece(c, 0, i);
    for (int64_t slot = 0; slot < kBlock; ++slot) {
      with_elements(c.format, keys, [&](const auto* from, const auto& convert) {
        const float scale = scale_of(keys, c.key_size, slot);
        for (int64_t d = 0; d < c.key_size; ++d)
          k[(i * c.key_size + d) * kBlock + slot] = convert(from[key_place(c.key_size, slot, d)]) * scale;
      });
      with_elements(c.format, values, [&](const auto* from, const auto& convert) {
        const float scale = scale_of(values, c.value_size, slot);
        for (int64_t d = 0; d < c.value_size; ++d)
          v[(i * kBlock + slot) * c.value_size + d] =
              convert(from[value_place(c.value_size, slot, d)]) * scale;
      });
    }
  }
}

}  // namespace ew
