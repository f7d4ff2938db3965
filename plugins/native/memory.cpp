#include "memory.h"

#include <sys/mman.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace ew {

ZeroedMemory::ZeroedMemory(int64_t bytes, Pages pages) {
  if (bytes <= 0) return;
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (pages == Pages::huge)
    madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // advice: may be refused
#endif
  data_ = data;
  bytes_ = bytes;
}

void ZeroedMemory::limit([[maybe_unused]] int64_t bytes) const {
#if defined(__SANITIZE_ADDRESS__)
  char* const data = static_cast<char*>(data_);
  ASAN_UNPOISON_MEMORY_REGION(data, static_cast<size_t>(bytes));
  ASAN_POISON_MEMORY_REGION(data + bytes, static_cast<size_t>(bytes_ - bytes));
#endif
}

ZeroedMemory::~ZeroedMemory() {
  if (data_) limit(bytes_);  // or the next to get these addresses would suffer for it
  if (data_) munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace ew
