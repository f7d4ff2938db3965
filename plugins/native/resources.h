// What a program runs on: its KV caches, the arena that intermediate values lie in, threads.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange.h"
#include "memory.h"
#include "offload.h"
#include "program.h"
#include "sampler.h"
#include "thread_pool.h"

namespace ew {

// Where keys and values wait while no row looks at them, and for how many blocks of each cache group there is
// memory in the layers that choose; 0: for all.
struct OffloadPlan {
  std::string folder;
  std::vector<int64_t> slots;
};

// Whoever runs a step, or reads what one left, holds `mutex()`.
class Resources {
 public:
  // Caches as the program has them, in the exchange's memory if it has some for them. blocks: P of each cache
  // group. isa: one of available_isas(). Throws std::invalid_argument, std::bad_alloc, OffloadError.
  Resources(const Program& program, std::vector<int64_t> blocks, int threads, const std::string& isa,
            const Tuning& tuning = {}, Exchange* exchange = nullptr, const OffloadPlan& offload = {});

  // Makes the arena at least so large. It may move, and loses what it had. Throws std::bad_alloc; it is empty
  // then.
  void reserve_arena(int64_t bytes);

  const ZeroedMemory& arena() const { return arena_; }
  int64_t arena_bytes() const { return arena_bytes_; }            // may be asked for while a step runs
  const std::vector<KvCache>& caches() const { return caches_; }  // as Program::caches
  const std::vector<OffloadedLayer*>& offloaded() const { return offloaded_; }  // likewise, or null
  const OffloadCounts* offload_counts() const { return file_ ? &file_->counts : nullptr; }
  int64_t blocks(size_t group) const { return blocks_[group]; }
  int64_t cache_bytes() const { return cache_bytes_; }  // address space; blocks never written cost no memory
  const KernelTable& kernels() const { return *kernels_; }
  ThreadPool& pool() { return pool_; }
  Workspace& workspace() { return workspace_; }
  Sampler& sampler() { return sampler_; }
  std::mutex& mutex() { return mutex_; }

 private:
  const KernelTable* kernels_;
  std::vector<int64_t> blocks_;             // by group
  std::vector<ZeroedMemory> cache_memory_;  // none where it is the exchange's
  std::vector<KvCache> caches_;
  std::unique_ptr<OffloadFile> file_;
  std::vector<std::unique_ptr<OffloadedLayer>> layers_;  // those that have slots
  std::vector<OffloadedLayer*> offloaded_;
  int64_t cache_bytes_ = 0;
  ZeroedMemory arena_;
  std::atomic<int64_t> arena_bytes_ = 0;
  Workspace workspace_;
  ThreadPool pool_;
  Sampler sampler_;
  std::mutex mutex_;
};

}  // namespace ew
