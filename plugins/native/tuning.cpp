#include "tuning.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string_view>

namespace ew {
namespace {

struct Field {
  std::string_view name;
  int64_t Tuning::* field;
  int64_t most;
};

constexpr Field kFields[] = {
    {"small_work", &Tuning::small_work, int64_t{1} << 40},
    {"task_bytes", &Tuning::task_bytes, int64_t{1} << 40},
    {"task_rows", &Tuning::task_rows, 1 << 20},
    {"thread_tasks", &Tuning::thread_tasks, 1 << 20},
    {"split_tiles", &Tuning::split_tiles, 1 << 20},
    {"spin_microseconds", &Tuning::spin_microseconds, 1'000'000},
};

}  // namespace

Tuning parse_tuning(const std::map<std::string, int64_t>& values) {
  Tuning tuning;
  for (const auto& [name, value] : values) {
    const auto* field = std::ranges::find(kFields, name, &Field::name);
    if (field == std::end(kFields)) throw std::invalid_argument("tuning: there is no " + name);
    if (value < 0 || value > field->most) {
      throw std::invalid_argument("tuning: " + name + " = " + std::to_string(value) + " is not in [0, " +
                                  std::to_string(field->most) + "]");
    }
    tuning.*field->field = value;
  }
  return tuning;
}

}  // namespace ew
