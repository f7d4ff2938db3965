#include "test_kernels.h"

using namespace ew;
using namespace ew::testing;

namespace {

// A linear in buffers with gaps between rows, which must stay untouched.
struct Linear {
  int64_t m, n, k, gap;
  std::vector<float> x, weight, bias;
  LinearArgs args;

  Linear(int64_t rows, int64_t columns, int64_t depth, int64_t space, bool with_bias)
      : m(rows), n(columns), k(depth), gap(space), x(random_floats(m * (k + gap), 1)) {
    weight = to_panels(random_floats(n * k, 2), n, k);
    bias = random_floats(n, 3);
    args.m = m, args.n = n, args.k = k;
    args.x = x.data(), args.x_stride = k + gap;
    args.weight = weight.data(), args.bias = with_bias ? bias.data() : nullptr;
    args.y_stride = n + gap;
  }
  template <class F>
  std::vector<float> run(const F& fn) {
    std::vector<float> y = filled(m * (n + gap), -7);
    args.y = y.data();
    fn(args);
    return y;
  }
};

void check(Linear linear) {
  const auto fused = linear.run([](const LinearArgs& a) { reference::linear(a, true); });
  const auto twice = linear.run([](const LinearArgs& a) { reference::linear(a, false); });
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto y = linear.run([&](const LinearArgs& a) { kernels.linear(a, pool); });
    // Bit for bit: an output is one chain over k, whatever the blocking. portable rounds products too.
    CHECK(same_bits(y, std::string(kernels.isa) == "portable" ? twice : fused))
        << what << " m=" << linear.m << " n=" << linear.n << " k=" << linear.k;
  });
}

void equals_reference() {
  for (const int64_t m : {1, 2, 3, 4, 7, 8, 11, 12, 13, 24, 25, 97}) {
    for (const int64_t n : {1, 31, 32, 33, 160}) {
      for (const int64_t k : {1, 7, 64, 576}) check(Linear(m, n, k, (m + n) % 3, (n + k) % 2 == 0));
    }
  }
}

void every_number_of_rows() {
  for (int64_t m = 1; m <= 70; ++m) check(Linear(m, 70, 33, 1, m % 2 == 0));
}

// K past kDepthBlock, so that sums are spilled between tiles; enough work for several tasks.
void deep_and_wide() {
  for (const bool bias : {false, true}) check(Linear(30, 70, 2500, 5, bias));
}

void row_alone_equals_row_in_batch() {
  Linear batch(40, 96, 300, 0, true);
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto all = batch.run([&](const LinearArgs& a) { kernels.linear(a, pool); });
    for (const int64_t row : {0, 13, 39}) {
      std::vector<float> one = filled(96, 0);
      LinearArgs a = batch.args;
      a.m = 1, a.x += row * a.x_stride, a.y = one.data();
      kernels.linear(a, pool);
      CHECK(std::memcmp(one.data(), all.data() + row * 96, 96 * sizeof(float)) == 0)
          << what << " row " << row;
    }
  });
}

void empty_sizes() {
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    Linear none(0, 32, 8, 0, false);
    kernels.linear(none.args, pool);
    Linear bias_only(2, 33, 0, 0, true);  // a sum over nothing is 0
    const auto y = bias_only.run([&](const LinearArgs& a) { kernels.linear(a, pool); });
    CHECK(y[0] == bias_only.bias[0] && y[65] == bias_only.bias[32]) << what;
  });
}

// NaN and infinity pass on, and stay in their row and column.
void special_values() {
  Linear linear(5, 40, 16, 0, false);
  linear.x[2 * 16 + 3] = kNaN;
  linear.weight[static_cast<size_t>((1 * 16 + 4) * 32 + 6)] = kInf;  // n = 38, k = 4
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto y = linear.run([&](const LinearArgs& a) { kernels.linear(a, pool); });
    for (int64_t m = 0; m < 5; ++m) {
      for (int64_t n = 0; n < 40; ++n) {
        const float v = y[static_cast<size_t>(m * 40 + n)];
        CHECK(std::isnan(v) == (m == 2) && std::isinf(v) == (m != 2 && n == 38))
            << what << " " << m << " " << n;
      }
    }
  });
}

}  // namespace

int main() {
  RUN(equals_reference);
  RUN(every_number_of_rows);
  RUN(deep_and_wide);
  RUN(row_alone_equals_row_in_batch);
  RUN(empty_sizes);
  RUN(special_values);
  return check::result();
}
