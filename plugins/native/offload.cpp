#include "offload.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ew {
namespace {

constexpr int64_t kMostLost = 32;

[[noreturn]] void fail(const std::string& folder, const char* what) {
  throw OffloadError(folder + ": " + what + ": " + std::strerror(errno));
}

uint64_t rotated(uint64_t x, int by) { return x << by | x >> (64 - by); }

struct SipState {
  uint64_t a, b, c, d;
  void round() {
    a += b, c += d;
    b = rotated(b, 13) ^ a, d = rotated(d, 16) ^ c;
    a = rotated(a, 32);
    c += b, a += d;
    b = rotated(b, 17) ^ c, d = rotated(d, 21) ^ a;
    c = rotated(c, 32);
  }
  void take(uint64_t word) {
    d ^= word;
    round(), round();
    a ^= word;
  }
};

}  // namespace

uint64_t siphash(const uint64_t key[2], const void* data, size_t bytes) {
  SipState s = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du, key[0] ^ 0x6c7967656e657261u,
                key[1] ^ 0x7465646279746573u};
  const char* at = static_cast<const char*>(data);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, at + i, 8);
    s.take(word);
  }
  uint64_t last = 0;
  std::memcpy(&last, at + bytes / 8 * 8, bytes % 8);
  s.take(last | static_cast<uint64_t>(bytes) << 56);
  s.c ^= 0xff;
  for (int i = 0; i < 4; ++i) s.round();
  return s.a ^ s.b ^ s.c ^ s.d;
}

OffloadFile::OffloadFile(const std::string& folder) : folder_(folder) {
  descriptor_ = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor_ < 0) {  // a file system that lacks files without a name: one whose name goes at once
    std::string path = folder + "/offload-XXXXXX";
    descriptor_ = mkostemp(path.data(), O_CLOEXEC);
    if (descriptor_ < 0) fail(folder, "no file can be made there");
    unlink(path.c_str());
  }
  if (getrandom(key_, sizeof key_, 0) != static_cast<ssize_t>(sizeof key_)) fail(folder, "no random key");
}

OffloadFile::~OffloadFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

void OffloadFile::write(int64_t offset, const void* data, int64_t bytes) {
  if (counts.lost > kMostLost + counts.read / kMostLost)  // or what it loses would be computed for ever
    throw OffloadError(folder_ + ": " + std::to_string(counts.lost) +
                       " blocks came back damaged; it gets no more");
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = pwrite(descriptor_, from, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done == 0) errno = ENOSPC;
    if (done <= 0) fail(folder_, "keys and values can't be written there");
    from += done, offset += done, bytes -= done;
  }
}

bool OffloadFile::read(int64_t offset, void* data, int64_t bytes) const noexcept {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t done = pread(descriptor_, to, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    to += done, offset += done, bytes -= done;
  }
  return true;
}

namespace {

// The cache with keys without their summaries, which have memory of their own.
KvCache without_summaries(KvCache cache) {
  cache.summaries = false;
  return cache;
}

}  // namespace

OffloadedLayer::OffloadedLayer(OffloadFile& file, const KvCache& cache, int group, int64_t blocks,
                               int64_t slots, int64_t offset)
    : file_(file),
      cache_(without_summaries(cache)),
      group_(group),
      key_bytes_(cache_.pieces(1) * cache_.key_bytes()),
      value_bytes_(cache_.pieces(1) * cache_.value_bytes()),
      summary_bytes_(cache_.pieces(1) * cache_.summary_bytes()),
      offset_(offset),
      key_memory_(slots * key_bytes_, Pages::normal),
      value_memory_(slots * value_bytes_, Pages::normal),
      summaries_(blocks * summary_bytes_, Pages::normal),
      place_(static_cast<size_t>(blocks), 0),
      block_in_(static_cast<size_t>(slots), -1),
      used_(static_cast<size_t>(slots), 0),
      changed_(static_cast<size_t>(slots), 0),
      stored_(static_cast<size_t>(blocks), 0),
      hashes_(static_cast<size_t>(blocks), 0),
      seen_(static_cast<size_t>(blocks), 0) {
  cache_.k = key_memory_.data();
  cache_.v = value_memory_.data();
  cache_.apart = static_cast<char*>(summaries_.data());
  cache_.places = place_.data();
}

int64_t OffloadedLayer::memory_bytes() const {
  return key_memory_.bytes() + value_memory_.bytes() + summaries_.bytes();
}

int64_t OffloadedLayer::file_bytes(const KvCache& cache, int64_t blocks) {
  const KvCache stored = without_summaries(cache);
  return stored.pieces(blocks) * (stored.key_bytes() + stored.value_bytes());
}

uint64_t OffloadedLayer::hash(int64_t slot) {
  return file_.hash(keys(slot), key_bytes_) ^ rotated(file_.hash(values(slot), value_bytes_), 1);
}

void OffloadedLayer::evict(int64_t slot) {
  const int64_t block = block_in_[static_cast<size_t>(slot)];
  if (block >= 0 && changed_[static_cast<size_t>(slot)]) {
    const int64_t at = offset_ + block * (key_bytes_ + value_bytes_);
    const size_t index = static_cast<size_t>(block);
    stored_[index] = 0;
    file_.write(at, keys(slot), key_bytes_);
    file_.write(at + key_bytes_, values(slot), value_bytes_);
    hashes_[index] = hash(slot);
    stored_[index] = 1;
    ++file_.counts.written;
  }
  block_in_[static_cast<size_t>(slot)] = -1;
}

void OffloadedLayer::read(int64_t block, int64_t slot) {
  const size_t index = static_cast<size_t>(block);
  if (stored_[index]) {  // else nothing was ever written to it, and nobody reads what is there
    const int64_t at = offset_ + block * (key_bytes_ + value_bytes_);
    const bool came =
        file_.read(at, keys(slot), key_bytes_) && file_.read(at + key_bytes_, values(slot), value_bytes_);
    if (!came || hashes_[index] != hash(slot)) {
      ++file_.counts.lost;
      stored_[index] = 0;
      throw OffloadError(came ? "keys and values came back from the file as others than were written"
                              : "keys and values can't be read from the file",
                         block, group_);
    }
    ++file_.counts.read;
  }
  block_in_[static_cast<size_t>(slot)] = block;
  place_[index] = static_cast<int32_t>(slot);
  changed_[static_cast<size_t>(slot)] = 0;
}

void OffloadedLayer::fetch(std::span<const int32_t> blocks, bool written) {
  ++clock_;
  missing_.clear();
  for (const int32_t block : blocks) {
    if (in_memory(block)) {
      used_[static_cast<size_t>(place_[static_cast<size_t>(block)])] = clock_;
    } else {
      missing_.push_back(block);
    }
  }
  std::sort(missing_.begin(), missing_.end());  // in the order of the file
  missing_.erase(std::unique(missing_.begin(), missing_.end()), missing_.end());
  file_.counts.found += static_cast<int64_t>(blocks.size() - missing_.size());
  if (!missing_.empty()) {
    std::vector<int32_t> order;  // of slots that nobody asked for now, the longest unused first
    for (size_t slot = 0; slot < used_.size(); ++slot)
      if (used_[slot] != clock_) order.push_back(static_cast<int32_t>(slot));
    if (order.size() < missing_.size()) {
      throw std::invalid_argument("a layer has memory for " + std::to_string(used_.size()) +
                                  " blocks, fewer than are needed at a time");
    }
    const auto middle = order.begin() + static_cast<int64_t>(missing_.size());
    std::partial_sort(order.begin(), middle, order.end(), [this](int32_t a, int32_t b) {
      return std::pair(used_[static_cast<size_t>(a)], a) < std::pair(used_[static_cast<size_t>(b)], b);
    });
    for (size_t i = 0; i < missing_.size(); ++i) {
      evict(order[i]);
      read(missing_[i], order[i]);
      used_[static_cast<size_t>(order[i])] = clock_;
    }
  }
  if (!written) return;
  for (const int32_t block : blocks) changed_[static_cast<size_t>(place_[static_cast<size_t>(block)])] = 1;
}

void OffloadedLayer::fetch_written(const int32_t* token_slots, int64_t tokens) {
  wanted_.clear();
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t block = token_slots[t] / static_cast<int32_t>(kBlock);
    // Its first slot is written again: what it had is of no use to anybody.
    if (token_slots[t] % kBlock == 0 && !in_memory(block)) stored_[static_cast<size_t>(block)] = 0;
    if (wanted_.empty() || wanted_.back() != block) wanted_.push_back(block);
  }
  std::sort(wanted_.begin(), wanted_.end());
  wanted_.erase(std::unique(wanted_.begin(), wanted_.end()), wanted_.end());
  fetch(wanted_, true);
}

void OffloadedLayer::copy(int32_t from, int32_t to) {
  if (from == to) return;  // nobody held what is copied, and this block was the one to be taken for the copy
  const int32_t both[] = {from, to};
  if (!in_memory(to)) stored_[static_cast<size_t>(to)] = 0;
  fetch(both, false);
  const int64_t source = place_[static_cast<size_t>(from)], target = place_[static_cast<size_t>(to)];
  std::memcpy(keys(target), keys(source), static_cast<size_t>(key_bytes_));
  std::memcpy(values(target), values(source), static_cast<size_t>(value_bytes_));
  std::memcpy(cache_.apart + to * summary_bytes_, cache_.apart + from * summary_bytes_,
              static_cast<size_t>(summary_bytes_));
  changed_[static_cast<size_t>(target)] = 1;
}

void OffloadedLayer::attend(const PagedAttentionArgs& args, const KernelTable& kernels, Workers& pool) {
  const int64_t tokens = args.spans.total(), heads = cache_.kv_heads;
  const int32_t longest = *std::max_element(args.kv_len, args.kv_len + args.spans.requests);
  const int64_t words = ((longest + kBlock - 1) / kBlock + 63) / 64;
  chosen_.resize(static_cast<size_t>(tokens * heads * words));
  PagedAttentionArgs all = args;
  all.chosen = chosen_.data();
  all.chosen_words = words;
  kernels.choose_blocks(all, pool);

  // What row `token` of request `b` chose, added to wanted_.
  const auto want = [&](int64_t token, int64_t b) {
    const int32_t* row = args.block_table + b * args.block_table_stride;
    for (int64_t word = 0; word < words; ++word) {
      uint64_t bits = 0;
      for (int64_t h = 0; h < heads; ++h)
        bits |= chosen_[static_cast<size_t>(cache_.at(token, h) * words + word)];
      for (; bits != 0; bits &= bits - 1) {
        const int32_t block = row[word * 64 + __builtin_ctzll(bits)];
        uint64_t& seen = seen_[static_cast<size_t>(block)];
        if (seen != seen_clock_) wanted_.push_back(block);
        seen = seen_clock_;
      }
    }
  };
  int64_t request = 0;
  for (int64_t begin = 0; begin < tokens;) {
    while (args.spans.end(request) <= begin) ++request;
    wanted_.clear();
    ++seen_clock_;
    int64_t end = begin, last = request;
    for (; end < tokens; ++end) {
      int64_t b = last;
      while (args.spans.end(b) <= end) ++b;
      const size_t before = wanted_.size();
      want(end, b);
      if (static_cast<int64_t>(wanted_.size()) > slots() && end > begin) {
        wanted_.resize(before);
        break;
      }
      last = b;
    }
    fetch(wanted_, false);
    PagedAttentionArgs some = all;
    starts_.assign(1, 0);
    lengths_.clear();
    for (int64_t b = request; b <= last; ++b) {
      const int64_t past = std::min(args.spans.end(b), end);
      starts_.push_back(static_cast<int32_t>(past - begin));
      lengths_.push_back(static_cast<int32_t>(args.kv_len[b] - (args.spans.end(b) - past)));
    }
    some.spans = {last - request + 1, starts_.data()};
    some.kv_len = lengths_.data();
    some.block_table += request * args.block_table_stride;
    some.q.data += begin * args.q.stride0;
    some.out.data += begin * args.out.stride0;
    some.chosen += begin * heads * words;
    kernels.paged_attention(some, pool);
    begin = end;
  }
}

}  // namespace ew
