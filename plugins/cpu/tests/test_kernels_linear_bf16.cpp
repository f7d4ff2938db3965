#include "test_kernels.h"

using namespace ew;
using namespace ew::testing;

namespace {

std::vector<uint16_t> to_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = reference::to_bf16(values[i]);
  return bits;
}

float to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// A linear in buffers with gaps between rows. y's gaps must stay as they are; x's are NaN.
struct Linear {
  int64_t m, n, k, x_stride, y_stride;
  std::vector<uint16_t> x, rows, weight;
  std::vector<float> bias;
  LinearBf16Args args;

  Linear(int64_t m_, int64_t n_, int64_t k_, int64_t gap, bool with_bias)
      : m(m_), n(n_), k(k_), x_stride((k + 1) / 2 * 2 + 2 * gap), y_stride(n + gap) {
    x = to_bf16(random_floats(m * x_stride, 1));
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = k; j < x_stride; ++j) x[static_cast<size_t>(i * x_stride + j)] = 0x7fc0;
      if (k % 2 != 0) x[static_cast<size_t>(i * x_stride + k)] = 0;
    }
    rows = to_bf16(random_floats(n * k, 2));
    weight = to_packed_panels<uint16_t>(rows, n, k, 2, 0);
    bias = random_floats(n, 3);
    args.m = m, args.n = n, args.k = k;
    args.x = x.data(), args.x_stride = x_stride;
    args.weight = weight.data(), args.bias = with_bias ? bias.data() : nullptr;
    args.y_stride = y_stride;
  }
  template <class F>
  std::vector<float> run(const F& fn) {
    std::vector<float> y = filled(m * y_stride, -7);
    args.y = y.data();
    fn(args);
    return y;
  }
  // The largest error, in units of its bound: K roundings of sums that are at most the sum of the magnitudes,
  // and one of the bias. (Products of bf16 are exact.)
  double error(const std::vector<float>& y) const {
    double most = 0;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, size = 0;
        for (int64_t c = 0; c < k; ++c) {
          const double product = static_cast<double>(to_float(x[static_cast<size_t>(i * x_stride + c)])) *
                                 to_float(rows[static_cast<size_t>(j * k + c)]);
          sum += product;
          size += std::fabs(product);
        }
        if (args.bias != nullptr) sum += args.bias[j], size += std::fabs(args.bias[j]);
        const double bound = static_cast<double>(k + 1) * kEps / 2 * size;
        const double off = std::fabs(y[static_cast<size_t>(i * y_stride + j)] - sum);
        most = std::max(most, off > 0 ? off / bound : 0);
      }
    }
    return most;
  }
};

void check(int64_t m, int64_t n, int64_t k, int64_t gap, bool bias) {
  if (left_out()) return;
  Linear linear(m, n, k, gap, bias);
  const auto fused = linear.run([](const LinearBf16Args& a) { reference::linear_bf16(a, true); });
  const auto twice = linear.run([](const LinearBf16Args& a) { reference::linear_bf16(a, false); });
  std::vector<float> packed;  // VDPBF16's sums, whose order within a pair is its own
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto y = linear.run([&](const LinearBf16Args& a) { kernels.linear_bf16(a, pool); });
    const std::string shape =
        " m=" + std::to_string(m) + " n=" + std::to_string(n) + " k=" + std::to_string(k);
    if (!has_vdpbf16(kernels)) {
      CHECK(same_bits(y, std::string(kernels.isa) == "portable" ? twice : fused)) << what << shape;
      return;
    }
    if (packed.empty()) {
      packed = y;
      CHECK(linear.error(y) <= 1) << what << shape << ": " << linear.error(y) << " of the bound";
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = n; j < n + gap; ++j) CHECK(y[static_cast<size_t>(i * (n + gap) + j)] == -7) << what;
      }
    }
    CHECK(same_bits(y, packed)) << what << shape;
  });
}

void equals_reference() {
  for (const int64_t m : {1, 2, 3, 4, 7, 12, 13, 25, 97}) {
    for (const int64_t n : {1, 31, 32, 33, 160}) {
      for (const int64_t k : {1, 2, 7, 64, 577}) check(m, n, k, (m + n) % 3, (n + k) % 2 == 0);
    }
  }
}

// Several sweeps of panels, the last one short, for every number of rows that makes other blocks.
void sweeps() {
  for (int64_t m = 1; m <= 70; ++m) {
    check(m, 290, 33, 2, m % 2 == 0);
    check(m, 417, 16, 0, m % 2 != 0);
  }
}

void deep_and_wide() {
  check(30, 330, 2500, 5, true);
  check(200, 96, 1024, 0, false);
}

void row_alone_equals_row_in_batch() {
  Linear batch(40, 96, 301, 0, true);
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto all = batch.run([&](const LinearBf16Args& a) { kernels.linear_bf16(a, pool); });
    for (const int64_t row : {0, 13, 39}) {
      std::vector<float> one = filled(96, 0);
      LinearBf16Args a = batch.args;
      a.m = 1, a.x += row * a.x_stride, a.y = one.data();
      kernels.linear_bf16(a, pool);
      CHECK(std::memcmp(one.data(), all.data() + row * 96, 96 * sizeof(float)) == 0)
          << what << " row " << row;
    }
  });
}

void empty_sizes() {
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    Linear none(0, 32, 8, 0, false);
    kernels.linear_bf16(none.args, pool);
    Linear bias_only(2, 33, 0, 0, true);  // a sum over nothing is 0
    const auto y = bias_only.run([&](const LinearBf16Args& a) { kernels.linear_bf16(a, pool); });
    CHECK(y[0] == bias_only.bias[0] && y[65] == bias_only.bias[32]) << what;
  });
}

// NaN and infinity pass on, and stay in their row and column.
void special_values() {
  Linear linear(15, 40, 16, 0, false);
  linear.x[2 * 16 + 3] = 0x7fc0;
  linear.weight[static_cast<size_t>(((8 + 2) * 32 + 6) * 2)] = 0x7f80;  // infinity at n = 38, k = 4
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto y = linear.run([&](const LinearBf16Args& a) { kernels.linear_bf16(a, pool); });
    for (int64_t m = 0; m < 15; ++m) {
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
  RUN(sweeps);
  RUN(deep_and_wide);
  RUN(row_alone_equals_row_in_batch);
  RUN(empty_sizes);
  RUN(special_values);
  return check::result();
}
