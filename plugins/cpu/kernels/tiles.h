// AMX's tiles: 8 registers of up to 16 rows of 64 bytes, and their products.
//
//   C [rows][16] of 32 bits  +=  A [rows][depth] times B [depth/4][16][4] of int8, [depth/2][16][2] of bf16
//
// which is how weights lie in panel32x4 and panel32x2, and keys and values in the cache: 16 columns of a
// panel, or of a block, are a tile B as they are.
//
// A product of int8 is exact. One of bf16 is, for each element of C by itself (whatever the other rows are):
//
//   even = fma(a[0], b[0], 0), fma(a[2], b[2], even), ..     odd = fma(a[1], b[1], 0), ..     c + (even +
//   odd)
//
// in 32-bit floats, to the nearest, numbers below 2^-126 taken and given as zero (Intel's manual,
// TDPBF16PS). In assembly: GCC's functions don't say what memory they read and write.
#pragma once

#include "dot.h"

namespace ew {
namespace {

constexpr int64_t kTile = 16;     // rows of a tile, and columns of C and B
constexpr int64_t kTileRow = 64;  // bytes of a row

// The shapes of the registers, for the time of a task: 0 .. 3 are C. 4 is A and 6 its B, 5 is another A and 7
// its B.
class Tiles {
 public:
  // Bytes of a row of 4 and of 5: multiples of 4, at most 64.
  Tiles(int64_t rows, int64_t bytes, int64_t other_bytes) {
    struct {
      uint8_t palette, start, none[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } shape = {};
    shape.palette = 1;
    for (int i = 0; i < 8; ++i) {
      const int64_t depth = i % 2 == 0 ? bytes : other_bytes;
      shape.bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? depth : kTileRow);
      shape.rows[i] = static_cast<uint8_t>(i < 6 ? rows : depth / 4);
    }
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Rows are `stride` bytes apart.
template <int T>
EW_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
EW_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
EW_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int C, int A, int B>
EW_INLINE void tile_dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
EW_INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// The largest depth of a tile of which `size` values are a whole number: `most` or less, in steps of `step`.
constexpr int64_t tile_depth(int64_t size, int64_t step, int64_t most) {
  for (int64_t depth = most; depth > 0; depth -= step) {
    if (size % depth == 0) return depth;
  }
  return 0;
}

}  // namespace
}  // namespace ew
