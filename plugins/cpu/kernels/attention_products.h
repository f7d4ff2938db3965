// The two products of attention, q.k and p.v, for R rows and the keys of a step.
//
// FloatProducts: of floats. PairProducts: of bf16, two neighbours along the sum in one instruction, where
// there is VDPBF16. Caches of bf16, i8, fp8 and few bits are bf16 numbers (times a scale of each key, which
// goes to the score and to the weight), so that their products are those of bf16 on every instruction set: q
// and p are rounded to bf16, and FloatProducts takes the pairs one after the other, or StoredProducts where
// few rows share them.
//
// Pieces of the cache that the others can't read as they lie are unpacked first:
//
//   FloatProducts   k [D][32]               v [32][Dv]         floats
//   PairProducts    k [(D+1)/2][32][2]      v [16][Dv][2]      bf16; what fills an odd D is zero
#pragma once

#include "attention_tasks.h"
#include "dot.h"
#include "kv_format.h"
#include "microkernel.h"

namespace ew {
namespace {

constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Whether none of `count` floats, or of bf16 numbers, is NaN or infinite.
inline bool finite(const float* v, int64_t count) {
  uint32_t special = 0;
  for (int64_t i = 0; i < count; ++i)
    special |= (bits_as<uint32_t>(v[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  return special == 0;
}
inline bool finite(const uint16_t* v, int64_t count) {
  uint32_t special = 0;
  for (int64_t i = 0; i < count; ++i) special |= (v[i] & 0x7f80u) == 0x7f80u ? 1u : 0u;
  return special == 0;
}

struct NoScope {
  NoScope(const KvCache&, int64_t) {}
};

struct FloatProducts {
  using Element = float;
  using Stored = float;
  using Scope = NoScope;
  // With 8 registers of 16 floats: 6 rows of one, or 3 of two. Elsewhere rows have two.
  static constexpr bool kNarrow = kRegisters == 8;
  static constexpr int kRows = kNarrow ? 6 : kMaxRows;
  template <int R>
  static constexpr int kVectors = kNarrow && R > 3 ? 1 : 2;
  static constexpr bool kTiles = false, kBlockwise = kNarrow, kAsStored = false;
  static constexpr int64_t kBlocksAhead = kStepBlocks;

  static int64_t query_size(int64_t size) { return size; }
  static int64_t key_elements(int64_t size) { return size * kBlock; }
  static bool reads_keys(const KvCache& c) { return c.format == KvFormat::f32; }
  static bool reads_values(const KvCache& c) { return c.format == KvFormat::f32 && !c.values_in_keys; }

  static void query(const KvCache& c, const float* x, float* to) {
    if (c.format == KvFormat::f32) {
      copy_floats(x, c.key_size, to);
    } else {
      for (int64_t d = 0; d < c.key_size; ++d) to[d] = bf16_to_float(float_to_bf16(x[d]));
    }
  }
  // Weights of a row's scores (weigh_scores) as p.v takes them, times the values' scales; of one that is 0
  // the scale may be NaN, if its slot is not seen. Returns the sum of what they were without scales.
  static float weights(const KvCache& c, float top, float factor, float* scores, const float* scales,
                       int64_t count, float* to) {
    const float sum = weigh_scores(top, factor, count, scores, [&](int64_t i, F16 low, F16 high) {
      store(scores + i, low);
      store(scores + i + 16, high);
    });
    if (c.format == KvFormat::f32) return sum;  // `to` is where they are
    if (has_scales(c.format)) {
      for (int64_t i = 0; i < count; ++i) to[i] = scores[i] != 0 ? scores[i] * scales[i] : 0;
    }
    for (int64_t i = 0; i < count; ++i) to[i] = rounded_to_bf16(to[i]);
    return sum;
  }
  static float* weights_of(float* scores, float*) { return scores; }
  // bf16_to_float(float_to_bf16(x)), without a branch.
  static float rounded_to_bf16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x), odd = bits >> 16 & 1u;
    const uint32_t rounded = (bits + 0x7fffu + odd) & 0xffff0000u, nan = (bits | 0x400000u) & 0xffff0000u;
    return bits_as<float>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }

  // What two neighbours stand for, who lie in one word, the first in its lower half.
  static float first_of(uint32_t pair) { return bits_as<float>(pair << 16); }
  static float second_of(uint32_t pair) { return bits_as<float>(pair & 0xffff0000u); }
  static float first_of(int16_t pair) { return static_cast<float>(static_cast<int8_t>(pair)); }
  static float second_of(int16_t pair) { return static_cast<float>(pair >> 8); }
  template <class Pair>
  static void unpack_pairs(const char* from, int64_t rows, int64_t size, float* to) {
    for (int64_t row = 0; row < rows; ++row, to += 2 * size) {
      for (int64_t i = 0; i < size; ++i, from += sizeof(Pair)) {
        Pair pair;
        __builtin_memcpy(&pair, from, sizeof pair);
        to[i] = first_of(pair);
        to[size + i] = second_of(pair);
      }
    }
  }
  // `rows` times `size` pairs, to the first of each pair of a row and then the second ones.
  static void unpack(KvFormat format, const char* from, int64_t rows, int64_t size, float* to) {
    if (format == KvFormat::bf16) return unpack_pairs<uint32_t>(from, rows, size, to);
    if (format == KvFormat::i8) return unpack_pairs<int16_t>(from, rows, size, to);
    for (int64_t row = 0; row < rows; ++row, from += 2 * size, to += 2 * size) {
      for (int64_t i = 0; i < size; ++i) {
        to[i] = e4m3_to_float(static_cast<uint8_t>(from[2 * i]));
        to[size + i] = e4m3_to_float(static_cast<uint8_t>(from[2 * i + 1]));
      }
    }
  }
  static void unpack_keys(const KvCache& c, const char* piece, float* to) {
    const int64_t pairs = c.key_size / 2;
    if (has_few_bits(c.format)) {
      alignas(64) int8_t codes[kBlock * kLongestHead];
      expand(c.format, Side::keys, piece, c.key_size, codes);
      return unpack_pairs<int16_t>(reinterpret_cast<const char*>(codes), pairs, kBlock, to);
    }
    unpack(c.format, piece, pairs, kBlock, to);
    if (c.key_size % 2 == 0) return;
    with_elements(c.format, piece, [&](const auto* from, const auto& convert) {
      for (int64_t slot = 0; slot < kBlock; ++slot)
        to[2 * pairs * kBlock + slot] = convert(from[2 * pairs * kBlock + slot]);
    });
  }
  static void unpack_values(const KvCache& c, const char* piece, float* to) {
    if (has_few_bits(c.format)) {
      alignas(64) int8_t codes[kBlock * kLongestHead];
      expand(c.format, Side::values, piece, c.value_size, codes);
      return unpack_pairs<int16_t>(reinterpret_cast<const char*>(codes), kBlock / 2, c.value_size, to);
    }
    unpack(c.format, piece, kBlock / 2, c.value_size, to);
  }
  // The values [32][width] that are the first channels of keys [D][32].
  static void transpose_keys(const float* k, int64_t width, float* to) {
    int64_t d = 0;
    for (; d + 16 <= width; d += 16) {
      const float* rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = k + (d + i) * kBlock;
      for (int64_t slot = 0; slot < kBlock; slot += 4) {
        F16 columns[4];
        load_columns(rows, slot, columns);
        for (int c = 0; c < 4; ++c) store(to + (slot + c) * width + d, columns[c]);
      }
    }
    for (; d < width; ++d)
      for (int64_t slot = 0; slot < kBlock; ++slot) to[slot * width + d] = k[d * kBlock + slot];
  }

  // out[r][slot] = q.k, a chain over d.
  template <int R>
  static void scores(const float* q, int64_t size, const float* k, int64_t ahead, float* out) {
    constexpr int C = kVectors<R>;
    for (int64_t slot = 0; slot < kBlock; slot += 16 * C) {
      F16 acc[R][C];
      for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) acc[r][c] = zero();
      }
      chain<R, 1, C, Fetch::far>(q, size, k + slot, kBlock, 0, size, ahead, acc);
      for (int r = 0; r < R; ++r) {
        for (int c = 0; c < C; ++c) store(out + r * kStep + slot + 16 * c, acc[r][c]);
      }
    }
  }

  // o[r] = factors[r] * o[r] + p.v, the chain over slots first .. past-1 of a step whose blocks are at v.
  template <int R>
  static void values(const float* p, const float* const* v, const int64_t* ahead, int64_t first, int64_t past,
                     int64_t width, const float* factors, float* o) {
    const auto columns = [&]<int C>(int64_t c) {
      F16 acc[R][C];
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < C; ++i) acc[r][i] = load(o + r * width + c + 16 * i) * splat(factors[r]);
      }
      for (int64_t b = first / kBlock; b * kBlock < past; ++b) {
        const int64_t low = clamp(first - b * kBlock, 0, kBlock), high = clamp(past - b * kBlock, 0, kBlock);
        chain<R, 1, C, Fetch::far>(p + b * kBlock + low, kStep, v[b] + low * width + c, width, 0, high - low,
                                   ahead[b], acc);
      }
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < C; ++i) store(o + r * width + c + 16 * i, acc[r][i]);
      }
    };
    int64_t c = 0;
    if constexpr (kVectors<R> == 2) {
      for (; c + 32 <= width; c += 32) columns.template operator()<2>(c);
    }
    for (; c + 16 <= width; c += 16) columns.template operator()<1>(c);
    if (c == width) return;
    for (int r = 0; r < R; ++r) {
      F16 acc = load_n(o + r * width + c, width - c) * splat(factors[r]);
      for (int64_t slot = first; slot < past; ++slot) {
        const float* at = v[slot / kBlock] + slot % kBlock * width + c;
        acc = fma(splat(p[r * kStep + slot]), load_n(at, width - c), acc);
      }
      store_n(o + r * width + c, acc, width - c);
    }
  }
};

#if !defined(EW_BF16)

// FloatProducts for some rows and a cache of bf16: pairs become floats as they are read, since a block
// unpacked would be written and read again for few uses. The chains are the same. Both products go through a
// block a few pairs deep, with the sums in memory from one piece to the next: so a block is read nearly as it
// lies, which suits memory.
struct StoredProducts : FloatProducts {
  using Stored = uint16_t;
  static constexpr bool kAsStored = true;
  static constexpr int64_t kBlocksAhead = 2;
  static constexpr int64_t kMostRows = kNarrow ? 4 * kRows : kRows;  // measured for kNarrow
  static constexpr int64_t kKeyPairs = 16, kValuePairs = 4;          // the depth of a piece

  static bool takes(const KvCache& c, int64_t rows) {
    return c.format == KvFormat::bf16 && rows <= kMostRows && c.key_size % 2 == 0 && c.value_size % 16 == 0 &&
           !c.values_in_keys;
  }

  // acc[r][c] = fma(x[r], column, acc[r][c]) for R rows.
  template <int R, int C>
  EW_INLINE static void add_products(const float* x, int64_t x_stride, F16 column, int c, F16 (&acc)[R][C]) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) acc[r][c] = fma(splat(x[r * x_stride]), column, acc[r][c]);
  }
  // The chains of R rows and C vectors over `count` pairs, on from acc.
  template <int R, int C>
  EW_INLINE static void chain_pairs(const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride,
                                    int64_t count, int64_t ahead, F16 (&acc)[R][C]) {
    for (int64_t pair = 0; pair < count; ++pair) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        __builtin_prefetch(w + c * 32 + ahead, 0, 2);
        add_products<R, C>(x + 2 * pair, x_stride, load_pairs(w + c * 32).first, c, acc);
        add_products<R, C>(x + 2 * pair + 1, x_stride, load_pairs(w + c * 32).second, c, acc);
      }
      w += w_stride;
    }
  }
  // One pair of which only one element takes part.
  template <int R, int C>
  EW_INLINE static void half_pair(const float* x, const uint16_t* w, bool second, F16 (&acc)[R][C]) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      const Pairs column = load_pairs(w + c * 32);
      add_products<R, C>(x, kStep, second ? column.second : column.first, c, acc);
    }
  }

  template <int R>
  static void scores(const float* q, int64_t size, const uint16_t* k, int64_t ahead, float* out) {
    constexpr int C = kVectors<R>;
    const int64_t pairs = size / 2;
    for (int64_t pair = 0; pair < pairs; pair += kKeyPairs) {
      const int64_t count = pairs - pair < kKeyPairs ? pairs - pair : kKeyPairs;
      for (int64_t slot = 0; slot < kBlock; slot += 16 * C) {
        float* to = out + slot;
        F16 acc[R][C];
        for (int r = 0; r < R; ++r) {
          for (int c = 0; c < C; ++c) acc[r][c] = pair > 0 ? load(to + r * kStep + 16 * c) : zero();
        }
        chain_pairs<R, C>(q + 2 * pair, size, k + (pair * kBlock + slot) * 2, 2 * kBlock, count, ahead, acc);
        for (int r = 0; r < R; ++r) {
          for (int c = 0; c < C; ++c) store(to + r * kStep + 16 * c, acc[r][c]);
        }
      }
    }
  }

  template <int R>
  static void values(const float* p, const uint16_t* const* v, const int64_t* ahead, int64_t first,
                     int64_t past, int64_t width, const float* factors, float* o) {
    // Of slots low .. high-1 of a block, of which the first and the last may be one of a pair.
    const auto columns = [&]<int C>(const float* row, const uint16_t* block, int64_t far, int64_t low,
                                    int64_t high, const float* scale, float* to) {
      F16 acc[R][C];
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < C; ++i) acc[r][i] = load(to + r * width + 16 * i) * splat(scale[r]);
      }
      if (low % 2 != 0) {
        half_pair<R, C>(row + low, block + (low - 1) * width, true, acc);
        ++low;
      }
      const int64_t whole = high / 2 * 2;
      if (low < whole)
        chain_pairs<R, C>(row + low, kStep, block + low * width, 2 * width, (whole - low) / 2, far, acc);
      if (whole < high && low < high) half_pair<R, C>(row + whole, block + whole * width, false, acc);
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < C; ++i) store(to + r * width + 16 * i, acc[r][i]);
      }
    };
    for (int64_t slot = first; slot < past;) {
      const int64_t b = slot / kBlock, low = slot % kBlock;
      const int64_t limit = (low / (2 * kValuePairs) + 1) * 2 * kValuePairs;
      const int64_t high = past - b * kBlock < limit ? past - b * kBlock : limit;
      const float *row = p + b * kBlock, *scale = slot == first ? factors : kOnes;
      int64_t c = 0;
      if constexpr (kVectors<R> == 2) {
        for (; c + 32 <= width; c += 32)
          columns.template operator()<2>(row, v[b] + c * 2, ahead[b], low, high, scale, o + c);
      }
      for (; c < width; c += 16)
        columns.template operator()<1>(row, v[b] + c * 2, ahead[b], low, high, scale, o + c);
      slot = b * kBlock + high;
    }
  }
};

#else

struct PairProducts {
  using Element = uint16_t;
  using Stored = uint16_t;
  using Scope = NoScope;
  static constexpr int kRows = kBf16Rows;
  static constexpr bool kTiles = false, kBlockwise = false, kAsStored = false;
  static constexpr int64_t kBlocksAhead = kStepBlocks;

  static int64_t query_size(int64_t size) { return (size + 1) / 2 * 2; }
  static int64_t key_elements(int64_t size) { return (size + 1) / 2 * 2 * kBlock; }
  static bool reads_keys(const KvCache& c) { return c.format == KvFormat::bf16 && c.key_size % 2 == 0; }
  static bool reads_values(const KvCache& c) { return c.format == KvFormat::bf16 && !c.values_in_keys; }

  static void query(const KvCache& c, const float* x, uint16_t* to) {
    for (int64_t d = 0; d < c.key_size; ++d) to[d] = float_to_bf16(x[d]);
    if (c.key_size % 2 != 0) to[c.key_size] = 0;
  }
  static float weights(const KvCache& c, float top, float factor, const float* scores, const float* scales,
                       int64_t count, uint16_t* to) {
    if (!has_scales(c.format)) {
      return weigh_scores(top, factor, count, scores,
                          [&](int64_t i, F16 low, F16 high) { store_pairs(to + i, low, high); });
    }
    return weigh_scores(top, factor, count, scores, [&](int64_t i, F16 low, F16 high) {
      store_pairs(to + i, select(low != zero(), low * load(scales + i), zero()),
                  select(high != zero(), high * load(scales + i + 16), zero()));
    });
  }
  static uint16_t* weights_of(float*, uint16_t* p) { return p; }

  // Places of bytes are those of pairs, but for what fills an odd D.
  static void unpack_bytes(const char* piece, int64_t count, uint16_t* to) {
    const int8_t* from = reinterpret_cast<const int8_t*>(piece);
    for (int64_t i = 0; i < count; i += 32)
      store_pairs(to + i, load_bytes(from + i), load_bytes(from + i + 16));
  }
  static void unpack_few_bits(const KvCache& c, Side side, const char* piece, int64_t size, uint16_t* to) {
    alignas(64) int8_t codes[kBlock * kLongestHead];
    expand(c.format, side, piece, size, codes);
    unpack_bytes(reinterpret_cast<const char*>(codes), kBlock * size, to);
  }
  static void unpack_keys(const KvCache& c, const char* piece, uint16_t* to) {
    const int64_t paired = c.key_size / 2 * 2 * kBlock;
    if (has_few_bits(c.format)) return unpack_few_bits(c, Side::keys, piece, c.key_size, to);
    if (c.format == KvFormat::i8 && c.key_size % 2 == 0) return unpack_bytes(piece, paired, to);
    with_elements(c.format, piece, [&](const auto* from, const auto& convert) {
      for (int64_t i = 0; i < paired; ++i)
        to[i] = static_cast<uint16_t>(bits_as<uint32_t>(convert(from[i])) >> 16);
      if (c.key_size % 2 == 0) return;
      for (int64_t slot = 0; slot < kBlock; ++slot) {
        to[paired + 2 * slot] = static_cast<uint16_t>(bits_as<uint32_t>(convert(from[paired + slot])) >> 16);
        to[paired + 2 * slot + 1] = 0;
      }
    });
  }
  static void unpack_values(const KvCache& c, const char* piece, uint16_t* to) {
    if (has_few_bits(c.format)) return unpack_few_bits(c, Side::values, piece, c.value_size, to);
    if (c.format == KvFormat::i8) return unpack_bytes(piece, kBlock * c.value_size, to);
    with_elements(c.format, piece, [&](const auto* from, const auto& convert) {
      for (int64_t i = 0; i < kBlock * c.value_size; ++i)
        to[i] = static_cast<uint16_t>(bits_as<uint32_t>(convert(from[i])) >> 16);
    });
  }

  // The values [16][width][2] that are the first channels of keys [(D+1)/2][32][2].
  static void transpose_keys(const uint16_t* k, int64_t width, uint16_t* to) {
    const float* pairs = reinterpret_cast<const float*>(k);  // words, whatever they mean
    const int64_t whole = width / 32 * 32;
    for (int64_t d = 0; d < whole; d += 32) {
      const float* rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = pairs + (d / 2 + i) * kBlock;
      for (int64_t slot = 0; slot < kBlock; slot += 4) {
        F16 columns[4];
        load_columns(rows, slot, columns);
        uint32_t words[4][16];
        for (int c = 0; c < 4; ++c) store(reinterpret_cast<float*>(words[c]), columns[c]);
        for (int c = 0; c < 4; c += 2) {
          uint32_t both[32];
          for (int i = 0; i < 16; ++i) {
            both[2 * i] = (words[c][i] & 0xffffu) | words[c + 1][i] << 16;
            both[2 * i + 1] = words[c][i] >> 16 | (words[c + 1][i] & 0xffff0000u);
          }
          __builtin_memcpy(to + ((slot + c) / 2 * width + d) * 2, both, sizeof both);
        }
      }
    }
    for (int64_t d = whole; d < width; ++d)
      for (int64_t slot = 0; slot < kBlock; ++slot)
        to[value_place(width, slot, d)] = k[(d / 2 * kBlock + slot) * 2 + d % 2];
  }

  // The chains of R rows and C vectors over `count` pairs, on from acc. Of the last vector `lanes` are read.
  template <int R, int C, bool Whole>
  EW_INLINE static void chain_pairs(const uint16_t* x, int64_t x_stride, const uint16_t* w, int64_t w_stride,
                                    int64_t count, int64_t ahead, int64_t lanes, F16 (&acc)[R][C]) {
    for (int64_t pair = 0; pair < count; ++pair) {
      Pairs column[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        __builtin_prefetch(w + c * 32 + ahead, 0, 2);
        column[c] = Whole ? load_pairs(w + c * 32) : load_pairs_n(w + c * 32, lanes);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Pair value = splat_pair(x + r * x_stride + pair * 2);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], column[c], value);
      }
      w += w_stride;
    }
  }
  // One pair of which only one element takes part.
  template <int R, int C>
  static void half_pair(const uint16_t* x, const uint16_t* w, int64_t lanes, bool second, F16 (&acc)[R][C]) {
    for (int c = 0; c < C; ++c) {
      const Pairs column = one_of_pairs(load_pairs_n(w + c * 32, C > 1 ? 16 : lanes), second);
      for (int r = 0; r < R; ++r) acc[r][c] = dot(acc[r][c], column, splat_pair(x + r * kStep));
    }
  }

  template <int R>
  static void scores(const uint16_t* q, int64_t size, const uint16_t* k, int64_t ahead, float* out) {
    F16 acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
    chain_pairs<R, 2, true>(q, size, k, 2 * kBlock, size / 2, ahead, 16, acc);
    for (int r = 0; r < R; ++r) {
      store(out + r * kStep, acc[r][0]);
      store(out + r * kStep + 16, acc[r][1]);
    }
  }

  template <int R>
  static void values(const uint16_t* p, const uint16_t* const* v, const int64_t* ahead, int64_t first,
                     int64_t past, int64_t width, const float* factors, float* o) {
    const auto columns = [&]<int C, bool Whole>(int64_t c, int64_t lanes) {
      F16 acc[R][C];
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < C; ++i)
          acc[r][i] = load_some(o + r * width + c + 16 * i, Whole ? 16 : lanes) * splat(factors[r]);
      }
      for (int64_t b = first / kBlock; b * kBlock < past; ++b) {
        int64_t low = clamp(first - b * kBlock, 0, kBlock), high = clamp(past - b * kBlock, 0, kBlock);
        const uint16_t *row = p + b * kBlock, *columns_of = v[b] + c * 2;
        if (low % 2 != 0) {
          half_pair<R, C>(row + low - 1, columns_of + (low - 1) * width, lanes, true, acc);
          ++low;
        }
        const int64_t whole = high / 2 * 2;
        if (low < whole) {
          chain_pairs<R, C, Whole>(row + low, kStep, columns_of + low * width, 2 * width, (whole - low) / 2,
                                   ahead[b], lanes, acc);
        }
        if (high % 2 != 0 && low < high)
          half_pair<R, C>(row + whole, columns_of + whole * width, lanes, false, acc);
      }
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < C; ++i) store_some(o + r * width + c + 16 * i, acc[r][i], Whole ? 16 : lanes);
      }
    };
    int64_t c = 0;
    for (; c + 32 <= width; c += 32) columns.template operator()<2, true>(c, 16);
    for (; c + 16 <= width; c += 16) columns.template operator()<1, true>(c, 16);
    if (c < width) columns.template operator()<1, false>(c, width - c);
  }
};

#endif

}  // namespace
}  // namespace ew
