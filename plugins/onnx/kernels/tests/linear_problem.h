// A product with a weight of any format, as a file gives it to the operator `Linear`, and its result by the
// scalar reference.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../../../cpu/kernels/kernels.h"
#include "fake_onnxruntime.h"

namespace ew::testing {

struct Form {
  std::string storage;
  int64_t weight_group = 0, activation_group = 0;
  bool offsets = false, sparse = false;
};

struct Shape {
  std::vector<int64_t> rows;  // x is [rows.., k]
  int64_t n, k;
};

struct Ends {
  std::string activation = "";
  bool bias = false;
};

std::string describe(const Form& form, const Shape& shape, const Ends& ends = {});

// Of random numbers, the same for the same arguments.
class Problem {
 public:
  Problem(const Form& form, const Shape& shape, const Ends& ends = {});
  Problem(const Problem&) = delete;  // what it gives out points to its values
  Problem& operator=(const Problem&) = delete;

  // A node with all but x and bias from the file, and a call of it. Inputs at the end that are left out
  // aren't counted.
  OrtKernelInfo info() const;
  OrtKernelContext context() const { return {inputs()}; }
  std::vector<int64_t> y_shape() const;

  // Bit for bit the result of an instruction set, by the scalar reference. Where that doesn't hold, which
  // are activations with an exp and what VDPBF16 adds up, by the kernels on one thread.
  const std::vector<float>& expected(const std::string& isa);

  OrtValue x, weight, scales, offsets, bias;  // those without a shape are left out

 private:
  std::vector<const OrtValue*> inputs() const;
  void make_weight();
  template <class T>
  std::vector<T> kept(std::vector<T> rows, T zero) const;
  template <class T>
  void store(const std::vector<T>& rows, std::vector<char> dense, int64_t bits, int element, T zero);
  template <class Call>
  std::vector<float> compute(const std::vector<char>& stored, bool sparse, const Call& call) const;

  const Form form_;
  const int64_t n_, k_;
  const Ends ends_;
  int64_t m_ = 1;
  std::vector<int32_t> places_;  // of a sparse weight, [N, K/4]: the two that are kept, as sparse32 has them
  std::vector<char> dense_;      // the weight in dense panels
  std::map<std::string, std::vector<float>> expected_;  // that was asked for
};

}  // namespace ew::testing
