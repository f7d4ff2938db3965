// What the ranks of a partitioned model share on one machine: memory that all of them see, and places where
// they wait for each other. See runtime/ranks/partition.py for the programs that ranks run.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"

namespace ew {

// Neighbours in the order of ranks: one stage of a pipeline.
struct RankGroup {
  int first = 0, count = 1;
};

// Rows of a matrix that are copied, in bytes.
struct RowCopy {
  const char* from = nullptr;
  char* to = nullptr;
  int64_t rows = 0, size = 0, from_stride = 0, to_stride = 0;
};

// A matrix of which each rank of a group has a part: `bytes` of each of `rows` rows.
struct Gathered {
  struct Part {
    int64_t first_row = 0, rows = 0, first_byte = 0, bytes = 0;
    int64_t size() const { return rows * bytes; }
  };
  char* data = nullptr;  // the whole
  int64_t stride = 0;    // bytes from row to row
  std::vector<Part> parts;
};

class Exchange {
 public:
  static constexpr int kRegions = 64;
  static constexpr int64_t kRegionSpace = int64_t{1} << 34;  // bytes that a region may have at most

  virtual ~Exchange() = default;

  // A region of memory, one of kRegions, of at least `bytes` bytes, zero at first, that every rank sees. It
  // never moves, and keeps what is in it when it grows. Throws std::bad_alloc.
  virtual char* memory(int region, int64_t bytes) = 0;

  // Memory for a KV cache of this rank, zero at first, that rank 0 sees too; null: it doesn't, and the caches
  // are to be memory of the rank's own. Throws std::bad_alloc.
  virtual char* cache_memory([[maybe_unused]] int64_t bytes) { return nullptr; }

  // Returns once every rank of the group, of which this is one, has called it as often as this one has: what
  // they wrote before is seen after. All that wait throw std::runtime_error if a rank is lost.
  virtual void meet(RankGroup group) = 0;

  // A message a step from the ranks of one stage to those of the next: what lies in a region between them.
  virtual void await_room(RankGroup receivers) = 0;  // until they have taken what was sent before
  virtual void sent() = 0;
  virtual void await_message(RankGroup senders) = 0;  // until all of them have sent
  virtual void taken() = 0;

  // The same as programs ask for them, by what is exchanged: where ranks see the same memory, it is there
  // already or is copied within it. Before a step: returns once what other ranks see of this one's values may
  // be written again.
  virtual void begin(RankGroup group) { meet(group); }
  // Afterwards every rank of the group has all parts; of `to` >= 0, that one of the group alone.
  virtual void gather(RankGroup group, [[maybe_unused]] int to,
                      [[maybe_unused]] std::span<const Gathered> matrices) {
    meet(group);
  }
  // `copies`: into the region between the stages, and out of it. `whole`: where it goes, and who sends what.
  virtual void send(RankGroup receivers, std::span<const RowCopy> copies);
  virtual void receive(RankGroup senders, std::span<const RowCopy> copies,
                       [[maybe_unused]] std::span<const Gathered> whole);
};

// What ranks share that are threads of one process.
class ThreadRanks {
 public:
  explicit ThreadRanks(int ranks) : counts_(static_cast<size_t>(ranks)) {}

  // From now on every rank that waits, or will wait, throws this.
  void abandon(const std::string& problem);

 private:
  friend class ThreadExchange;
  struct Counts {
    uint64_t met = 0, sent = 0, taken = 0;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, ZeroedMemory> regions_;
  std::vector<Counts> counts_;
  std::string problem_;
};

// The exchange of one such rank, which one thread at a time calls.
class ThreadExchange : public Exchange {
 public:
  ThreadExchange(std::shared_ptr<ThreadRanks> ranks, int rank);  // throws std::invalid_argument
  char* memory(int region, int64_t bytes) override;
  void meet(RankGroup group) override;
  void await_room(RankGroup receivers) override;
  void sent() override;
  void await_message(RankGroup senders) override;
  void taken() override;

 private:
  // Changes this rank's counts, then waits until all of a group are ready.
  template <class Change, class Ready>
  void wait(RankGroup group, const Change& change, const Ready& ready);

  const std::shared_ptr<ThreadRanks> ranks_;
  ThreadRanks::Counts& own_;
};

// The exchange of a rank that shares no memory with the others, as they are on other machines: it packs what
// is exchanged into messages, which a function moves. One thread at a time calls it.
class MessageExchange : public Exchange {
 public:
  // What goes to each of some ranks, and what comes from others.
  struct Messages {
    std::vector<int> to;
    std::span<char> own;
    std::vector<int> from;
    std::vector<std::span<char>> theirs;
  };
  // Returns once `theirs` are there, and `own` may be written again; what it throws ends the step.
  using Move = std::function<void(const Messages&)>;

  MessageExchange(int rank, Move move) : rank_(rank), move_(std::move(move)) {}
  MessageExchange(const MessageExchange&) = delete;
  MessageExchange& operator=(const MessageExchange&) = delete;
  char* memory(int region, int64_t bytes) override;  // the rank's own
  void begin(RankGroup) override {}
  void gather(RankGroup group, int to, std::span<const Gathered> matrices) override;
  void send(RankGroup receivers, std::span<const RowCopy> copies) override;
  void receive(RankGroup senders, std::span<const RowCopy> copies, std::span<const Gathered> whole) override;

  // Throw std::logic_error: nothing is seen without a message.
  void meet(RankGroup) override { refuse(); }
  void await_room(RankGroup) override { refuse(); }
  void sent() override { refuse(); }
  void await_message(RankGroup) override { refuse(); }
  void taken() override { refuse(); }

 private:
  [[noreturn]] static void refuse();
  // Receives the parts of some ranks of a group, `own` having been packed for ranks `to`.
  void swap(RankGroup group, std::vector<int> to, bool receives, std::span<const Gathered> matrices);

  const int rank_;
  const Move move_;
  std::map<int, ZeroedMemory> regions_;
  std::vector<char> own_, theirs_;
};

}  // namespace ew
