// 8-bit floats, e4m3fn, as f16 numbers, which processors widen:
//
//   e4m3fn   s eeee mmm                  f16   s 0eeee mmm0000000, which is the value * 2^-8
//
// subnormal values included. NaN (0x7f and 0xff), which no export writes, is taken for 480.
#pragma once

#include "simd.h"

namespace ew {
namespace {

EW_INLINE uint16_t fp8_as_half(uint8_t code) {
  return static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
}
constexpr float kFp8OfHalf = 256;

}  // namespace
}  // namespace ew
