// Weights of which at most two of every four k are kept, in layout sparse32: [ceil(N/32)][ceil(K/32)] blocks
// of 32 columns and 32 k, a block being the places of what is kept, then its values.
//
//   places   | n=0 | n=1 | .. | n=31 |      a word of 32 bits each; those of k=4q .. 4q+3 in its bits 4q ..
//   4q+3:
//                                           2 bits for the first that is kept, 2 for the second, which is
//                                           behind it
//   values   | q=0 | q=1 | .. | q=7 |       the two kept ones of every column:
//
//     f32    q: n=0 .. n=31 the first, then n=0 .. n=31 the second
//     bf16   q: n=0 first, second | n=1 first, second | ..
//     int8   q: n=0 first, second | n=1 ..                    bytes, stored as value + 128
//     int4   q and q+1: n=0 first, second | n=1 ..            bytes, of q in the low half and q+1 in the high
//     one,
//                                                             each stored as value + 8
//
// So a place can't point out of its four k, whatever it is. (What two places in another order mean is left
// open.) Where fewer than two are not zero, zeros are kept. K is a multiple of 4; what fills the last block,
// and the columns past N, is zero too.
#pragma once

#include "dot.h"
#include "kernels.h"
#include "linear_tasks.h"

namespace ew {
namespace {

struct SparseFormat {
  int64_t step;         // k that SparsePanel goes on by
  int64_t value_bytes;  // of 32 columns in a step
  bool index;           // whether places are what tables of dot_*.h are looked up by
};
constexpr SparseFormat kSparseF32 = {4, 256, false}, kSparseBf16 = {4, 128, true},
                       kSparseInt8 = {4, 64, true}, kSparseInt4 = {8, 64, true};

constexpr int64_t kSparseDepth = 32;  // k of a block
constexpr int64_t kPlaceBytes = kPanel * 4;
constexpr int64_t block_bytes(const SparseFormat& f) {
  return kPlaceBytes + kSparseDepth / f.step * f.value_bytes;
}
constexpr int64_t sparse_bytes(const SparseFormat& f, int64_t k) {  // of a panel
  return (k + kSparseDepth - 1) / kSparseDepth * block_bytes(f);
}

// Goes over a panel: after next(), `values` are those of the step, and the places of its first quad the
// lowest 4 bits of `places`, of 16 columns and of the 16 behind them.
template <SparseFormat Format>
struct SparsePanel {
  const uint8_t* block;
  const uint8_t* values = nullptr;
  int64_t left = 0;  // steps of the block
  I16 places[2] = {};

  static EW_INLINE I16 places_at(const uint8_t* at) {
    if constexpr (Format.index) return to_index(load_places(at));
    return load_places(at);
  }
  EW_INLINE void next() {
    if (left == 0) {
      places[0] = places_at(block), places[1] = places_at(block + 64);
      values = block + kPlaceBytes;
      for (int64_t i = 0; i < block_bytes(Format); i += 64) __builtin_prefetch(block + kAheadBytes + i);
      block += block_bytes(Format);
      left = kSparseDepth / Format.step - 1;
      return;
    }
    places[0] = shift<static_cast<int>(Format.step)>(places[0]);
    places[1] = shift<static_cast<int>(Format.step)>(places[1]);
    values += Format.value_bytes;
    --left;
  }
};

// A panel of integers as a dense one, panel32x4 or panel32x8: `steps` steps of it.
template <SparseFormat Format>
void spread_panel(SparsePanel<Format> panel, int64_t steps, uint8_t* out) {
  for (int64_t step = 0; step < steps; ++step, out += kPanel * 4) {
    panel.next();
    for (int c = 0; c < 2; ++c) {
      const uint8_t* values = panel.values + c * 32;
      const I16 places = panel.places[c];
      if constexpr (Format.step == 4) {
        store_spread(out + c * 64, spread_bytes(values, places));
      } else {
        store_nibbles(out + c * 64, spread_low(values, places), spread_high(values, shift<4>(places)));
      }
    }
  }
}

}  // namespace
}  // namespace ew
