// Two of every four: what the two places of a quad, 4 bits, select. Tables for the vectors of dot_*.h.
//
//   bits 0, 1: the place of the first kept k of the four;  bits 2, 3: of the second
#pragma once

#include <cstdint>

namespace ew {
namespace {

struct PlaceTable {
  alignas(64) uint32_t of[16];  // by the 4 bits
};

// Of 4 bytes, one for each k, where its value is: byte 0 or 1 of the kept ones, or byte 2, which has the
// zero.
constexpr PlaceTable make_spread() {
  PlaceTable table = {};
  for (uint32_t bits = 0; bits < 16; ++bits) {
    const uint32_t first = bits & 3, second = bits >> 2;
    for (uint32_t k = 0; k < 4; ++k) {
      table.of[bits] |= (k == second ? 1u : k == first ? 0u : 2u) << (8 * k);
    }
  }
  return table;
}
constexpr PlaceTable kSpread = make_spread();

// The bytes of the first kept one of 4 values of 16 bits, then of the second.
constexpr PlaceTable make_chosen() {
  PlaceTable table = {};
  for (uint32_t bits = 0; bits < 16; ++bits) {
    const uint32_t first = 2 * (bits & 3), second = 2 * (bits >> 2);
    table.of[bits] = first | (first + 1) << 8 | second << 16 | (second + 1) << 24;
  }
  return table;
}
constexpr PlaceTable kChosen = make_chosen();

// By the 3 lowest bits of the Gray code of a quad's 4 bits, which no two pairs of places share.
constexpr PlaceTable by_gray_code(const PlaceTable& table) {
  PlaceTable found = {};
  for (uint32_t first = 0; first < 4; ++first) {
    for (uint32_t second = first + 1; second < 4; ++second) {
      const uint32_t bits = first | second << 2;
      found.of[(bits ^ bits >> 1) & 7] = table.of[bits];
    }
  }
  return found;
}
constexpr PlaceTable kSpreadOfIndex = by_gray_code(kSpread), kChosenOfIndex = by_gray_code(kChosen);

// In each 128 bits, which a byte shuffle doesn't leave, the first byte of each column.
constexpr uint32_t kColumn[4] = {0x00000000, 0x04040404, 0x08080808, 0x0c0c0c0c};

}  // namespace
}  // namespace ew
