// Runs a program: holds its arena and KV caches, checks the inputs of each step, and calls the kernels.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "memory.h"
#include "resolver.h"
#include "sampler.h"
#include "thread_pool.h"

namespace ew {

// The inputs of one step, borrowed from the caller. Shapes and meaning as contracts.StepInput has them.
struct StepArrays {
  struct Group {
    std::span<const int32_t> slots;  // [T]
    std::span<const int32_t> table;  // [B, width]
    int64_t width = 0;
  };
  std::span<const int32_t> ids, positions, q_start, kv_len, rows;
  std::vector<Group> groups;  // as Program::groups
};

// A copy of what a step wrote, for bisecting.
struct DumpedArray {
  std::vector<int64_t> shape;
  Dtype dtype = Dtype::f32;
  std::vector<char> bytes;
};

struct RunOptions {
  int dump_step = -1;  // index of a step whose outputs are copied
  std::vector<DumpedArray>* dumped = nullptr;
  std::vector<double>* seconds = nullptr;  // [steps], set if not null
};

class Executor {
 public:
  // blocks: P of each cache group. isa: one of available_isas(). Throws std::invalid_argument,
  // std::bad_alloc.
  Executor(const Program& program, std::vector<int64_t> blocks, int threads, const std::string& isa);

  // Runs all steps; the logits stay readable until the next call. Throws std::invalid_argument that names the
  // input, or the step and operand, that is wrong; nothing has run then, except where a step computes indices
  // that a later one follows. Not thread-safe: hold `mutex()`.
  void run(const StepArrays& inputs, const RunOptions& options = {});

  void sample(const RowSampling* parameters, const SampleResult& result);  // of the last run's logits

  const float* logits() const { return logits_; }  // row r at r * logits_stride()
  int64_t logits_stride() const { return logits_stride_; }
  int64_t rows() const { return sizes_.rows; }  // R of the last run
  const Program& program() const { return program_; }
  const char* isa() const { return kernels_->isa; }
  int threads() const { return pool_.size(); }
  int64_t cache_bytes() const { return cache_bytes_; }  // address space; blocks never written cost no memory
  int64_t arena_bytes() const { return arena_.bytes(); }
  const KvCache& cache(int index) const { return memory_.caches[index]; }  // as Program::caches
  int64_t blocks(int group) const { return blocks_[group]; }
  std::mutex& mutex() { return mutex_; }

 private:
  struct Shape {  // what was resolved for some sizes
    Sizes sizes;
    std::vector<ResolvedStep> steps;
    const float* logits = nullptr;
    int64_t logits_stride = 0;
    uint64_t used = 0;
  };

  void check(const StepArrays& inputs) const;
  void check_group(const StepArrays& inputs, size_t group) const;
  void copy_inputs(const StepArrays& inputs);
  const std::vector<ResolvedStep>& prepare();
  void execute(const ResolvedStep& step);  // executor_steps.cpp
  void dump(size_t step, std::vector<DumpedArray>& dumped) const;

  const Program& program_;
  const KernelTable* kernels_;
  std::vector<int64_t> blocks_;
  std::vector<ZeroedMemory> cache_memory_;
  int64_t cache_bytes_ = 0;
  std::vector<std::vector<int32_t>> inputs_;  // copies, so that their addresses last
  ZeroedMemory arena_;
  Workspace workspace_;
  std::vector<int32_t> places_;  // of the rows that combine_experts takes
  Memory memory_;
  Sizes sizes_;
  std::vector<Shape> shapes_;
  uint64_t clock_ = 0;
  const float* logits_ = nullptr;
  int64_t logits_stride_ = 0;
  ThreadPool pool_;
  Sampler sampler_;
  std::mutex mutex_;
};

}  // namespace ew
