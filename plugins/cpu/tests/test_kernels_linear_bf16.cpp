#include "linear_checks.h"

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
struct Linear : LinearRun<LinearBf16Args> {
  int64_t m, n, k, x_stride, y_stride;
  std::vector<uint16_t> x, rows, weight;
  std::vector<float> bias;

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
    const auto y = linear.run<&KernelTable::linear_bf16>(kernels, pool);
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
  check_single_rows<&KernelTable::linear_bf16>(batch, {0, 13, 39});
}

void empty_sizes() {
  check_empty<&KernelTable::linear_bf16>(Linear(0, 32, 8, 0, false), Linear(2, 33, 0, 0, true));
}

void special_values() {
  Linear linear(15, 40, 16, 0, false);
  linear.x[2 * 16 + 3] = 0x7fc0;
  linear.weight[static_cast<size_t>(((8 + 2) * 32 + 6) * 2)] = 0x7f80;  // infinity at n = 38, k = 4
  check_special_values<&KernelTable::linear_bf16>(linear);
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
