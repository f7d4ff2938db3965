#include "tuning_of.h"

#include <stdexcept>

namespace ew {
namespace {

struct Field {
  const char* name;
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

Tuning tuning_of(const std::map<std::string, int64_t>& chosen) {
  Tuning tuning;
  for (const auto& [name, value] : chosen) {
    const Field* found = nullptr;
    for (const Field& field : kFields) {
      if (name == field.name) found = &field;
    }
    if (found == nullptr) throw std::invalid_argument("tuning: there is no " + name);
    if (value < 0 || value > found->most) {
      throw std::invalid_argument("tuning: " + name + " = " + std::to_string(value) + " is not in [0, " +
                                  std::to_string(found->most) + "]");
    }
    tuning.*found->field = value;
  }
  return tuning;
}

}  // namespace ew
