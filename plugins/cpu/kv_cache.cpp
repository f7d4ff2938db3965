#include "kv_cache.h"

#include <cmath>
#include <cstring>

namespace ew {
namespace {

float e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                    : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return code & 128 ? -value : value;
}

// Element `index` of a piece, without its scale.
float element(KvFormat format, const char* piece, int64_t index) {
  const char* at = piece + index * element_bytes(format);
  if (format == KvFormat::i8) return static_cast<signed char>(*at);
  if (format == KvFormat::fp8) return e4m3_value(static_cast<uint8_t>(*at));
  uint32_t bits = 0;
  std::memcpy(&bits, at, static_cast<size_t>(element_bytes(format)));
  if (format == KvFormat::bf16) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

void read_cache(const KvCache& c, int64_t blocks, float* k, float* v) {
  const bool pairs = c.format != KvFormat::f32;
  const auto scale_of = [&](const char* piece, int64_t size, int64_t slot) {
    float scale = 1;
    if (has_scales(c.format)) std::memcpy(&scale, piece + kBlock * size + slot * 4, sizeof scale);
    return scale;
  };
  for (int64_t i = 0; i < blocks * c.kv_heads; ++i) {
    const char* keys = static_cast<const char*>(c.k) + i * kv_piece_bytes(c.format, c.key_size);
    const char* values = static_cast<const char*>(c.v) + i * kv_piece_bytes(c.format, c.value_size);
    for (int64_t slot = 0; slot < kBlock; ++slot) {
      const float key_scale = scale_of(keys, c.key_size, slot);
      const float value_scale = scale_of(values, c.value_size, slot);
      for (int64_t d = 0; d < c.key_size; ++d) {
        const bool paired = pairs && d < c.key_size / 2 * 2;
        const int64_t at = paired ? (d / 2 * kBlock + slot) * 2 + d % 2 : d * kBlock + slot;
        k[(i * c.key_size + d) * kBlock + slot] = element(c.format, keys, at) * key_scale;
      }
      for (int64_t d = 0; d < c.value_size; ++d) {
        const int64_t at = pairs ? (slot / 2 * c.value_size + d) * 2 + slot % 2 : slot * c.value_size + d;
        v[(i * kBlock + slot) * c.value_size + d] = element(c.format, values, at) * value_scale;
      }
    }
  }
}

}  // namespace ew
