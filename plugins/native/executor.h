// Runs a program: checks the inputs of each step, and calls the kernels.
#pragma once

#include <atomic>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "exchange.h"
#include "resolver.h"
#include "resources.h"

namespace ew {

// One array of a step, borrowed from the caller: words of 32 bits, which are floats where the port says so.
struct StepArray {
  std::span<const int32_t> values;
  int64_t columns = 1;  // of an array of two axes
};

// The inputs of one step, as Program::ports.
struct StepArrays {
  std::vector<StepArray> ports;
};

// Called before a step runs, and after; see Executor::places. What it throws ends the run.
using Watch = std::function<void(size_t step, bool before)>;

// Room for the rows of a tap, [R, width], or [B, width] for one of requests.
struct TakenRows {
  size_t tap = 0;  // in Program::taps
  float* to = nullptr;
};

struct RunOptions {
  std::vector<double>* seconds = nullptr;  // [steps], set if not null
  Watch watch = {};
  std::vector<TakenRows> taken = {};  // in any order
};

class Executor {
 public:
  // On resources of its own, for which see Resources; its arena grows with the largest step. Throws
  // std::invalid_argument, std::bad_alloc. A program of several ranks needs an exchange with the others,
  // which the caller keeps alive.
  Executor(const Program& program, std::vector<int64_t> blocks, int threads, const std::string& isa,
           const Tuning& tuning = {}, Exchange* exchange = nullptr, const OffloadPlan& offload = {});

  // Runs all steps; the logits stay readable until it runs again. Throws std::invalid_argument that names the
  // input, or the step and operand, that is wrong; nothing has run then, except where a step computes indices
  // that a later one follows. Hold the resources' mutex. With an exchange, every rank runs the same inputs;
  // throws std::runtime_error if one is lost.
  void run(const StepArrays& inputs, const RunOptions& options = {});

  // `run` in pieces, for who runs some of the steps himself: its checks, then steps by their number, in
  // order. Throw as `run` does; a step with nothing to do is left out.
  void begin(const StepArrays& inputs);
  void run_step(int64_t step);

  void sample(const RowSampling* parameters, const SampleResult& result);  // of the last run's logits

  // Ends several runs of a step (decode_runs.h) after the current one; if there are none, the next ones after
  // their first. From any thread.
  void interrupt() { interrupted_.store(true, std::memory_order_relaxed); }
  bool take_interrupt() { return interrupted_.exchange(false, std::memory_order_relaxed); }

  // Where the inputs, or the outputs, of a step lie, while `RunOptions::watch` is called; what is written
  // there is what the program continues with. Of operands that aren't buffers, data is null.
  std::vector<Place> places(size_t step, bool inputs) const;

  const float* logits() const { return logits_; }  // row r at r * logits_stride()
  int64_t logits_stride() const { return logits_stride_; }
  int64_t rows() const { return sizes_.rows; }  // R of the last run
  const RingCounts& ring() const { return ring_; }
  const ExpertRows& expert_rows() const { return expert_rows_; }
  const Program& program() const { return program_; }
  Resources& resources() { return resources_; }
  const Resources& resources() const { return resources_; }

 private:
  struct Shape {  // what was resolved for some sizes
    Sizes sizes;
    std::vector<ResolvedStep> steps;
    const float* logits = nullptr;
    int64_t logits_stride = 0;
    uint64_t used = 0;
  };

  Sizes check(const StepArrays& inputs) const;
  void check_values(const StepArrays& inputs, size_t port, const Sizes& sizes) const;
  void check_table(const StepArrays& inputs, size_t port) const;
  void copy_inputs(const StepArrays& inputs);
  void take(const TakenRows& taken) const;
  void prepare();
  void execute(const ResolvedStep& step);

  // The weights that threads fetch while they wait: those of linears in the order of the steps, twice, since
  // behind a step's last product come the next step's first ones.
  class Streams {
   public:
    Streams(const Program& program, int threads);
    const Upcoming* behind(size_t step) const { return &behind_[step]; }

   private:
    std::vector<Stream> all_;
    std::vector<Upcoming> behind_;
  };

  const Program& program_;
  Exchange* const exchange_;
  const Streams streams_;  // the threads of resources_ read it
  Resources resources_;
  std::vector<std::vector<int32_t>> inputs_;  // copies, so that their addresses last
  std::vector<int32_t> inverse_;              // of the permutation that was checked last
  Memory memory_;
  Sizes sizes_;
  size_t starts_, lengths_, rows_;  // in Program::ports: where requests begin, their lengths, the rows
  std::vector<Shape> shapes_;
  const std::vector<ResolvedStep>* steps_ = nullptr;  // those of sizes_, once a run has begun
  uint64_t clock_ = 0;
  const float* logits_ = nullptr;
  int64_t logits_stride_ = 0;
  RingCounts ring_;
  ExpertRows expert_rows_;
  std::atomic<bool> interrupted_ = false;
};

}  // namespace ew
