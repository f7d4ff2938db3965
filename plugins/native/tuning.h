// Reads a tuning from the names of its fields, as Python passes it. Kernels include ../cpu/kernels/tuning.h
// alone.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "../cpu/kernels/tuning.h"

namespace ew {

// Returns a tuning of values by field name; a field that isn't named stays 0. Throws std::invalid_argument
// for an unknown name and for a number out of range.
Tuning parse_tuning(const std::map<std::string, int64_t>& values);

}  // namespace ew
