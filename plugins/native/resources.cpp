#include "resources.h"

#include <new>
#include <stdexcept>
#include <utility>

namespace ew {
namespace {

[[noreturn]] void fail(const std::string& problem) { throw std::invalid_argument(problem); }

// By Program::caches: layers whose attention chooses the blocks that it looks at, in each step that has it.
std::vector<char> choosing_layers(const Program& program) {
  std::vector<char> chooses(program.caches().size(), 0), whole = chooses;
  for (const Step& step : program.steps()) {
    if (step.op_name != "paged_attention") continue;
    for (const Operand& operand : step.inputs) {
      if (operand.kind != OperandKind::cache) continue;
      (step.attributes.choice.best > 0 ? chooses : whole)[static_cast<size_t>(operand.index)] = 1;
    }
  }
  for (size_t i = 0; i < whole.size(); ++i) chooses[i] = chooses[i] && !whole[i];
  return chooses;
}

}  // namespace

Resources::Resources(const Program& program, std::vector<int64_t> blocks, int threads, const std::string& isa,
                     const Tuning& tuning, Exchange* exchange, const OffloadPlan& offload)
    : kernels_(kernels_for(isa.c_str())), blocks_(std::move(blocks)), pool_(threads, Binding::none, tuning) {
  if (!kernels_) fail("isa " + isa + " is not available: this processor or this build lacks it");
  if (threads < 1) fail("threads = " + std::to_string(threads) + " is below 1");
  const std::vector<CacheGroup>& groups = program.groups();
  if (blocks_.size() != groups.size()) fail("blocks must have one entry a cache group");
  for (size_t g = 0; g < blocks_.size(); ++g) {
    const int64_t most = INT32_MAX / groups[g].block_tokens;  // slots are 32-bit integers
    if (blocks_[g] < 1 || blocks_[g] > most) {
      fail("blocks of cache group " + groups[g].name + " = " + std::to_string(blocks_[g]) +
           " is not in [1, " + std::to_string(most) + "]");
    }
  }
  if (!offload.slots.empty() && (offload.slots.size() != groups.size() || exchange))
    fail("offloaded blocks must have one number a cache group, and no other ranks");
  const std::vector<char> chooses = choosing_layers(program);
  if (!offload.slots.empty()) file_ = std::make_unique<OffloadFile>(offload.folder);
  int64_t in_file = 0;
  for (const CacheLayer& layer : program.caches()) {
    const CacheGroup& group = groups[static_cast<size_t>(layer.group)];
    KvCache cache{static_cast<const KvShape&>(group)};
    const int64_t slots = offload.slots.empty() ? 0 : offload.slots[static_cast<size_t>(layer.group)];
    const size_t index = caches_.size();
    offloaded_.push_back(nullptr);
    if (slots != 0 && chooses[index]) {
      const int64_t count = blocks_[static_cast<size_t>(layer.group)];
      if (slots < 1 || slots > count)
        fail("slots of cache group " + group.name + ": " + std::to_string(slots) + " of " +
             std::to_string(count) + " blocks");
      layers_.push_back(std::make_unique<OffloadedLayer>(*file_, cache, layer.group, count, slots, in_file));
      in_file += OffloadedLayer::file_bytes(cache, count);
      cache_bytes_ += layers_.back()->memory_bytes();
      offloaded_.back() = layers_.back().get();
      caches_.push_back(layers_.back()->cache());
      continue;
    }
    for (const auto& [data, piece] :
         {std::pair{&cache.k, group.key_bytes()}, std::pair{&cache.v, group.value_bytes()}}) {
      if (piece == 0) continue;                 // a state has no values, and nor have keys that contain them
      int64_t bytes = group.pieces(1) * piece;  // of a block: at most 2^47
      if (__builtin_mul_overflow(bytes, blocks_[static_cast<size_t>(layer.group)], &bytes))
        throw std::bad_alloc();
      *data = exchange ? exchange->cache_memory(bytes) : nullptr;
      if (!*data) *data = cache_memory_.emplace_back(bytes, Pages::normal).data();
      cache_bytes_ += bytes;
    }
    caches_.push_back(cache);
  }
}

void Resources::reserve_arena(int64_t bytes) {
  if (bytes <= arena_.bytes()) return;
  arena_ = {};  // first: there may be no room for both
  arena_bytes_ = 0;
  arena_ = ZeroedMemory(bytes, Pages::huge);
  arena_bytes_ = bytes;
}

}  // namespace ew
