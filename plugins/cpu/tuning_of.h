// A tuning by the names of its fields, as Python has it; apart from tuning.h, which kernels include.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tuning.h"

namespace ew {

// By name. Throws std::invalid_argument for a name that isn't there, and for a number out of range.
Tuning tuning_of(const std::map<std::string, int64_t>& chosen);

}  // namespace ew
