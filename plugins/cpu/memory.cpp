#include "memory.h"

#include <sys/mman.h>

#include <new>

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

ZeroedMemory::~ZeroedMemory() {
  if (data_) munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace ew
