#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../cpu/kernels/kernels.h"
#include "executor.h"
#include "memory.h"
#include "thread_pool.h"

namespace ew {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;  // bytes of a task
constexpr int64_t kPiece = int64_t{1} << 18;  // of a task that reads weights
constexpr int kPasses = 7;
constexpr int64_t kPeakRounds = 500000;  // some milliseconds

}  // namespace

double measure_bandwidth(int64_t bytes, int threads) {
  const int64_t chunks = std::max<int64_t>(1, bytes / kChunk);
  const ZeroedMemory memory(chunks * kChunk, Pages::huge);
  char* data = static_cast<char*>(memory.data());
  ThreadPool pool(threads);
  // Untouched pages all map to one page of zeros, which stays in the cache; so every page is written first.
  pool.parallel_for(chunks, [&](int64_t chunk, int) { std::fill_n(data + chunk * kChunk, kChunk, char{1}); });
  std::vector<uint64_t> sums(static_cast<size_t>(chunks));
  const auto read = kernels_for(available_isas().front().c_str())->read;
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(chunks, [&](int64_t chunk, int) { sums[chunk] = read(data + chunk * kChunk, kChunk); });
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

void read_weights(Executor& executor) {
  const Program& program = executor.program();
  std::vector<std::pair<const char*, int64_t>> pieces;
  for (const Step& step : program.steps()) {
    if (!step.op_name.ends_with("linear")) continue;
    for (const Operand& operand : step.inputs) {
      if (operand.kind != OperandKind::weight) continue;
      const Weight& weight = program.weights()[static_cast<size_t>(operand.index)];
      const char* data = static_cast<const char*>(weight.data);
      for (int64_t at = 0, all = weight.bytes(); at < all; at += kPiece)
        pieces.emplace_back(data + at, std::min(kPiece, all - at));
    }
  }
  const auto read = executor.resources().kernels().read;
  std::atomic<uint64_t> sum = 0;  // so that the reads are not removed
  executor.resources().pool().parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t i, int) {
    const auto [data, bytes] = pieces[static_cast<size_t>(i)];
    sum.fetch_add(read(data, bytes), std::memory_order_relaxed);
  });
}

}  // namespace ew
