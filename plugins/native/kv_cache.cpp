#include "kv_cache.h"

#include <cstring>
#include <vector>

#include "../cpu/kernels/kv_format.h"

namespace ew {
namespace {

// Calls put(slot, d, value) for a piece of few bits, whose codes are rotated back. Sums of codes are exact.
template <class Put>
void read_few_bits(KvFormat format, Side side, const char* piece, int64_t size, const Put& put) {
  std::vector<int8_t> codes(static_cast<size_t>(kBlock * size));
  std::vector<float> row(static_cast<size_t>(size));
  float scales[kBlock];
  expand(format, side, piece, size, codes.data());
  load_scales(format, side, piece, size, scales);
  for (int64_t slot = 0; slot < kBlock; ++slot) {
    for (int64_t d = 0; d < size; ++d) {
      const int64_t at = side == Side::keys ? key_place(size, slot, d) : value_place(size, slot, d);
      row[static_cast<size_t>(d)] = codes[static_cast<size_t>(at)];
    }
    turn(row.data(), size);
    const float scale = scales[slot] * other_share(size);
    for (int64_t d = 0; d < size; ++d) put(slot, d, row[static_cast<size_t>(d)] * scale);
  }
}

// Values that are a part of keys, from these: k [D, 32] and v [32, Dv] of each piece.
void take_values(const KvCache& c, int64_t pieces, const float* k, float* v) {
  for (int64_t i = 0; i < pieces; ++i) {
    for (int64_t slot = 0; slot < kBlock; ++slot) {
      for (int64_t d = 0; d < c.value_size; ++d)
        v[(i * kBlock + slot) * c.value_size + d] = k[(i * c.key_size + d) * kBlock + slot];
    }
  }
}

}  // namespace

void read_cache(const KvCache& c, int64_t blocks, float* k, float* v) {
  const int64_t pieces = c.pieces(blocks);
  if (c.format == KvFormat::f32) {  // whose pieces are what is asked for
    const int64_t keys = kv_piece_bytes(c.format, Side::keys, c.key_size),
                  values = kv_piece_bytes(c.format, Side::values, c.value_size);
    for (int64_t i = 0; i < pieces; ++i) {
      std::memcpy(k + i * kBlock * c.key_size, key_piece(c, 0, i), static_cast<size_t>(keys));
      if (!c.values_in_keys)
        std::memcpy(v + i * kBlock * c.value_size, value_piece(c, 0, i), static_cast<size_t>(values));
    }
    if (c.values_in_keys) take_values(c, pieces, k, v);
    return;
  }
  const auto scale_of = [&](const char* piece, int64_t size, int64_t slot) {
    float scale = 1;
    if (has_scales(c.format)) std::memcpy(&scale, piece + kBlock * size + slot * 4, sizeof scale);
    return scale;
  };
  for (int64_t i = 0; i < pieces; ++i) {
    const char *keys = key_piece(c, 0, i), *values = value_piece(c, 0, i);
    if (has_few_bits(c.format)) {
      read_few_bits(c.format, Side::keys, keys, c.key_size,
                    [&](int64_t slot, int64_t d, float x) { k[(i * c.key_size + d) * kBlock + slot] = x; });
      read_few_bits(c.format, Side::values, values, c.value_size,
                    [&](int64_t slot, int64_t d, float x) { v[(i * kBlock + slot) * c.value_size + d] = x; });
      continue;
    }
    for (int64_t slot = 0; slot < kBlock; ++slot) {
      with_elements(c.format, keys, [&](const auto* from, const auto& convert) {
        const float scale = scale_of(keys, c.key_size, slot);
        for (int64_t d = 0; d < c.key_size; ++d)
          k[(i * c.key_size + d) * kBlock + slot] = convert(from[key_place(c.key_size, slot, d)]) * scale;
      });
      if (c.values_in_keys) continue;
      with_elements(c.format, values, [&](const auto* from, const auto& convert) {
        const float scale = scale_of(values, c.value_size, slot);
        for (int64_t d = 0; d < c.value_size; ++d)
          v[(i * kBlock + slot) * c.value_size + d] =
              convert(from[value_place(c.value_size, slot, d)]) * scale;
      });
    }
  }
  if (c.values_in_keys) take_values(c, pieces, k, v);
}

}  // namespace ew
