// How a layer's cache lies in memory, and how a token's keys and values get there.
//
// A block has K = 32 slots (block_table[b][i] holds positions 32 i .. 32 i + 31 of request b). The piece of a
// block and kv head, f32:
//
//   k  [D][32]       | d=0: slot 0 .. 31 | d=1: slot 0 .. 31 | ...      keys side by side
//   v  [32][Dv]      | slot 0: 0 .. Dv-1 | slot 1: 0 .. Dv-1 | ...      one value after another
//
// and bf16, i8 and fp8, in pairs along what is summed, as VDPBF16 reads them:
//
//   k  [D/2][32][2]  | slot 0: d=0, d=1 | slot 1: d=0, d=1 | .. slot 31 | slot 0: d=2, d=3 | ...
//                    of an odd D the last row is [32]: there is nothing to pair it with
//   v  [16][Dv][2]   | c=0: slot 0, slot 1 | c=1: slot 0, slot 1 | ... | c=0: slot 2, slot 3 | ...
//
// so that q.k of a block and p.v are both products of the linear's shape: an element of a row (or a pair),
// broadcast, times a vector. Behind the elements of i8 and fp8 come 32 floats, the scale of each slot:
//
//   scale = max |x| / largest_code     element = x * (largest_code / max |x|), to the nearest, ties to even
//
// with 0 and NaN as in quantize_activation. few_bits.h has the other formats. If values are a part of keys,
// as where attention is over a latent vector, there are only keys: a value is the first Dv channels of its
// key, times the key's scale. Where a layer's rows choose blocks (attention_choice.h), the summary of a block
// comes behind its keys: [2][D] bf16, D rounded up to 16, the center of each channel and its spread.
#pragma once

#include "few_bits.h"
#include "kernels.h"
#include "parallel.h"
#include "quantize.h"

namespace ew {
namespace {

// e4m3fn of |x| up to 464: 4 bits of exponent, 3 of mantissa, to the nearest, ties to even. Without a branch.
EW_INLINE uint8_t float_to_e4m3(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 a unit is 2^-9, which is that of floats from 2^14.
  const uint32_t small =
      bits_as<uint32_t>(bits_as<float>(magnitude) + 16384.0f) - bits_as<uint32_t>(16384.0f);
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (magnitude < (121u << 23) ? small : normal));
}
// Exact, subnormal numbers included: the exponent's bias is put right by a product.
EW_INLINE float e4m3_to_float(uint8_t code) {
  const uint32_t bits = static_cast<uint32_t>(code & 0x7fu) << 20 | static_cast<uint32_t>(code & 0x80u) << 24;
  return bits_as<float>(bits) * 0x1p120f;
}

EW_INLINE int64_t piece_number(const KvCache& c, int64_t block, int64_t head) {
  return c.at(c.places != nullptr ? c.places[block] : block, head);
}
EW_INLINE char* key_piece(const KvCache& c, int64_t block, int64_t head) {
  return static_cast<char*>(c.k) + piece_number(c, block, head) * c.key_bytes();
}
// The piece of the keys, for values that are a part of keys.
EW_INLINE char* value_piece(const KvCache& c, int64_t block, int64_t head) {
  if (c.values_in_keys) return key_piece(c, block, head);
  return static_cast<char*>(c.v) + piece_number(c, block, head) * c.value_bytes();
}
// The least of each channel of a block's keys, and behind them the greatest.
EW_INLINE uint16_t* summary_of(const KvCache& c, int64_t block, int64_t head) {
  char* at = c.apart != nullptr
                 ? c.apart + c.at(block, head) * c.summary_bytes()
                 : key_piece(c, block, head) + kv_piece_bytes(c.format, Side::keys, c.key_size);
  return reinterpret_cast<uint16_t*>(at);
}

// Calls fn(elements, convert), where convert gives an element as a float, for a format that is not f32.
template <class F>
EW_INLINE void with_elements(KvFormat format, const char* piece, const F& fn) {
  if (format == KvFormat::bf16) {
    fn(reinterpret_cast<const uint16_t*>(piece), [](uint16_t x) { return bf16_to_float(x); });
  } else if (format == KvFormat::i8) {
    fn(reinterpret_cast<const int8_t*>(piece), [](int8_t x) { return static_cast<float>(x); });
  } else {
    fn(reinterpret_cast<const uint8_t*>(piece), [](uint8_t x) { return e4m3_to_float(x); });
  }
}

// Which element of a piece of pairs is element d of a slot.
EW_INLINE int64_t key_place(int64_t size, int64_t slot, int64_t d) {
  return d < size / 2 * 2 ? (d / 2 * kBlock + slot) * 2 + d % 2 : d * kBlock + slot;
}
EW_INLINE int64_t value_place(int64_t size, int64_t slot, int64_t d) {
  return (slot / 2 * size + d) * 2 + slot % 2;
}

// Elements first .. first+count-1 of a slot to their places.
template <class T>
EW_INLINE void scatter_key(T* piece, int64_t size, int64_t slot, const T* from, int64_t first,
                           int64_t count) {
  for (int64_t i = 0; i < count; ++i) piece[key_place(size, slot, first + i)] = from[i];
}
template <class T>
EW_INLINE void scatter_value(T* piece, int64_t size, int64_t slot, const T* from, int64_t first,
                             int64_t count) {
  T* to = piece + value_place(size, slot, first);
  for (int64_t i = 0; i < count; ++i) to[2 * i] = from[i];
}

// x [size] as elements of 1 or 2 bytes, 64 at a time, handed to place(elements, first, count). `scale` is
// that of bytes.
template <class Place>
EW_INLINE void encode(KvFormat format, const float* x, int64_t size, float* scale, const Place& place) {
  constexpr int64_t kPiece = 64;
  if (format == KvFormat::bf16) {
    uint16_t elements[kPiece];
    for (int64_t first = 0; first < size; first += kPiece) {
      const int64_t count = size - first < kPiece ? size - first : kPiece;
      for (int64_t i = 0; i < count; ++i) elements[i] = float_to_bf16(x[first + i]);
      place(elements, first, count);
    }
    return;
  }
  const auto [of_row, factor, none] = scale_of_row(x, size, largest_code(format));
  *scale = of_row;
  uint8_t elements[kPiece] = {};
  for (int64_t first = 0; first < size; first += kPiece) {
    const int64_t count = size - first < kPiece ? size - first : kPiece;
    if (format == KvFormat::i8 && !none) {
      for (int64_t i = 0; i < count; i += 16) {
        const F16 v = load_some(x + first + i, count - i) * splat(factor);
        store_bytes(reinterpret_cast<int8_t*>(elements) + i, nearest_int(v), 16);
      }
    } else if (!none) {
      for (int64_t i = 0; i < count; ++i) elements[i] = float_to_e4m3(x[first + i] * factor);
    }
    place(elements, first, count);
  }
}

// A key and a value of one head to their place in a cache that isn't of few bits.
EW_INLINE void write_key(const KvCache& c, int64_t block, int64_t slot, int64_t head, const float* x) {
  char* piece = key_piece(c, block, head);
  if (c.format == KvFormat::f32) {
    float* to = reinterpret_cast<float*>(piece) + slot;
    for (int64_t d = 0; d < c.key_size; ++d) to[d * kBlock] = x[d];
    return;
  }
  float* scales = reinterpret_cast<float*>(piece + kBlock * c.key_size);
  encode(c.format, x, c.key_size, scales + slot, [&]<class T>(const T* from, int64_t first, int64_t count) {
    scatter_key(reinterpret_cast<T*>(piece), c.key_size, slot, from, first, count);
  });
}
EW_INLINE void write_value(const KvCache& c, int64_t block, int64_t slot, int64_t head, const float* x) {
  if (c.values_in_keys) return;
  char* piece = value_piece(c, block, head);
  if (c.format == KvFormat::f32) {
    float* to = reinterpret_cast<float*>(piece) + slot * c.value_size;
    __builtin_memcpy(to, x, static_cast<size_t>(c.value_size) * sizeof(float));
    return;
  }
  float* scales = reinterpret_cast<float*>(piece + kBlock * c.value_size);
  encode(c.format, x, c.value_size, scales + slot, [&]<class T>(const T* from, int64_t first, int64_t count) {
    scatter_value(reinterpret_cast<T*>(piece), c.value_size, slot, from, first, count);
  });
}

// The scales of a piece's 32 slots. Of formats that have them.
EW_INLINE void load_scales(KvFormat format, Side side, const char* piece, int64_t size, float* to) {
  const char* at = piece + element_bytes(format, side, size);
  if (!has_few_bits(format)) return (void)__builtin_memcpy(to, at, kBlock * sizeof(float));
  uint16_t halves[kBlock];
  __builtin_memcpy(halves, at, sizeof halves);
  store(to, load_half(halves));
  store(to + 16, load_half(halves + 16));
}

// A key, and the value of token t, of one head to the caches. Of few bits, a row is rotated once for both.
EW_INLINE void write_head(const KvWriteArgs& a, int64_t t, int64_t head, const float* key) {
  const KvCache& c = a.cache;
  const float* value = a.v.data + t * a.v.stride0 + head * a.v.stride1;
  const int64_t block = a.slots[t] / kBlock, slot = a.slots[t] % kBlock;
  if (!has_few_bits(c.format)) {
    write_key(c, block, slot, head, key);
    write_value(c, block, slot, head, value);
    return;
  }
  RowPlace keys[2] = {{c.format, key_piece(c, block, head), slot}};
  RowPlace values[2] = {{c.format, value_piece(c, block, head), slot}};
  int count = 1;
  if (a.ends.k != nullptr) {
    const int64_t ends_block = a.ends_slots[t] / kBlock, ends_slot = a.ends_slots[t] % kBlock;
    keys[1] = {a.ends.format, key_piece(a.ends, ends_block, head), ends_slot};
    values[1] = {a.ends.format, value_piece(a.ends, ends_block, head), ends_slot};
    count = 2;
  }
  write_few_bits(Side::keys, c.key_size, key, keys, count);
  write_few_bits(Side::values, c.value_size, value, values, count);
}

// Two tokens never have the same slot.
inline void kv_write(const KvWriteArgs& a, Workers& pool) {
  const KvCache& c = a.cache;
  run_rows(pool, a.tokens, c.kv_heads * (c.key_size + c.value_size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (!a.owns(a.slots[t] / kBlock)) continue;
      for (int64_t h = 0; h < c.kv_heads; ++h)
        write_head(a, t, h, a.k.data + t * a.k.stride0 + h * a.k.stride1);
    }
  });
}

}  // namespace
}  // namespace ew
