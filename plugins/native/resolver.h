// Turns the steps of a program into kernel arguments for one set of sizes.
#pragma once

#include <atomic>
#include <map>
#include <utility>
#include <vector>

#include "offload.h"
#include "ops/op.h"
#include "program.h"

namespace ew {

// How many rows each expert was given, by the step that sends them there. Counted while steps run, and read
// by anybody.
using ExpertRows = std::map<size_t, std::vector<std::atomic<int64_t>>>;

// Where everything that a program refers to lies in memory.
struct Memory {
  char* arena = nullptr;
  int64_t arena_bytes = 0;
  std::map<int, std::pair<char*, int64_t>> regions;  // of the exchange with other ranks, and their bytes
  std::vector<const int32_t*> inputs;                // by step input index
  std::vector<int64_t> table_strides;      // by cache group: entries from row to row of its block table
  std::vector<KvCache> caches;             // by Program::caches index
  std::vector<OffloadedLayer*> offloaded;  // likewise; null: all of its blocks are in memory
  Workspace* workspace = nullptr;
  ExpertRows* expert_rows = nullptr;
};

struct ResolvedStep {
  int index = 0;     // in Program::steps
  IndexCheck check;  // of what other steps computed, to be made before it runs
  Call call;
};

// A buffer operand's place for one set of sizes.
struct Place {
  char* data = nullptr;
  int64_t bytes = 0;  // from its first element to the end of its last; 0 if it is empty
  std::vector<int64_t> shape, strides;

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

// Steps with an empty output are left out. Throws std::invalid_argument naming the step and the operand that
// is outside of its buffer or weight, or that overlaps an output it may not overlap.
std::vector<ResolvedStep> resolve(const Program& program, const Memory& memory, const Sizes& sizes);

// The same checks for a single operand of kind buffer or weight. Its rows are padded to a multiple of
// `padding` elements, which must lie inside too.
Place locate(const Program& program, const Memory& memory, const Sizes& sizes, const Operand& operand,
             const std::string& subject, int64_t padding = 1);

}  // namespace ew
