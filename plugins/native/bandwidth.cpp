#include "bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "../cpu/kernels/kernels.h"
#include "memory.h"
#include "thread_pool.h"

namespace ew {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;  // bytes of a task
constexpr int kPasses = 7;
constexpr int64_t kPeakRounds = 500000;  // some milliseconds

uint64_t read_all(const uint64_t* data, int64_t count) {
  uint64_t lanes[32] = {};  // enough independent sums that the additions don't bound it
  for (int64_t i = 0; i + 32 <= count; i += 32) {
    for (int lane = 0; lane < 32; ++lane) lanes[lane] += data[i + lane];
  }
  uint64_t sum = 0;
  for (const uint64_t lane : lanes) sum += lane;
  return sum;
}

}  // namespace

double measure_bandwidth(int64_t bytes, int threads) {
  const int64_t chunks = std::max<int64_t>(1, bytes / kChunk);
  const ZeroedMemory memory(chunks * kChunk, Pages::huge);
  char* data = static_cast<char*>(memory.data());
  ThreadPool pool(threads);
  // Untouched pages all map to one page of zeros, which stays in the cache; so every page is written first.
  pool.parallel_for(chunks, [&](int64_t chunk, int) { std::fill_n(data + chunk * kChunk, kChunk, char{1}); });
  std::vector<uint64_t> sums(static_cast<size_t>(chunks));
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(chunks, [&](int64_t chunk, int) {
      sums[chunk] = read_all(reinterpret_cast<const uint64_t*>(data + chunk * kChunk), kChunk / 8);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(chunks * kChunk) / took.count() / 1e9);
  }
  volatile uint64_t keep = sums[0];  // so that the reads are not removed
  static_cast<void>(keep);
  return best;
}

double measure_peak(const std::string& dtype, int threads, const std::string& isa) {
  const KernelTable* table = kernels_for(isa.c_str());
  if (table == nullptr) throw std::invalid_argument("isa " + isa + " is not one that this processor runs");
  const auto loop = dtype == "i8"     ? table->peak_int8
                    : dtype == "bf16" ? table->peak_bf16
                    : dtype == "f32"  ? table->peak_f32
                                      : nullptr;
  if (loop == nullptr) throw std::invalid_argument("dtype " + dtype + " is not one of f32, bf16, i8");
  ThreadPool pool(threads);
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    std::vector<int64_t> done(static_cast<size_t>(pool.size()));
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(pool.size(), [&](int64_t task, int) { done[task] = loop(kPeakRounds); });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(done[0] * pool.size()) / took.count() / 1e9);
  }
  return best;
}

}  // namespace ew
