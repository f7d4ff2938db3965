// Ranks that are processes of one machine, joined by one file of shared memory without a name.
//
//   page 0        what concerns all: sizes, the problem that ended it, the number of the last step
//   page 1 + r    what rank r says, in a line of 128 bytes that it alone writes, but for its bell
//   inboxes       the inputs of the steps in flight, which rank 0 writes and the others read
//   regions       intermediate values that all ranks see
//   caches        the KV caches of rank 0, then of rank 1, ...
//
// The file is sparse: its address space costs nothing until it is used. Each rank maps what it needs,
// at addresses of its own. Whoever waits spins for a short time, then sleeps (futex) on the bell of its own
// line.
#pragma once

#include <chrono>
#include <cstdint>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "exchange.h"

namespace ew {

// What `memory` and `inbox` throw where the system has no shared memory left.
class NoSharedMemory : public std::bad_alloc {
 public:
  const char* what() const noexcept override { return "no shared memory is left"; }
};

class RankLink : public Exchange {
 public:
  // fd: the file that rank 0 has made, from now on owned by this object; -1 makes it. cache_bytes: of each
  // rank's KV caches, the same for all ranks; there are as many ranks as it has entries. spin: how long to
  // wait awake. in_flight: how many steps may be posted that rank 0 hasn't run. Throws std::invalid_argument
  // where the file was made for others, NoSharedMemory, std::runtime_error.
  RankLink(int fd, int rank, const std::vector<int64_t>& cache_bytes, std::chrono::nanoseconds spin,
           int in_flight = 1);
  ~RankLink() override;
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;

  int fd() const { return fd_; }
  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(cache_bytes_.size()); }

  // As Exchange has them. `meet` throws too where another rank's step has failed: that step alone is lost
  // then.
  char* memory(int region, int64_t bytes) override;
  char* cache_memory(int64_t bytes) override;
  void meet(RankGroup group) override;
  void await_room(RankGroup receivers) override;
  void sent() override;
  void await_message(RankGroup senders) override;
  void taken() override;

  // The caches of this rank, or for rank 0 of any: what its calls of `cache_memory` gave, one behind the
  // other at multiples of kCacheAlign.
  static constexpr int64_t kCacheAlign = 4096;
  static constexpr int kMostInFlight = 16;
  char* cache_region(int rank) const { return caches_[static_cast<size_t>(rank)]; }
  int64_t cache_bytes(int rank) const { return cache_bytes_[static_cast<size_t>(rank)]; }

  // Rank 0: waits until all others are through with the last step; then room for a step's inputs; then its
  // start. Rank 0 runs the step itself, or fails it; where several may be in flight, it begins each in its
  // turn.
  void wait_done();
  char* inbox(int64_t bytes);
  void post(int64_t bytes);
  void begin_step();
  // The others leave `wait_step` with false.
  void stop();

  // The others: waits for the next step; false where there will be none. Then the step's end.
  bool wait_step(std::span<const char>* inputs);
  void finish_step();

  // Any rank: the step that runs can't go on here. The others leave `meet` with the problem, and the link
  // stays usable; it is abandoned where several steps may be in flight, as ranks are in different ones.
  void fail_step(const std::string& problem);

  // From now on whatever waits, or will wait, throws this; the first problem counts. Any thread may call it.
  void abandon(const std::string& problem);
  std::string problem() const;  // empty: none

  // Gives the memory of all ranks back to the system, while the addresses stay: nobody needs what is in it.
  void release();

  // By rank, a number that changes whenever the rank gets further. Any thread may call it.
  std::vector<uint64_t> progress() const;
  bool sleeps() const;  // this rank waits for others, and is no more awake. Any thread may call it

 private:
  struct Header;
  struct Line;

  Line& line(int rank) const;
  void check_header() const;
  template <class Ready>
  void wait(const Ready& ready);
  template <class Ready>
  void wait_for(RankGroup group, const Ready& ready);
  void ring();
  char* map(int64_t offset, int64_t bytes);
  void unmap();
  void grow(int64_t offset, int64_t* have, int64_t bytes, int64_t most);
  [[noreturn]] void throw_problem() const;

  int fd_;
  const int rank_;
  const std::vector<int64_t> cache_bytes_;
  const std::chrono::nanoseconds spin_;
  std::vector<std::pair<char*, int64_t>> mapped_;
  char* base_ = nullptr;  // up to the regions
  int64_t bytes_ = 0;     // of the file
  Header* header_ = nullptr;
  char* regions_[kRegions] = {};
  std::vector<char*> caches_;  // null: another rank's, which this one has no use for
  int64_t inbox_at_ = 0, regions_at_ = 0, cache_used_ = 0;
  int64_t regions_have_[kRegions] = {};
  const int in_flight_;
  int64_t inbox_have_[kMostInFlight] = {};
  uint64_t step_ = 0, met_ = 0, posted_ = 0;
  std::string failed_elsewhere_;  // why this rank's step was lost with another's
};

}  // namespace ew
