// Indices that a step computed: kernels trust them, so they are looked at when they are known, before the
// kernel that follows them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../cpu/kernels/kernels.h"

namespace ew {

enum class IndexRule : uint8_t {
  none,
  range,        // each in 0 .. limit-1
  starts,       // each in 0 .. limit, never less than the one before
  permutation,  // of 0 .. limit-1
};

struct IndexCheck {
  IndexRule rule = IndexRule::none;
  const char* name = "";  // for messages: ids, rows, ...
  Rows<const int32_t> values;
  int64_t outer = 0, inner = 1, count = 0;  // [outer, inner, count]
  int64_t limit = 0;
};

// Throws std::invalid_argument: the title, which index it is, and what it should be.
// Of a permutation `inverse` becomes the inverse.
void check_indices(const IndexCheck& check, const std::string& title, std::vector<int32_t>& inverse);

}  // namespace ew
