#include "linear_checks.h"

using namespace ew;
using namespace ew::testing;

namespace {

struct Shape {
  int64_t m, n, k, weight_group, activation_group;
  bool bias = false;
  int64_t block = 0;
  const uint8_t* codes = nullptr;
};

std::string describe(const Shape& s) {
  std::string text = " m=" + std::to_string(s.m) + " n=" + std::to_string(s.n) + " k=" + std::to_string(s.k);
  return text + " groups " + std::to_string(s.weight_group) + "/" + std::to_string(s.activation_group) +
         " block " + std::to_string(s.block);
}

// A linear in buffers with gaps between rows. Gaps of y must stay as they are; those of values and scales
// hold what would show in a result.
struct Linear : LinearRun<LinearInt8Args> {
  Shape shape;
  int64_t values_stride, scales_stride, y_stride;
  std::vector<int8_t> values;
  std::vector<float> scales, bias;
  std::vector<int32_t> sums;
  std::vector<uint8_t> weight;
  std::vector<uint16_t> weight_scales;
  Workspace workspace;

  explicit Linear(const Shape& s, int64_t gap = 1) : shape(s), y_stride(s.n + gap) {
    const int64_t groups = s.activation_group > 0 ? (s.k + s.activation_group - 1) / s.activation_group : 1;
    const int64_t padded = (s.k + 3) / 4 * 4;
    values_stride = padded + 4 * gap;
    scales_stride = groups + gap;
    values = random_activations(s.m * values_stride, 1);
    scales = random_floats(s.m * scales_stride, 2);
    sums.assign(static_cast<size_t>(s.m * scales_stride), 12345);
    for (int64_t m = 0; m < s.m; ++m) {
      for (int64_t k = s.k; k < padded; ++k) values[static_cast<size_t>(m * values_stride + k)] = 0;
      for (int64_t g = 0; g < groups; ++g) sums[static_cast<size_t>(m * scales_stride + g)] = 0;
      for (int64_t k = 0; k < s.k; ++k) {
        const int64_t g = s.activation_group > 0 ? k / s.activation_group : 0;
        sums[static_cast<size_t>(m * scales_stride + g)] +=
            values[static_cast<size_t>(m * values_stride + k)];
      }
    }
    weight = s.codes != nullptr ? to_panels_int4(random_ints(s.n * s.k, 16, 3), s.n, s.k)
                                : to_panels_int8(random_bytes(s.n * s.k, 3), s.n, s.k);
    args.codes = s.codes;
    weight_scales =
        random_scales(s.n, s.weight_group > 0 ? (s.k + s.weight_group - 1) / s.weight_group : 1, s.block);
    bias = random_floats(s.n, 5);
    args.m = s.m, args.n = s.n, args.k = s.k;
    args.scale_block = s.block;
    args.weight_group = s.weight_group, args.activation_group = s.activation_group;
    args.values = values.data(), args.values_stride = values_stride;
    args.scales = scales.data(), args.scales_stride = scales_stride;
    args.sums = sums.data(), args.sums_stride = scales_stride;
    args.weight = weight.data(), args.weight_scales = weight_scales.data();
    args.bias = s.bias ? bias.data() : nullptr;
    args.y_stride = y_stride;
    args.workspace = &workspace;
  }
};

void check(const Shape& shape) {
  if (left_out()) return;
  Linear linear(shape);
  check_bits<&KernelTable::linear_int8>(linear, reference::linear_int8, describe(shape));
}

void equals_reference() {
  for (const int64_t m : {1, 2, 3, 7, 8, 11, 13, 25, 97}) {
    for (const int64_t n : {1, 31, 33, 160}) {
      for (const int64_t k : {1, 4, 7, 66, 576}) {
        const int64_t group = (m + n + k) % 2 == 0 ? 32 : 64;
        check({m, n, k, group, group, n % 2 == 0});
      }
    }
  }
}

// Every combination of groups, of the smallest size and of sizes that don't divide K, and past it.
void groups() {
  for (const int64_t group : {4, 12, 32, 64, 1000}) {
    for (const int64_t k : {64, 90, 577}) {
      for (const int64_t m : {1, 5, 14}) {
        check({m, 70, k, group, group, true});
        check({m, 70, k, group, 0, true});
        check({m, 70, k, 0, group, true});
        check({m, 70, k, 0, 0, true});
      }
    }
  }
}

// Several sweeps of panels, the last one short, for every number of rows that makes other blocks.
// Of groups of 16 and 32, which share an f16 by 16 or 8; for activations that have groups of the same size,
// or none.
void blocks_of_scales() {
  for (const int64_t m : {1, 2, 5, 11, 30, 70}) {
    for (const int64_t group : {16, 32}) {
      for (const int64_t block : {8, 16}) {
        for (const int64_t activation : {group, int64_t{0}})
          check({m, m % 2 == 0 ? 33 : 160, 2 * block * group, group, activation, true, block});
      }
    }
  }
}

// Of 4 bits that are places in a table.
void codes() {
  for (const uint8_t* table : {kIq4Codes, kFp4Codes}) {
    for (const int64_t m : {1, 2, 5, 11, 13, 30, 70, 97}) {
      for (const int64_t group : {16, 32}) {
        check({m, m % 2 == 0 ? 33 : 160, 6 * group, group, group, true, 0, table});
        check({m, 70, 16 * group, group, group, false, 16, table});
      }
    }
    check({12, 300, 4096, 32, 32, true, 8, table});
  }
}

void sweeps() {
  for (int64_t m = 1; m <= 70; ++m) {
    check({m, 290, 64, 32, 32, m % 2 == 0});
    check({m, 417, 36, 12, m % 3 == 0 ? 0 : 12, m % 2 == 0});
  }
}

// Panels that are tiled along K, the last tile short or of one long group, which several sweeps store.
void tiles() {
  for (const int64_t m : {2, 3, 5, 8, 9, 13, 16, 17, 24, 31, 32, 33}) {
    check({m, 290, 608, 32, 32, true});
    check({m, 70, 616, 44, 0, false});
    check({m, 70, 608, 0, 32, false});
    check({m, 40, 1200, 400, 400, true});
  }
}

// Enough work for several tasks, and an integer sum (all products 127 * -127) that goes far past 16 bits and
// 24 bits.
void deep_and_wide() {
  check({30, 330, 2500, 32, 32, true});
  check({200, 96, 1536, 0, 0, false});
  Linear linear({3, 40, 8192, 0, 0, false});
  std::fill(linear.values.begin(), linear.values.end(), int8_t{-127});
  std::fill(linear.sums.begin(), linear.sums.end(), -127 * 8192);
  linear.weight = to_panels_int8(std::vector<int8_t>(40 * 8192, 127), 40, 8192);
  linear.args.weight = linear.weight.data();
  std::fill(linear.scales.begin(), linear.scales.end(), 1.0f);
  linear.weight_scales.assign(linear.weight_scales.size(), 0x3c00);  // 1
  linear.args.weight_scales = linear.weight_scales.data();
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto y = linear.run<&KernelTable::linear_int8>(kernels, pool);
    CHECK(y[0] == -127.0f * 127.0f * 8192.0f && y[39] == y[0] && y[40] == -7) << what << " " << y[0];
  });
}

// Weights of -128 and 127 alone, and values of -127 and 127: pairs of products are as large as can be, in
// both signs. In all sizes of blocks, in groups and without.
void extremes() {
  for (const int64_t m : {1, 2, 3, 5, 6, 7, 10, 31}) {
    for (const int64_t k : {5, 64, 608}) {
      for (const int64_t group : {int64_t{0}, int64_t{32}}) {
        const Shape shape = {m, 70, k, group, group};
        Linear linear(shape);
        auto rows = random_bytes(shape.n * k, 8);
        for (int8_t& w : rows) w = w % 2 == 0 ? int8_t{-128} : int8_t{127};
        linear.weight = to_panels_int8(rows, shape.n, k);
        linear.args.weight = linear.weight.data();
        std::fill(linear.sums.begin(), linear.sums.end(), 0);
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < k; ++j) {
            int8_t& value = linear.values[static_cast<size_t>(i * linear.values_stride + j)];
            value = j % (i + 2) == 0 || value > 60 ? int8_t{-127} : int8_t{127};
            linear.sums[static_cast<size_t>(i * linear.scales_stride + (group > 0 ? j / group : 0))] += value;
          }
        }
        check_bits<&KernelTable::linear_int8>(linear, reference::linear_int8, describe(shape));
      }
    }
  }
}

// Rows of prompts (linear_many.h): those with which blocks of two sizes begin, and several tasks; groups of
// each size; panels that are read as they are or made bytes, in sweeps of several and of one.
void many_rows() {
  for (const int64_t m : {10, 12, 13, 15, 16, 18, 20, 24, 25, 29, 30, 31, 35, 36, 37, 59, 96, 100, 203}) {
    for (const int64_t group : {16, 32, 64, 128}) {
      check({m, m % 2 == 0 ? 33 : 290, 3 * group, group, group, m % 3 == 0});
      check({m, 70, 16 * group, group, group, false, 8});
      check({m, 161, 2 * group, group, group, true, 0, kIq4Codes});
    }
  }
  for (const int64_t m : {16, 31}) check({m, 161, 12288, 32, 32, true});
  check({31, 161, 12288, 32, 32, true, 16, kIq4Codes});
}

// Tasks of a machine that was tuned: of fewer rows than that takes, and of rows that are not whole blocks.
void many_rows_of_tuned_tasks() {
  for (const int64_t rows : {16, 64}) {
    for (const uint8_t* codes : {static_cast<const uint8_t*>(nullptr), kIq4Codes}) {
      Linear linear({200, 161, 576, 32, 32, true, 0, codes});
      const auto fused = linear.run([](const LinearInt8Args& a) { reference::linear_int8(a, true); });
      for_all(
          [&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
            const auto y = linear.run<&KernelTable::linear_int8>(kernels, pool);
            CHECK(std::string(kernels.isa) == "portable" || same_bits(y, fused)) << what << " rows " << rows;
          },
          {.task_rows = rows});
    }
  }
}

void row_alone_equals_row_in_batch() {
  for (const Shape& shape :
       {Shape{40, 96, 300, 32, 32, true}, Shape{40, 96, 300, 64, 0, true}, Shape{40, 96, 300, 0, 32, true},
        Shape{40, 96, 300, 0, 0, true}, Shape{16, 96, 1536, 32, 32, true}}) {
    Linear batch(shape, 0);
    check_single_rows<&KernelTable::linear_int8>(batch, {0, 13, shape.m - 1}, describe(shape));
  }
}

void empty_sizes() {
  check_empty<&KernelTable::linear_int8>(Linear({0, 32, 8, 32, 32, false}),
                                         Linear({2, 33, 0, 32, 32, true}, 0));
}

void nan_scale() {
  for (const int64_t group : {0, 32}) {
    Linear linear({15, 40, 96, group, group, false}, 0);
    check_nan_scale<&KernelTable::linear_int8>(linear);
  }
}

// Every f16 there is as a scale: subnormal numbers, infinities and NaN too.
void all_half_scales() {
  for (int64_t first = 0; first < 65536; first += 4096) {
    Linear linear({1, 4096, 4, 0, 0, false}, 0);
    for (int64_t i = 0; i < 4096; ++i) {
      linear.weight_scales[static_cast<size_t>(i)] = static_cast<uint16_t>(first + i);
    }
    const auto expected = linear.run([](const LinearInt8Args& a) { reference::linear_int8(a, true); });
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const auto y = linear.run<&KernelTable::linear_int8>(kernels, pool);
      CHECK(worst(y, expected, 0, 0) == 0) << what << " scales from " << first;
    });
  }
}

}  // namespace

int main() {
  RUN(equals_reference);
  RUN(groups);
  RUN(blocks_of_scales);
  RUN(codes);
  RUN(sweeps);
  RUN(tiles);
  RUN(deep_and_wide);
  RUN(many_rows);
  RUN(many_rows_of_tuned_tasks);
  RUN(extremes);
  RUN(row_alone_equals_row_in_batch);
  RUN(empty_sizes);
  RUN(nan_scale);
  RUN(all_half_scales);
  return check::result();
}
