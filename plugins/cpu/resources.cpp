#include "resources.h"

#include <new>
#include <stdexcept>
#include <utility>

namespace ew {
namespace {

[[noreturn]] void fail(const std::string& problem) { throw std::invalid_argument(problem); }

// The window is the attention's matter: the memory is the same.
bool same_memory(const CacheGroup& a, const CacheGroup& b) {
  return a.name == b.name && a.layers == b.layers && a.kv_heads == b.kv_heads && a.key_size == b.key_size &&
         a.value_size == b.value_size && a.format == b.format;
}

}  // namespace

Resources::Resources(const Program& program, std::vector<int64_t> blocks, int threads, const std::string& isa,
                     const Tuning& tuning)
    : kernels_(kernels_for(isa.c_str())),
      groups_(program.groups()),
      blocks_(std::move(blocks)),
      pool_(threads, Binding::none, tuning) {
  if (!kernels_) fail("isa " + isa + " is not available on this processor");
  if (threads < 1) fail("threads = " + std::to_string(threads) + " is below 1");
  if (blocks_.size() != groups_.size()) fail("blocks must have one entry a cache group");
  for (size_t g = 0; g < blocks_.size(); ++g) {
    if (blocks_[g] < 1 || blocks_[g] > INT32_MAX / kBlock) {
      fail("blocks of cache group " + groups_[g].name + " = " + std::to_string(blocks_[g]) +
           " is not in [1, " + std::to_string(INT32_MAX / kBlock) + "]");
    }
  }
  for (const CacheLayer& layer : program.caches()) {
    const CacheGroup& group = groups_[static_cast<size_t>(layer.group)];
    KvCache cache{nullptr, nullptr, group.kv_heads, group.key_size, group.value_size, group.format};
    for (const auto& [data, size] :
         {std::pair{&cache.k, group.key_size}, std::pair{&cache.v, group.value_size}}) {
      int64_t bytes = group.kv_heads * kv_piece_bytes(group.format, size);  // of a block: at most 2^47
      if (__builtin_mul_overflow(bytes, blocks_[static_cast<size_t>(layer.group)], &bytes))
        throw std::bad_alloc();
      cache_memory_.emplace_back(bytes, Pages::normal);
      *data = cache_memory_.back().data();
      cache_bytes_ += cache_memory_.back().bytes();
    }
    caches_.push_back(cache);
  }
}

void Resources::check(const Program& program) const {
  if (program.groups().size() != groups_.size()) {
    fail("the program has " + std::to_string(program.groups().size()) +
         " cache groups, and the one that it shares caches with " + std::to_string(groups_.size()));
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (!same_memory(program.groups()[g], groups_[g])) {
      fail("cache group " + program.groups()[g].name + " isn't as in the program that it shares caches with");
    }
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
