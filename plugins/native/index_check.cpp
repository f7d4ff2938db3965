#include "index_check.h"

#include <stdexcept>

namespace ew {
namespace {

[[noreturn]] void fail(const IndexCheck& check, const std::string& title, int64_t index, int32_t value,
                       const std::string& problem) {
  throw std::invalid_argument(title + ": " + check.name + "[" + std::to_string(index) +
                              "] = " + std::to_string(value) + " is " + problem);
}

std::string range(int64_t limit) { return "not in [0, " + std::to_string(limit) + ")"; }

}  // namespace

void check_indices(const IndexCheck& check, const std::string& title, std::vector<int32_t>& inverse) {
  if (check.rule == IndexRule::range) {
    for (int64_t row = 0; row < check.outer * check.inner; ++row) {
      const int32_t* values = check.values.data + row / check.inner * check.values.stride0 +
                              row % check.inner * check.values.stride1;
      for (int64_t i = 0; i < check.count; ++i) {
        if (values[i] < 0 || values[i] >= check.limit)
          fail(check, title, row * check.count + i, values[i], range(check.limit));
      }
    }
    return;
  }
  const int32_t* values = check.values.data;
  if (check.rule == IndexRule::starts) {
    for (int64_t i = 0; i < check.count; ++i) {
      if (values[i] < (i == 0 ? 0 : values[i - 1]) || values[i] > check.limit)
        fail(check, title, i, values[i],
             "not an ascending start in [0, " + std::to_string(check.limit) + "]");
    }
  } else if (check.rule == IndexRule::permutation) {
    inverse.assign(static_cast<size_t>(check.limit), -1);
    for (int64_t i = 0; i < check.count; ++i) {
      if (values[i] < 0 || values[i] >= check.limit) fail(check, title, i, values[i], range(check.limit));
      int32_t& place = inverse[static_cast<size_t>(values[i])];
      if (place >= 0) fail(check, title, i, values[i], "there twice");
      place = static_cast<int32_t>(i);
    }
  }
}

}  // namespace ew
