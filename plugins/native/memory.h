// Memory straight from the system: page aligned, zero, and costing nothing until it is touched.
#pragma once

#include <cstdint>
#include <utility>

namespace ew {

enum class Pages {
  normal,
  huge
};  // huge: the system is asked for huge pages, which a large hot region profits from

class ZeroedMemory {
 public:
  ZeroedMemory() = default;
  ZeroedMemory(int64_t bytes, Pages pages);  // throws std::bad_alloc
  ~ZeroedMemory();
  ZeroedMemory(ZeroedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  ZeroedMemory& operator=(ZeroedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

  // Under AddressSanitizer what comes after the first `bytes` bytes can't be touched from now on; else
  // nothing happens.
  void limit(int64_t bytes) const;

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace ew
