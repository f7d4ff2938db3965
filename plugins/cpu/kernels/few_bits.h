// Keys and values as rotated integers of few bits (KvFormat k6v4 and others), which kv_format.h stores.
//
// A row x of D numbers is multiplied by a Hadamard matrix, n = the largest power of two that divides D at a
// time: a row's largest numbers are spread over all of it (QuaRot, Ashkboos et al., arXiv:2404.00456). y, the
// product times 2^-floor(log2(n) / 2), becomes integers of b bits, the largest `top`, times a scale:
//
//   scale = max |y| / top, to f16     y ~ integer * scale     top = 127, and 2^b - 1 for 5 and 6 bits
//
// with 0 and NaN as in quantize_activation. With 8 bits they are those of i8. With 5 and 6 they are odd, so
// that all codes are used: code = y * top / (2 max |y|) - 1/2 to the nearest, ties to even, + 2^(b-1), is the
// integer 2 code - top. With 4 they are kNormal, near the best 16 values for a normal distribution, which
// rotated numbers nearly have: the code is the number of the kBounds that y * top / max |y| is above. Queries
// are multiplied by the same matrix and by what of 1/n is left, as is the result of attention: products stay.
//
// A piece is a row of the 32 D codes of keys in the order of an i8 piece, or 16 rows of the 2 Dv codes of two
// slots' values. Of a row of N codes, the low 4 bits of codes i and i + N/2 share byte i of N/2. What is
// above 4 bits comes behind all rows' low bits: with 2 bits, codes i, i + N/4, i + N/2 .. share byte i of
// N/4; with one, 8 codes. So a byte belongs to one token. The scales of the 32 slots come last.
#pragma once

#include "kernels.h"
#include "quantize.h"

namespace ew {
namespace {

alignas(64) constexpr int8_t kNormal[16] = {-127, -96, -75, -58, -44, -31, -18, -6,
                                            6,    18,  31,  44,  58,  75,  96,  127};
constexpr float kBounds[15] = {-111.5f, -85.5f, -66.5f, -51, -37.5f, -24.5f, -12,   0,
                               12,      24.5f,  37.5f,  51,  66.5f,  85.5f,  111.5f};

template <int Half>
EW_INLINE void butterflies(float* x, int64_t size) {
  for (int64_t at = 0; at < size; at += 2 * Half) {
    for (int64_t i = at; i < at + Half; ++i) {
      const float a = x[i], b = x[i + Half];
      x[i] = a + b;
      x[i + Half] = a - b;
    }
  }
}

// x [size], each n of them, times the Hadamard matrix of signs.
inline void turn(float* x, int64_t size) {
  const int64_t n = size & -size;
  for (int64_t half = n / 2; half >= 16; half /= 2) {
    for (int64_t at = 0; at < size; at += 2 * half) {
      for (int64_t i = at; i < at + half; i += 16) {
        const F16 a = load(x + i), b = load(x + i + half);
        store(x + i, a + b);
        store(x + i + half, a - b);
      }
    }
  }
  if (n >= 16) butterflies<8>(x, size);
  if (n >= 8) butterflies<4>(x, size);
  if (n >= 4) butterflies<2>(x, size);
  if (n >= 2) butterflies<1>(x, size);
}

// The shares of 1/n by which keys and values, and by which queries and results, are multiplied: powers of
// two.
EW_INLINE float stored_share(int64_t size) {
  const int halvings = __builtin_ctzll(static_cast<uint64_t>(size)) / 2;
  return 1.0f / static_cast<float>(int64_t{1} << halvings);
}
EW_INLINE float other_share(int64_t size) {
  return 1.0f / static_cast<float>(size & -size) / stored_share(size);
}

// A query [size] as the rotated keys want it.
EW_INLINE void turn_query(const float* x, int64_t size, float* to) {
  const float share = other_share(size);
  for (int64_t d = 0; d < size; ++d) to[d] = x[d] * share;
  turn(to, size);
}

// To the nearest, ties to even; what is too large becomes infinite.
EW_INLINE uint16_t float_to_half(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return 0x7e00u;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  // Below 2^-14 a unit is 2^-24, which is that of floats from 1/2.
  if (magnitude < 0x38800000u)
    return static_cast<uint16_t>(
        sign | (bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f)));
  const uint32_t rounded = (magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  return static_cast<uint16_t>(sign | (rounded - (112u << 10)));
}

// How the elements of a row become codes up to `limit`: times `factor`. `none`: all are 0.
struct RowScale {
  float scale, factor;
  bool none;
};
EW_INLINE RowScale scale_of_row(const float* x, int64_t size, float limit) {
  F16 largest = zero(), special = zero();
  for (int64_t i = 0; i < size; i += 16) {
    const F16 v = load_some(x + i, size - i);
    largest = max(abs(v), largest);
    special = fma(v, zero(), special);  // NaN once v is NaN or infinite, which max may pass over
  }
  const float most = max_lanes(largest), nan = sum_lanes(special), factor = limit / most;
  const bool none = nan != nan || !(factor < __builtin_inff());
  return {nan != nan ? __builtin_nanf("") : none ? 0.0f : most / limit, factor, none};
}

// Where codes lie in a piece.
struct FewBits {
  int64_t size, rows, codes, low_bytes;  // of a head, of codes, of a row, of all low halves
  int bits, high;

  EW_INLINE FewBits(KvFormat format, Side side, int64_t head)
      : size(head),
        rows(side == Side::keys ? 1 : kBlock / 2),
        codes(kBlock * head / rows),
        low_bytes(kBlock * head / 2),
        bits(bits_of(format, side)),
        high(bits - 4) {}

  EW_INLINE float top() const {
    return bits == 4 || bits == 8 ? 127.0f : static_cast<float>((1 << bits) - 1);
  }
  EW_INLINE int64_t row(int64_t slot) const { return rows == 1 ? 0 : slot / 2; }
  EW_INLINE int64_t place(int64_t slot, int64_t d) const {
    return rows == 1 ? (d / 2 * kBlock + slot) * 2 + d % 2 : 2 * d + slot % 2;
  }
};

EW_INLINE void store_scale(KvFormat format, Side side, char* piece, int64_t size, int64_t slot, float scale) {
  const uint16_t half = float_to_half(scale);
  __builtin_memcpy(piece + element_bytes(format, side, size) + slot * 2, &half, sizeof half);
}

// The slot of a piece that a row goes to.
struct RowPlace {
  KvFormat format;
  char* piece;
  int64_t slot;
};

// y [size], rotated, to its codes in a slot.
inline void store_codes(const FewBits& f, char* piece, int64_t slot, const float* y, const RowScale& row) {
  const int64_t size = f.size;
  alignas(64) int8_t codes[kLongestHead];
  const F16 half = splat(0.5f), factor = splat(row.factor), none = zero();
  for (int64_t d = 0; d < size; d += 16) {
    const F16 v = row.none ? none : load_some(y + d, size - d) * factor;
    if (f.bits == 8) {
      store_bytes(codes + d, nearest_int(v), 16);
    } else if (f.bits > 4) {
      store_bytes(codes + d, nearest_int(v * half - half) + splat_int(1 << (f.bits - 1)), 16);
    } else {
      F16 code = none;
      for (const float bound : kBounds) code = code + select(splat(bound) < v, splat(1.0f), none);
      store_bytes(codes + d, nearest_int(code), 16);
    }
  }
  if (f.bits == 8) {
    for (int64_t d = 0; d < size; ++d)
      piece[f.row(slot) * f.codes + f.place(slot, d)] = static_cast<char>(codes[d]);
    return;
  }
  uint8_t* bytes = reinterpret_cast<uint8_t*>(piece);
  uint8_t* low = bytes + f.row(slot) * f.codes / 2;
  for (int64_t d = 0; d < size / 2; ++d)
    low[f.place(slot, d)] = static_cast<uint8_t>((codes[d] & 15) | (codes[d + size / 2] & 15) << 4);
  if (f.high > 0) {
    const int64_t shared = 8 / f.high, part = size / shared;
    uint8_t* high = bytes + f.low_bytes + f.row(slot) * f.codes / shared;
    for (int64_t d = 0; d < part; ++d) {
      int byte = 0;
      for (int64_t q = 0; q < shared; ++q) byte |= codes[d + q * part] >> 4 << (q * f.high);
      high[f.place(slot, d)] = static_cast<uint8_t>(byte);
    }
  }
}

// x [size] to slots of pieces, each in its format; it is rotated once.
inline void write_few_bits(Side side, int64_t size, const float* x, const RowPlace* places, int count) {
  alignas(64) float y[kLongestHead];
  const float share = stored_share(size);
  for (int64_t d = 0; d < size; ++d) y[d] = x[d] * share;
  turn(y, size);
  RowScale row = {};
  float top = 0;
  for (int i = 0; i < count; ++i) {
    const RowPlace& to = places[i];
    const FewBits f(to.format, side, size);
    if (f.top() != top) row = scale_of_row(y, size, top = f.top());
    store_codes(f, to.piece, to.slot, y, row);
    store_scale(to.format, side, to.piece, size, to.slot, row.scale);
  }
}

// The integers of codes of 4 bits, `part` low halves of bytes and then their high ones.
inline void expand_halves(const uint8_t* low, int64_t part, int8_t* to) {
  const uint8_t* table = reinterpret_cast<const uint8_t*>(kNormal);
  int64_t i = 0;
  for (; i + 64 <= part; i += 64) {
    store_spread(reinterpret_cast<uint8_t*>(to + i), look_up_halves<false>(low + i, table));
    store_spread(reinterpret_cast<uint8_t*>(to + part + i), look_up_halves<true>(low + i, table));
  }
  for (; i < part; ++i) {
    to[i] = kNormal[low[i] & 15];
    to[part + i] = kNormal[low[i] >> 4];
  }
}

// The integers of a piece, in the order of an i8 piece.
template <int High>
inline void expand_to(const FewBits& f, const uint8_t* low, const uint8_t* high, int8_t* to) {
  constexpr int kShared = 8 / High, kTop = (16 << High) - 1;
  const int64_t part = f.codes / kShared;
  for (int64_t row = 0; row < f.rows; ++row) {
#pragma GCC unroll 8
    for (int q = 0; q < kShared; ++q) {
      const int shift = q < kShared / 2 ? 0 : 4;
      const uint8_t* from = low + q % (kShared / 2) * part;
      for (int64_t i = 0; i < part; ++i) {
        const int code = (from[i] >> shift & 15) | (high[i] >> (q * High) & ((1 << High) - 1)) << 4;
        to[i] = static_cast<int8_t>(2 * code - kTop);
      }
      to += part;
    }
    low += f.codes / 2;
    high += part;
  }
}
inline void expand(KvFormat format, Side side, const char* piece, int64_t size, int8_t* to) {
  const FewBits f(format, side, size);
  const uint8_t *low = reinterpret_cast<const uint8_t*>(piece), *high = low + f.low_bytes;
  if (f.bits == 8) return (void)__builtin_memcpy(to, piece, static_cast<size_t>(kBlock * size));
  if (f.high == 0) {
    for (int64_t row = 0; row < f.rows; ++row)
      expand_halves(low + row * f.codes / 2, f.codes / 2, to + row * f.codes);
    return;
  }
  if (f.high == 1) return expand_to<1>(f, low, high, to);
  expand_to<2>(f, low, high, to);
}

}  // namespace
}  // namespace ew
