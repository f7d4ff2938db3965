// The tests of each kind of linear share this: how a linear is run, and checks of it. `Kernel` is a field of
// KernelTable.
#pragma once

#include <initializer_list>

#include "test_kernels.h"

namespace ew::testing {

// The arguments of a linear, whose tensors a derived class has.
template <class Args>
struct LinearRun {
  Args args;

  // Returns the y that fn(args) stores, with the gaps between its rows, which are -7 before.
  template <class F>
  std::vector<float> run(const F& fn) {
    std::vector<float> y = filled(args.m * args.y_stride, -7);
    args.y = y.data();
    fn(args);
    return y;
  }
  template <auto Kernel>
  std::vector<float> run(const KernelTable& kernels, ThreadPool& pool) {
    return run([&](const Args& a) { (kernels.*Kernel)(a, pool); });
  }
};

// Compares with reference(args, fused) bit for bit: the order of sums is fixed, and portable rounds products.
template <auto Kernel, class Linear, class Reference>
void check_bits(Linear& linear, const Reference& reference, const std::string& about) {
  const auto fused = linear.run([&](const auto& a) { reference(a, true); });
  const auto twice = linear.run([&](const auto& a) { reference(a, false); });
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto y = linear.template run<Kernel>(kernels, pool);
    CHECK(same_bits(y, std::string(kernels.isa) == "portable" ? twice : fused)) << what << about;
  });
}

// Some rows of a linear have the same bits when each is computed by itself. y has no gaps.
template <auto Kernel, class Linear>
void check_single_rows(Linear& batch, std::initializer_list<int64_t> rows, const std::string& about = "") {
  const int64_t n = batch.args.n;
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto all = batch.template run<Kernel>(kernels, pool);
    for (const int64_t row : rows) {
      std::vector<float> one = filled(n, 0);
      auto a = batch.args;
      a.m = 1, a.y = one.data();
      if constexpr (requires { a.values; }) {
        a.values += row * a.values_stride, a.scales += row * a.scales_stride, a.sums += row * a.sums_stride;
      } else {
        a.x += row * a.x_stride;
      }
      (kernels.*Kernel)(a, pool);
      CHECK(std::memcmp(one.data(), all.data() + row * n, one.size() * sizeof(float)) == 0)
          << what << about << " row " << row;
    }
  });
}

// A linear without rows stores nothing. One over nothing (2 rows, 33 columns, K = 0, no gaps) gives its bias.
template <auto Kernel, class Linear>
void check_empty(Linear none, Linear bias_only) {
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    (kernels.*Kernel)(none.args, pool);
    const auto y = bias_only.template run<Kernel>(kernels, pool);
    CHECK(y[0] == bias_only.bias[0] && y[65] == bias_only.bias[32]) << what;
  });
}

// Row 2 of x has a NaN, column 38 of the weight an infinity (of 40 columns, no gaps): both pass on, and stay
// in their row and column.
template <auto Kernel, class Linear>
void check_special_values(Linear& linear) {
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto y = linear.template run<Kernel>(kernels, pool);
    for (int64_t i = 0; i < linear.args.m * 40; ++i) {
      const float v = y[static_cast<size_t>(i)];
      CHECK(std::isnan(v) == (i / 40 == 2) && std::isinf(v) == (i / 40 != 2 && i % 40 == 38))
          << what << " " << i;
    }
  });
}

// The scale of a group of row 6 is NaN: so is the row, of 40 columns without gaps, and no other.
template <auto Kernel, class Linear>
void check_nan_scale(Linear& linear) {
  linear.scales[static_cast<size_t>(6 * linear.scales_stride)] = kNaN;
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto y = linear.template run<Kernel>(kernels, pool);
    for (int64_t i = 0; i < linear.args.m * 40; ++i) {
      CHECK(std::isnan(y[static_cast<size_t>(i)]) == (i / 40 == 6)) << what << " " << i;
    }
  });
}

}  // namespace ew::testing
