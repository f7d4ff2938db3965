#include "exchange.h"

#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace ew {
namespace {

void copy_rows(std::span<const RowCopy> copies) {
  for (const RowCopy& c : copies) {
    for (int64_t row = 0; row < c.rows; ++row)
      std::memcpy(c.to + row * c.to_stride, c.from + row * c.from_stride, static_cast<size_t>(c.size));
  }
}

}  // namespace

void Exchange::send(RankGroup receivers, std::span<const RowCopy> copies) {
  await_room(receivers);
  copy_rows(copies);
  sent();
}

void Exchange::receive(RankGroup senders, std::span<const RowCopy> copies, std::span<const Gathered>) {
  await_message(senders);
  copy_rows(copies);
  taken();
}

void ThreadRanks::abandon(const std::string& problem) {
  {
    const std::lock_guard lock(mutex_);
    problem_ = problem;
  }
  changed_.notify_all();
}

namespace {

template <class T>
T& at(std::vector<T>& list, int index) {
  if (index < 0 || static_cast<size_t>(index) >= list.size())
    throw std::invalid_argument("rank " + std::to_string(index) + " is out of range");
  return list[static_cast<size_t>(index)];
}

}  // namespace

ThreadExchange::ThreadExchange(std::shared_ptr<ThreadRanks> ranks, int rank)
    : ranks_(std::move(ranks)), own_(at(ranks_->counts_, rank)) {}

char* ThreadExchange::memory(int region, int64_t bytes) {
  if (region < 0 || region >= kRegions || bytes > kRegionSpace) throw std::bad_alloc();
  const std::lock_guard lock(ranks_->mutex_);
  ZeroedMemory& memory = ranks_->regions_[region];
  if (memory.bytes() == 0) memory = ZeroedMemory(kRegionSpace, Pages::normal);
  return static_cast<char*>(memory.data());
}

template <class Change, class Ready>
void ThreadExchange::wait(RankGroup group, const Change& change, const Ready& ready) {
  std::unique_lock lock(ranks_->mutex_);
  change();
  ranks_->changed_.notify_all();
  const auto all = [&] {
    for (int r = group.first; r < group.first + group.count; ++r) {
      if (!ready(at(ranks_->counts_, r))) return false;
    }
    return true;
  };
  ranks_->changed_.wait(lock, [&] { return !ranks_->problem_.empty() || all(); });
  if (!ranks_->problem_.empty() && !all()) throw std::runtime_error(ranks_->problem_);
}

void ThreadExchange::meet(RankGroup group) {
  wait(group, [this] { ++own_.met; }, [this](const auto& other) { return other.met >= own_.met; });
}

void ThreadExchange::await_room(RankGroup receivers) {
  wait(receivers, [] {}, [this](const auto& other) { return other.taken >= own_.sent; });
}

void ThreadExchange::sent() {
  wait({0, 0}, [this] { ++own_.sent; }, [](const auto&) { return true; });
}

void ThreadExchange::await_message(RankGroup senders) {
  wait(senders, [] {}, [this](const auto& other) { return other.sent > own_.taken; });
}

void ThreadExchange::taken() {
  wait({0, 0}, [this] { ++own_.taken; }, [](const auto&) { return true; });
}

namespace {

int64_t size_of(std::span<const Gathered> matrices, int member) {
  int64_t size = 0;
  for (const Gathered& m : matrices) size += m.parts[static_cast<size_t>(member)].size();
  return size;
}

// The rows of a member's parts, one behind the other, to or from its message.
std::vector<RowCopy> rows_of(std::span<const Gathered> matrices, int member, char* message, bool packs) {
  std::vector<RowCopy> copies;
  for (const Gathered& m : matrices) {
    const Gathered::Part& part = m.parts[static_cast<size_t>(member)];
    if (part.size() == 0) continue;
    char* const data = m.data + part.first_row * m.stride + part.first_byte;
    copies.push_back(packs ? RowCopy{data, message, part.rows, part.bytes, m.stride, part.bytes}
                           : RowCopy{message, data, part.rows, part.bytes, part.bytes, m.stride});
    message += part.size();
  }
  return copies;
}

}  // namespace

void MessageExchange::refuse() { throw std::logic_error("these ranks share no memory"); }

char* MessageExchange::memory(int region, int64_t bytes) {
  if (region < 0 || region >= kRegions || bytes > kRegionSpace) throw std::bad_alloc();
  ZeroedMemory& memory = regions_[region];
  if (memory.bytes() == 0) memory = ZeroedMemory(kRegionSpace, Pages::normal);
  return static_cast<char*>(memory.data());
}

void MessageExchange::swap(RankGroup group, std::vector<int> to, bool receives,
                           std::span<const Gathered> matrices) {
  Messages messages{std::move(to), own_, {}, {}};
  if (own_.empty()) messages.to.clear();
  std::vector<int> members;
  size_t size = 0;
  for (int member = 0; receives && member < group.count; ++member) {
    const int64_t bytes = size_of(matrices, member);
    if (group.first + member == rank_ || bytes == 0) continue;
    members.push_back(member);
    size += static_cast<size_t>(bytes);
  }
  theirs_.resize(size);
  char* at = theirs_.data();
  for (const int member : members) {
    const size_t bytes = static_cast<size_t>(size_of(matrices, member));
    messages.from.push_back(group.first + member);
    messages.theirs.emplace_back(at, bytes);
    at += bytes;
  }
  if (messages.to.empty() && messages.from.empty()) return;
  move_(messages);
  for (size_t i = 0; i < members.size(); ++i)
    copy_rows(rows_of(matrices, members[i], messages.theirs[i].data(), false));
}

void MessageExchange::gather(RankGroup group, int to, std::span<const Gathered> matrices) {
  const int member = rank_ - group.first;
  if (member < 0 || member >= group.count) throw std::invalid_argument("the rank isn't one of its group");
  std::vector<int> others;
  for (int other = 0; other < group.count; ++other) {
    if (other != member && (to < 0 || other == to)) others.push_back(group.first + other);
  }
  own_.resize(others.empty() ? 0 : static_cast<size_t>(size_of(matrices, member)));
  if (!own_.empty()) copy_rows(rows_of(matrices, member, own_.data(), true));
  swap(group, std::move(others), to < 0 || to == member, matrices);
}

void MessageExchange::send(RankGroup receivers, std::span<const RowCopy> copies) {
  int64_t size = 0;
  for (const RowCopy& c : copies) size += c.rows * c.size;
  own_.resize(static_cast<size_t>(size));
  char* at = own_.data();
  for (const RowCopy& c : copies) {
    const RowCopy packed = {c.from, at, c.rows, c.size, c.from_stride, c.size};
    copy_rows({&packed, 1});
    at += c.rows * c.size;
  }
  std::vector<int> to;
  for (int other = 0; other < receivers.count; ++other) to.push_back(receivers.first + other);
  swap(receivers, std::move(to), false, {});
}

void MessageExchange::receive(RankGroup senders, std::span<const RowCopy>, std::span<const Gathered> whole) {
  own_.clear();
  swap(senders, {}, true, whole);
}

}  // namespace ew
