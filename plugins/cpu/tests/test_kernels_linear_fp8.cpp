#include "linear_checks.h"

using namespace ew;
using namespace ew::testing;

namespace {

// Codes of all values but NaN.
std::vector<uint8_t> random_codes(int64_t count, unsigned seed) {
  const auto ints = random_ints(count, 254, seed);
  std::vector<uint8_t> codes(ints.size());
  for (size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<uint8_t>(ints[i] + (ints[i] > 126 ? 1 : 0));
  return codes;
}

// A linear in buffers with gaps between rows. y's gaps must stay as they are; x's are NaN.
struct Linear : LinearRun<LinearFp8Args> {
  int64_t m, n, k, group, y_stride;
  std::vector<float> x, bias;
  std::vector<uint8_t> rows, weight;
  std::vector<uint16_t> scales;

  Linear(int64_t m_, int64_t n_, int64_t k_, int64_t group_, int64_t gap, bool with_bias)
      : m(m_), n(n_), k(k_), group(group_), y_stride(n + gap) {
    const int64_t x_stride = k + gap, groups = group > 0 ? (k + group - 1) / group : 1;
    x = random_floats(m * x_stride, 1);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = k; j < x_stride; ++j) x[static_cast<size_t>(i * x_stride + j)] = kNaN;
    }
    rows = random_codes(n * k, 2);
    weight = to_packed_panels<uint8_t>(rows, n, k, 1, 0);
    scales = random_half_panels(n, groups);
    bias = random_floats(n, 3);
    args.m = m, args.n = n, args.k = k, args.group = group;
    args.x = x.data(), args.x_stride = x_stride;
    args.weight = weight.data(), args.weight_scales = scales.data();
    args.bias = with_bias ? bias.data() : nullptr;
    args.y_stride = y_stride;
  }
};

void check(Linear linear) {
  if (left_out()) return;
  check_bits<&KernelTable::linear_fp8>(linear, reference::linear_fp8,
                                       " m=" + std::to_string(linear.m) + " n=" + std::to_string(linear.n) +
                                           " k=" + std::to_string(linear.k) + " group " +
                                           std::to_string(linear.group));
}

void equals_reference() {
  for (const int64_t m : {1, 2, 4, 7, 12, 13, 25, 97}) {
    for (const int64_t n : {1, 31, 32, 33, 160}) {
      for (const int64_t k : {1, 32, 127, 128, 129, 320}) {
        const int64_t group = (m + n + k) % 3 * 32;
        check(Linear(m, n, k, group, (m + n) % 3, (n + k) % 2 == 0));
      }
    }
  }
}

void every_number_of_rows() {
  for (int64_t m = 1; m <= 70; ++m) check(Linear(m, 33, 160, 32, 1, false));
}

void deep_and_wide() {
  check(Linear(30, 330, 2560, 64, 5, true));
  check(Linear(200, 96, 1024, 0, 0, false));
}

// Every code that is a number, through scales that are subnormal, 1, and the largest.
void every_code() {
  for (const uint16_t scale : {uint16_t{0x0001}, uint16_t{0x3c00}, uint16_t{0x7bff}, uint16_t{0}}) {
    Linear linear(1, 256, 1, 0, 0, false);
    for (int code = 0; code < 256; ++code) {
      linear.weight[static_cast<size_t>(code)] = static_cast<uint8_t>(code % 128 == 127 ? 0 : code);
    }
    std::fill(linear.scales.begin(), linear.scales.end(), scale);
    check(linear);
  }
}

void row_alone_equals_row_in_batch() {
  Linear batch(70, 96, 300, 32, 0, true);
  check_single_rows<&KernelTable::linear_fp8>(batch, {0, 13, 69});
}

void embeddings() {
  const std::vector<int32_t> ids = {0, 39, 31, 32, 5, 5};
  for (const int64_t group : {0, 32}) {
    const Linear table(1, 40, 72, group, 0, false);
    EmbeddingFp8Args a;
    a.tokens = static_cast<int64_t>(ids.size()), a.hidden = 72, a.group_size = group, a.ids = ids.data();
    a.weight = table.weight.data(), a.scales = table.scales.data(), a.out_stride = 75;
    std::vector<float> expected = filled(6 * 75, -7);
    a.out = expected.data();
    reference::embedding_fp8(a);
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      std::vector<float> out = filled(6 * 75, -7);
      a.out = out.data();
      kernels.embedding_fp8(a, pool);
      CHECK(same_bits(out, expected)) << what << " group " << group;
    });
  }
}

// An expert's rows are those of a linear of its own.
void experts() {
  const std::vector<int32_t> starts = {0, 3, 3, 20};
  Linear all(20, 3 * 64, 96, 32, 0, false);  // 3 experts of 64 columns: whole panels
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    Grouped<LinearFp8Args> g;
    g.all = all.args, g.all.n = 64, g.all.y_stride = 64;
    g.experts = 3, g.starts = starts.data(), g.weight_stride = 64 * 96, g.scales_stride = 64 * 3;
    std::vector<float> got = filled(20 * 64, -7), want = got;
    g.all.y = got.data();
    kernels.grouped_linear_fp8(g, pool);
    for (size_t e = 0; e < 3; ++e) {
      LinearFp8Args a = g.all;
      a.m = starts[e + 1] - starts[e];
      a.x += starts[e] * a.x_stride, a.y = want.data() + starts[e] * 64;
      a.weight += static_cast<int64_t>(e) * g.weight_stride;
      a.weight_scales += static_cast<int64_t>(e) * g.scales_stride;
      kernels.linear_fp8(a, pool);
    }
    CHECK(same_bits(got, want)) << what;
  });
}

}  // namespace

int main() {
  RUN(equals_reference);
  RUN(every_number_of_rows);
  RUN(deep_and_wide);
  RUN(every_code);
  RUN(row_alone_equals_row_in_batch);
  RUN(embeddings);
  RUN(experts);
  return check::result();
}
