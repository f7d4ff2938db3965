// Keys and values that wait in a file while no row looks at them.
//
// Where rows choose the blocks that they attend to (kernels/attention_choice.h), most blocks of a long
// context are seldom read. Then a layer has memory for some of its blocks alone, its slots; what a block's
// keys may score stays in memory for all. Before a kernel reads or writes blocks, they are fetched: the
// blocks that were used last the longest ago give their slots to them, and are written to the file unless it
// has them already.
//
// It is an unlinked temporary file, gone with the process. What comes back from it is believed only if its
// hash (SipHash-2-4: Aumasson and Bernstein, 2012; the key is drawn for each file, and the hashes are in
// memory) is that of what was written.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/kernels/kernels.h"
#include "memory.h"

namespace ew {

uint64_t siphash(const uint64_t key[2], const void* data, size_t bytes);

// The file refused what was to be written. Where it failed to give a block back, `lost` is that block.
struct OffloadError : std::runtime_error {
  explicit OffloadError(const std::string& problem, int64_t block = -1, int of_group = -1)
      : std::runtime_error(problem), lost(block), group(of_group) {}
  int64_t lost;
  int group;
};

// Blocks of a layer so far. Counted while steps run, and read by any thread.
struct OffloadCounts {
  std::atomic<int64_t> found = 0, read = 0, written = 0, lost = 0;
};

class OffloadFile {
 public:
  explicit OffloadFile(const std::string& folder);  // throws OffloadError
  ~OffloadFile();
  OffloadFile(const OffloadFile&) = delete;
  OffloadFile& operator=(const OffloadFile&) = delete;

  void write(int64_t offset, const void* data, int64_t bytes);          // throws OffloadError
  bool read(int64_t offset, void* data, int64_t bytes) const noexcept;  // whether all of it came
  uint64_t hash(const void* data, int64_t bytes) const {
    return siphash(key_, data, static_cast<size_t>(bytes));
  }

  OffloadCounts counts;

 private:
  std::string folder_;
  int descriptor_ = -1;
  uint64_t key_[2];
};

// A layer's blocks, some of which are in memory.
class OffloadedLayer {
 public:
  // `cache`: its sizes. `offset`: where its records begin in the file.
  OffloadedLayer(OffloadFile& file, const KvCache& cache, int group, int64_t blocks, int64_t slots,
                 int64_t offset);

  const KvCache& cache() const { return cache_; }  // whose pointers stay
  int group() const { return group_; }
  int64_t slots() const { return static_cast<int64_t>(block_in_.size()); }
  int64_t memory_bytes() const;
  static int64_t file_bytes(const KvCache& cache, int64_t blocks);

  // Brings blocks into memory, each named once or more; no more of them than there are slots. `written`:
  // their slots are about to be written to. Throws OffloadError, std::invalid_argument.
  void fetch(std::span<const int32_t> blocks, bool written);
  // Of the blocks of some tokens' slots.
  void fetch_written(const int32_t* token_slots, int64_t tokens);
  // The same keys and values, all of them, for another block.
  void copy(int32_t from, int32_t to);

  // paged_attention, for as many rows at a time as the memory has slots for what they chose.
  void attend(const PagedAttentionArgs& args, const KernelTable& kernels, Workers& pool);

 private:
  bool in_memory(int64_t block) const {
    return block_in_[static_cast<size_t>(place_[static_cast<size_t>(block)])] == block;
  }
  void evict(int64_t slot);
  void read(int64_t block, int64_t slot);
  uint64_t hash(int64_t slot);
  char* keys(int64_t slot) { return static_cast<char*>(cache_.k) + slot * key_bytes_; }
  char* values(int64_t slot) { return static_cast<char*>(cache_.v) + slot * value_bytes_; }

  OffloadFile& file_;
  KvCache cache_;
  const int group_;
  const int64_t key_bytes_, value_bytes_, summary_bytes_, offset_;  // of a block
  ZeroedMemory key_memory_, value_memory_, summaries_;
  std::vector<int32_t> place_;     // of each block: its slot, if that has it
  std::vector<int64_t> block_in_;  // of each slot; -1: none
  std::vector<uint64_t> used_;     // of each slot: when it was asked for last
  std::vector<char> changed_;      // of each slot: the file lacks what is in it
  std::vector<char> stored_;       // of each block: the file has it
  std::vector<uint64_t> hashes_;   // of what the file has
  uint64_t clock_ = 0;
  std::vector<int32_t> wanted_, missing_, table_, starts_, lengths_;
  std::vector<uint64_t> seen_, chosen_;
  uint64_t seen_clock_ = 0;
};

}  // namespace ew
