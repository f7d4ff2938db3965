#include "cores.h"

#include <unistd.h>

#include <algorithm>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace ew {

int64_t cache_bytes(int level) {
  int64_t bytes = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  bytes = sysconf(level == 2 ? _SC_LEVEL2_CACHE_SIZE : _SC_LEVEL3_CACHE_SIZE);
#endif
  return bytes > 0 ? bytes : int64_t{1} << (level == 2 ? 19 : 22);
}

#if defined(__linux__)

namespace {

constexpr int kMostCores = 8192;  // more than any system has; the set is 1 KB

struct CoreSet {
  cpu_set_t words[kMostCores / CPU_SETSIZE] = {};
};

}  // namespace

std::vector<int> usable_cores() {
  CoreSet set;
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof set, set.words) == 0) {
    for (int core = 0; core < kMostCores; ++core) {
      if (CPU_ISSET_S(core, sizeof set, set.words)) cores.push_back(core);
    }
  }
  if (cores.empty()) cores.push_back(0);
  return cores;
}

int count_usable_cores() {
  CoreSet set;
  if (sched_getaffinity(0, sizeof set, set.words) != 0) return 1;
  return CPU_COUNT_S(sizeof set, set.words);
}

void bind_to_core(std::thread& thread, int core) {
  if (core < 0 || core >= kMostCores) return;
  CoreSet set;
  CPU_SET_S(core, sizeof set, set.words);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, set.words);
}

#else

std::vector<int> usable_cores() {
  std::vector<int> cores(std::max(1u, std::thread::hardware_concurrency()));
  for (size_t i = 0; i < cores.size(); ++i) cores[i] = static_cast<int>(i);
  return cores;
}

int count_usable_cores() { return static_cast<int>(usable_cores().size()); }

void bind_to_core(std::thread&, int) {}

#endif

}  // namespace ew
