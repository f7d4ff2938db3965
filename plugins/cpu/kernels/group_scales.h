// Scales of a weight's groups along K, or their offsets: an f16 for each group, or blocks of 8 or 16 groups,
// each with a signed byte that multiplies its block's f16 (super-blocks of GGUF's K-quants). The product of
// 11 bits and 8 is exact in a float, so that both are one number to those that multiply by it.
//
//   f16       | g=0: n=0 .. 31 | g=1: .. | ..                                    [ceil(N/32)][groups][32]
//   blocks    | f16 of n=0 .. 31 | bytes of g=0: n=0 .. 31 | g=1: .. | f16 of the next block | ..
#pragma once

#include "dot.h"
#include "kernels.h"

namespace ew {
namespace {

template <class To, class From>
EW_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// Exact, subnormal numbers included: the exponent's bias is put right by a product.
EW_INLINE float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | rest << 13);  // infinity and NaN
  return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(rest << 13) * 0x1p112f));
}

// Of a panel of 32 rows, in f16s.
constexpr int64_t scales_of_panel(int64_t groups, int64_t block) {
  return block == 0 ? groups * kPanel : groups / block * (block + 2) * kPanel / 2;
}

// Those of one panel.
class GroupScales {
 public:
  EW_INLINE GroupScales(const uint16_t* of_panel, int64_t block)
      : at_(of_panel), shift_(block == 16 ? 4 : 3), blocks_(block != 0) {}

  EW_INLINE void prefetch(int64_t group, int64_t bytes) const {        // what lies so far behind a group's
    const int64_t at = blocks_ ? group * kPanel : group * kPanel * 2;  // nearly, with blocks
    __builtin_prefetch(reinterpret_cast<const char*>(at_) + at + bytes);
  }
  // Of 16 columns from `column` on.
  EW_INLINE F16 load(int64_t group, int64_t column) const {
    if (!blocks_) return load_half(at_ + group * kPanel + column);
    const int64_t size = int64_t{1} << shift_, in_block = group & (size - 1);
    const uint16_t* block = at_ + (group >> shift_) * (size + 2) * (kPanel / 2);
    const int8_t* bytes = reinterpret_cast<const int8_t*>(block) + (2 + in_block) * kPanel;
    return load_half(block + column) * load_bytes(bytes + column);
  }

 private:
  const uint16_t* at_;
  int shift_;
  bool blocks_;
};

// The same of row `id` alone.
class RowScales {
 public:
  RowScales(const uint16_t* scales, int64_t groups, int64_t block, int64_t id)
      : at_(scales + id / kPanel * scales_of_panel(groups, block)), column_(id % kPanel), block_(block) {}

  float operator[](int64_t group) const {
    if (block_ == 0) return half_to_float(at_[group * kPanel + column_]);
    const uint16_t* block = at_ + group / block_ * (block_ + 2) * (kPanel / 2);
    const int8_t* bytes = reinterpret_cast<const int8_t*>(block) + (2 + group % block_) * kPanel;
    return half_to_float(block[column_]) * bytes[column_];
  }

 private:
  const uint16_t* at_;
  int64_t column_, block_;
};

}  // namespace
}  // namespace ew
