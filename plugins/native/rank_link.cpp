#include "rank_link.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "spin.h"

namespace ew {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kInboxSpace = int64_t{1} << 32;  // of each step in flight
constexpr int64_t kRegionsSpace = Exchange::kRegions * Exchange::kRegionSpace;
constexpr int64_t kLeastGrowth = int64_t{1} << 16;
constexpr uint64_t kMagic = 0x314b4e4152574531;  // "1EWRANK1"
constexpr uint64_t kMeetingsOfStep = uint64_t{1} << 32;
constexpr size_t kMostProblem = 1000;

int64_t rounded(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

// Both return at once where there is nothing to do; signals and strangers may wake a sleeper.
void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A text for others: `size` is set last.
struct Note {
  std::atomic<uint32_t> size;
  char text[kMostProblem];

  void put(const std::string& problem) {
    const size_t count = std::min(problem.size(), kMostProblem);
    std::memcpy(text, problem.data(), count);
    size.store(static_cast<uint32_t>(count), std::memory_order_release);
  }
  std::string get() const {
    return {text, std::min<size_t>(size.load(std::memory_order_acquire), kMostProblem)};
  }
};

// Bytes that the system could still give, swap included; all there are where it doesn't say. The system would
// rather end a process than refuse it pages of shared memory.
int64_t free_bytes() {
  std::FILE* const file = std::fopen("/proc/meminfo", "re");
  if (!file) return INT64_MAX;
  char text[128];
  long long value = 0, available = -1, swap = 0;
  while (std::fgets(text, sizeof text, file)) {
    if (std::sscanf(text, "MemAvailable: %lld kB", &value) == 1) available = value;
    if (std::sscanf(text, "SwapFree: %lld kB", &value) == 1) swap = value;
  }
  std::fclose(file);
  return available < 0 ? INT64_MAX : (available + swap) * 1024;
}

}  // namespace

struct RankLink::Header {
  uint64_t magic;
  int64_t ranks, bytes;
  std::atomic<uint32_t> ready;
  std::atomic<uint32_t> stopped;
  std::atomic<uint32_t> abandoned;  // 1: the note is being written; 2: it is there
  alignas(128) std::atomic<uint64_t> posted;
  std::atomic<int64_t> inbox_bytes[kMostInFlight];
  alignas(128) Note note;
};

// What one rank says. `met` counts on from step * 2^32, so that ranks that left a step early are together
// again at the next.
struct RankLink::Line {
  alignas(128) std::atomic<uint64_t> met;
  std::atomic<uint64_t> sent;  // the last step of which it has sent a message, or taken one
  std::atomic<uint64_t> taken;
  std::atomic<uint64_t> done;    // the last step that it is through with
  std::atomic<uint64_t> failed;  // the last that failed here
  std::atomic<uint32_t> bell;    // what it sleeps on
  std::atomic<uint32_t> sleeps;
  alignas(128) Note note;  // why
};

RankLink::RankLink(int fd, int rank, const std::vector<int64_t>& cache_bytes, std::chrono::nanoseconds spin,
                   int in_flight)
    : fd_(fd), rank_(rank), cache_bytes_(cache_bytes), spin_(spin), in_flight_(in_flight) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
  static_assert(sizeof(Header) <= kPage && sizeof(Line) <= kPage);
  const bool makes = fd_ < 0;
  try {
    if (rank < 0 || rank >= ranks()) throw std::invalid_argument("rank is out of range");
    if (in_flight < 1 || in_flight > kMostInFlight) throw std::invalid_argument("in_flight is out of range");
    inbox_at_ = kPage * (1 + ranks());
    regions_at_ = inbox_at_ + kInboxSpace * kMostInFlight;
    bytes_ = regions_at_ + kRegionsSpace;
    for (const int64_t one : cache_bytes_) {
      if (one < 0 || one > INT64_MAX / 4 - bytes_) throw std::bad_alloc();
      bytes_ += rounded(one, kCacheAlign);
    }
    if (makes) {
      fd_ = memfd_create("enginewright-ranks", MFD_CLOEXEC);
      if (fd_ < 0) throw NoSharedMemory();
      if (ftruncate(fd_, bytes_) != 0) throw NoSharedMemory();
    } else {
      if (lseek(fd_, 0, SEEK_END) != bytes_) {  // fstat needs a newer glibc than wheels do
        throw std::invalid_argument(
            "the ranks' file has another size: it was made for other ranks or caches");
      }
    }
    base_ = map(0, regions_at_);
    int64_t have = 0;
    grow(0, &have, inbox_at_, inbox_at_);
    header_ = reinterpret_cast<Header*>(base_);
    if (makes) {
      header_->magic = kMagic, header_->ranks = ranks(), header_->bytes = bytes_;
      header_->ready.store(1, std::memory_order_release);
    } else {
      check_header();
    }
    int64_t at = regions_at_ + kRegionsSpace;
    for (const int64_t one : cache_bytes_) {
      const bool needed = one > 0 && (rank_ == 0 || static_cast<size_t>(rank_) == caches_.size());
      caches_.push_back(needed ? map(at, one) : nullptr);
      at += rounded(one, kCacheAlign);
    }
  } catch (...) {
    unmap();
    throw;
  }
}

RankLink::~RankLink() { unmap(); }

void RankLink::unmap() {
  for (const auto& [data, bytes] : mapped_) munmap(data, static_cast<size_t>(bytes));
  if (fd_ >= 0) close(fd_);
}

// Addresses for a piece of the file.
char* RankLink::map(int64_t offset, int64_t bytes) {
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_NORESERVE, fd_, offset);
  if (data == MAP_FAILED) throw NoSharedMemory();
  mapped_.emplace_back(static_cast<char*>(data), bytes);
  return mapped_.back().first;
}

void RankLink::check_header() const {
  if (header_->ready.load(std::memory_order_acquire) != 1 || header_->magic != kMagic ||
      header_->ranks != ranks() || header_->bytes != bytes_) {
    throw std::invalid_argument("the ranks' file was made for other ranks, or by another version");
  }
}

RankLink::Line& RankLink::line(int rank) const {
  return *reinterpret_cast<Line*>(base_ + kPage * (1 + rank));
}

// Pages from the system, where merely touching them would end the process if there are none (SIGBUS).
void RankLink::grow(int64_t offset, int64_t* have, int64_t bytes, int64_t most) {
  if (bytes <= *have) return;
  if (bytes > most) throw NoSharedMemory();
  const int64_t wanted = std::min(most, rounded(std::max(bytes, *have + kLeastGrowth), kPage));
  if (wanted - *have > free_bytes()) throw NoSharedMemory();
  while (fallocate(fd_, 0, offset, wanted) != 0) {
    if (errno == EINTR) continue;
    throw NoSharedMemory();
  }
  *have = wanted;
}

char* RankLink::memory(int region, int64_t bytes) {
  if (region < 0 || region >= kRegions) throw std::bad_alloc();
  const int64_t at = regions_at_ + region * kRegionSpace;
  if (!regions_[region]) {
    regions_[region] = map(at, kRegionSpace);
#ifdef MADV_HUGEPAGE
    madvise(regions_[region], static_cast<size_t>(kRegionSpace), MADV_HUGEPAGE);  // advice: may be refused
#endif
  }
  grow(at, &regions_have_[region], bytes, kRegionSpace);
  return regions_[region];
}

char* RankLink::cache_memory(int64_t bytes) {
  const int64_t at = cache_used_, whole = cache_bytes(rank_);
  if (bytes < 0 || bytes > whole - at) throw std::bad_alloc();
  cache_used_ = std::min(whole, at + rounded(bytes, kCacheAlign));
  return cache_region(rank_) + at;
}

void RankLink::throw_problem() const { throw std::runtime_error(problem()); }

// Waits until ready(), which reads what other ranks store before they `ring`. Loads and stores of both sides
// are in one order (seq_cst): either this rank sees what it waits for, or the other one sees that it sleeps.
template <class Ready>
void RankLink::wait(const Ready& ready) {
  const auto left = [&] { return ready() || header_->abandoned.load() == 2; };
  if (!spin_until(left, spin_)) {
    Line& own = line(rank_);
    own.sleeps.store(1);
    while (true) {
      const uint32_t seen = own.bell.load();
      if (left()) break;
      futex_wait(&own.bell, seen);
    }
    own.sleeps.store(0);
  }
  if (header_->abandoned.load() == 2) throw_problem();
}

// Wakes the others that sleep.
void RankLink::ring() {
  for (int other = 0; other < ranks(); ++other) {
    Line& them = line(other);
    if (other == rank_ || them.sleeps.load() == 0) continue;
    them.bell.fetch_add(1);
    futex_wake(&them.bell);
  }
}

// Waits until all of a group are ready for this step, or have failed it.
template <class Ready>
void RankLink::wait_for(RankGroup group, const Ready& ready) {
  const int end = group.first + group.count;
  if (group.first < 0 || end > ranks()) throw std::invalid_argument("a group of ranks is out of range");
  const auto failed = [this](int other) { return step_ > 0 && line(other).failed.load() == step_; };
  wait([&] {
    for (int other = group.first; other < end; ++other) {
      if (other != rank_ && !ready(line(other)) && !failed(other)) return false;
    }
    return true;
  });
  for (int other = group.first; other < end; ++other) {
    if (!failed(other)) continue;
    failed_elsewhere_ = line(other).note.get();
    throw std::runtime_error(failed_elsewhere_);
  }
}

void RankLink::meet(RankGroup group) {
  const uint64_t wanted = step_ * kMeetingsOfStep + ++met_;
  line(rank_).met.store(wanted);
  ring();
  wait_for(group, [wanted](const Line& other) { return other.met.load() >= wanted; });
}

void RankLink::await_room(RankGroup receivers) {
  const uint64_t last = line(rank_).sent.load();
  wait_for(receivers,
           [last](const Line& other) { return other.taken.load() >= last || other.done.load() >= last; });
}

void RankLink::sent() {
  line(rank_).sent.store(step_);
  ring();
}

void RankLink::await_message(RankGroup senders) {
  wait_for(senders, [this](const Line& other) { return other.sent.load() >= step_; });
}

void RankLink::taken() {
  line(rank_).taken.store(step_);
  ring();
}

void RankLink::wait_done() {
  wait([&] {
    for (int other = 1; other < ranks(); ++other) {
      if (line(other).done.load() != posted_) return false;
    }
    return true;
  });
}

char* RankLink::inbox(int64_t bytes) {
  const uint64_t next = posted_ + 1, slots = static_cast<uint64_t>(in_flight_);
  wait([&] {  // the step that had the place before
    for (int other = 1; other < ranks(); ++other) {
      if (line(other).done.load() + slots < next) return false;
    }
    return true;
  });
  const int64_t at = inbox_at_ + static_cast<int64_t>(next % slots) * kInboxSpace;
  grow(at, &inbox_have_[next % slots], bytes, kInboxSpace);
  return base_ + at;
}

void RankLink::post(int64_t bytes) {
  ++posted_;
  if (in_flight_ == 1) begin_step();
  header_->inbox_bytes[posted_ % static_cast<uint64_t>(in_flight_)].store(bytes);
  header_->posted.store(posted_);
  ring();
}

void RankLink::begin_step() {
  if (step_ == posted_) throw std::invalid_argument("no step was posted");
  met_ = 0;
  failed_elsewhere_.clear();
  line(rank_).met.store(++step_ * kMeetingsOfStep);
}

void RankLink::stop() {
  header_->stopped.store(1);
  ring();
}

bool RankLink::wait_step(std::span<const char>* inputs) {
  wait([&] { return header_->posted.load() != step_ || header_->stopped.load() == 1; });
  posted_ = header_->posted.load();
  if (posted_ == step_) return false;
  begin_step();
  const uint64_t slot = step_ % static_cast<uint64_t>(in_flight_);
  *inputs = {base_ + inbox_at_ + static_cast<int64_t>(slot) * kInboxSpace,
             static_cast<size_t>(header_->inbox_bytes[slot].load())};
  return true;
}

void RankLink::finish_step() {
  line(rank_).done.store(step_);
  ring();
}

void RankLink::fail_step(const std::string& problem) {
  Line& own = line(rank_);
  const std::string here = "rank " + std::to_string(rank_) + ": " + problem;
  own.note.put(failed_elsewhere_.empty() ? here : failed_elsewhere_);
  own.failed.store(step_);
  own.met.store(step_ * kMeetingsOfStep + (kMeetingsOfStep - 1));
  ring();
  if (in_flight_ > 1) abandon(here);
}

void RankLink::abandon(const std::string& problem) {
  uint32_t none = 0;
  if (!header_->abandoned.compare_exchange_strong(none, 1)) return;
  header_->note.put(problem.empty() ? "the ranks were abandoned" : problem);
  header_->abandoned.store(2);
  for (int rank = 0; rank < ranks(); ++rank) {  // this one too: another thread of it may wait
    line(rank).bell.fetch_add(1);
    futex_wake(&line(rank).bell);
  }
}

void RankLink::release() {
  while (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, inbox_at_, bytes_ - inbox_at_) != 0 &&
         errno == EINTR) {
  }
}

std::string RankLink::problem() const {
  return header_->abandoned.load() == 2 ? header_->note.get() : std::string();
}

bool RankLink::sleeps() const { return line(rank_).sleeps.load() != 0; }

std::vector<uint64_t> RankLink::progress() const {
  std::vector<uint64_t> found;
  for (int rank = 0; rank < ranks(); ++rank) {
    const Line& one = line(rank);
    found.push_back(one.met.load() + one.sent.load() + one.taken.load() + one.done.load());
  }
  return found;
}

}  // namespace ew
