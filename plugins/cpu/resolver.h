// Turns the steps of a program into kernel arguments for one set of sizes.
#pragma once

#include <variant>
#include <vector>

#include "index_check.h"
#include "program.h"

namespace ew {

// Where everything that a program refers to lies in memory.
struct Memory {
  char* arena = nullptr;
  int64_t arena_bytes = 0;
  std::vector<const int32_t*> inputs;  // by step input index
  std::vector<int64_t> table_strides;  // by cache group: entries from row to row of its block table
  std::vector<KvCache> caches;         // by Program::caches index
  Workspace* workspace = nullptr;
};

using Arguments =
    std::variant<std::monostate, EmbeddingArgs, LinearArgs, NormArgs, RopeTableArgs, RopeArgs,
                 GatedActivationArgs, KvWriteArgs, PagedAttentionArgs, TakeRowsArgs, ElementwiseArgs,
                 CopyArgs, ReduceArgs, EmbeddingBf16Args, EmbeddingInt8Args, EmbeddingInt4Args, CastBf16Args,
                 LinearBf16Args, EmbeddingFp8Args, LinearFp8Args, Grouped<LinearFp8Args>,
                 QuantizeActivationArgs, LinearInt8Args, LinearInt4Args, RouteExpertsArgs, CombineExpertsArgs,
                 Grouped<LinearArgs>, Grouped<LinearBf16Args>, Grouped<LinearInt8Args>,
                 Grouped<LinearInt4Args>, TopKArgs, GatherArgs, ScatterArgs, ThenQuantize<NormArgs>,
                 ThenQuantize<GatedActivationArgs>, RopeKvWriteArgs>;

struct ResolvedStep {
  Op op = Op::copy;
  int index = 0;     // in Program::steps
  IndexCheck check;  // of what other steps computed, to be made before it runs
  Arguments arguments;
};

// A buffer operand's place for one set of sizes.
struct Place {
  char* data = nullptr;
  int64_t bytes = 0;  // from its first element to the end of its last; 0 if it is empty
  std::vector<int64_t> shape, strides;
};

// Steps with an empty output are left out. Throws std::invalid_argument naming the step and the operand that
// is outside of its buffer or weight, or that overlaps an output it may not overlap.
std::vector<ResolvedStep> resolve(const Program& program, const Memory& memory, const Sizes& sizes);

// The same checks for a single operand of kind buffer or weight. Its rows are padded to a multiple of
// `padding` elements, which must lie inside too.
Place locate(const Program& program, const Memory& memory, const Sizes& sizes, const Operand& operand,
             const std::string& subject, int64_t padding = 1);

}  // namespace ew
