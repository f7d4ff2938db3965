// What a session of onnxruntime does with the library: registers it, makes a kernel of a node, runs it.
#pragma once

#include <stdexcept>
#include <string>

#include "fake_onnxruntime.h"

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base);

namespace ew::testing {

// A status that the library gave out; "" where all went well.
class Outcome {
 public:
  explicit Outcome(OrtStatus* status) : status_(status) {}
  ~Outcome() { delete status_; }
  Outcome(const Outcome&) = delete;
  Outcome& operator=(const Outcome&) = delete;

  bool good() const { return status_ == nullptr; }
  const OrtStatus* status() const { return status_; }
  std::string text() const { return status_ ? status_->text : ""; }
  // Whether it's what a caller did wrong, and says so.
  bool blames(const std::string& words) const {
    return status_ && status_->code == kOrtInvalidArgument && text().starts_with("enginewright: ") &&
           text().find(words) != std::string::npos;
  }

 private:
  OrtStatus* const status_;
};

inline OrtSessionOptions options_of(const std::string& isa, int threads) {
  return {{{"enginewright.isa", isa}, {"enginewright.threads", std::to_string(threads)}}};
}

// The operator of a session.
inline const OrtCustomOp& op_of(const std::string& isa, int threads) {
  OrtSessionOptions options = options_of(isa, threads);
  const Outcome outcome(RegisterCustomOps(&options, fake::base()));
  if (!outcome.good()) throw std::runtime_error(outcome.text());
  return *options.domains.at(0)->ops.at(0);
}

class Kernel {
 public:
  Kernel(const OrtCustomOp& op, const OrtKernelInfo& info)
      : op_(op), made_(op.CreateKernelV2(&op, fake::table(), &info, &kernel_)) {}
  ~Kernel() {
    if (kernel_) op_.KernelDestroy(kernel_);
  }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  const Outcome& made() const { return made_; }
  bool exists() const { return kernel_ != nullptr; }
  OrtStatus* run(OrtKernelContext& context) const { return op_.KernelComputeV2(kernel_, &context); }

 private:
  const OrtCustomOp& op_;
  void* kernel_ = nullptr;
  const Outcome made_;
};

}  // namespace ew::testing
