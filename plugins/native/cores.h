// Which cores this process may use, and threads that stay on one.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace ew {

// The cores of the calling thread's affinity, ascending; where the system has no such thing, 0 .. cores-1.
std::vector<int> usable_cores();
int count_usable_cores();

// Bytes of a core's second-level cache, or of the third; what most have where the system doesn't say.
int64_t cache_bytes(int level);

// Advice: nothing happens where it can't be done.
void bind_to_core(std::thread& thread, int core);

}  // namespace ew
