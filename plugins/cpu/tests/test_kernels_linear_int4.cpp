#include "linear_checks.h"

using namespace ew;
using namespace ew::testing;

namespace {

struct Shape {
  int64_t m, n, k, group;
  bool offsets = false, bias = false;
  int64_t bits = 4, block = 0;
};

std::string describe(const Shape& s) {
  return " m=" + std::to_string(s.m) + " n=" + std::to_string(s.n) + " k=" + std::to_string(s.k) + " group " +
         std::to_string(s.group) + (s.offsets ? " offsets" : "") + " bits " + std::to_string(s.bits) +
         " block " + std::to_string(s.block);
}

// A linear in buffers with gaps between rows. Gaps of y must stay as they are; those of values and scales
// hold what would show in a result. Memory ends where the last panel does.
struct Linear : LinearRun<LinearInt4Args> {
  Shape shape;
  int64_t values_stride, scales_stride, y_stride;
  std::vector<int8_t> values;
  std::vector<float> scales, bias;
  std::vector<int32_t> sums;
  std::vector<uint8_t> weight;
  std::vector<uint16_t> weight_scales, weight_offsets;
  Workspace workspace;

  explicit Linear(const Shape& s, int64_t gap = 1) : shape(s), y_stride(s.n + gap) {
    const int64_t groups = s.k / s.group;
    values_stride = s.k + 4 * gap;
    scales_stride = groups + gap;
    values = random_activations(s.m * values_stride, 1);
    scales = random_floats(s.m * scales_stride, 2);
    sums.assign(static_cast<size_t>(s.m * scales_stride), 12345);
    weight = to_planes(random_ints(s.n * s.k, 1 << s.bits, 3), s.n, s.k, s.bits);
    weight_scales = random_scales(s.n, groups, s.block);
    weight_offsets = random_scales(s.n, groups, s.block, 9);
    for (size_t i = 0; s.block == 0 && i < weight_offsets.size(); i += 3) weight_offsets[i] ^= 0x8000;
    bias = random_floats(s.n, 5);
    add_up();
    args.m = s.m, args.n = s.n, args.k = s.k, args.group = s.group;
    args.bits = s.bits, args.scale_block = s.block;
    args.values = values.data(), args.values_stride = values_stride;
    args.scales = scales.data(), args.scales_stride = scales_stride;
    args.sums = sums.data(), args.sums_stride = scales_stride;
    args.weight = weight.data(), args.weight_scales = weight_scales.data();
    args.weight_offsets = s.offsets ? weight_offsets.data() : nullptr;
    args.bias = s.bias ? bias.data() : nullptr;
    args.y_stride = y_stride;
  }
  // The groups' sums of values.
  void add_up() {
    for (int64_t m = 0; m < shape.m; ++m) {
      for (int64_t k = 0; k < shape.k; ++k) {
        int32_t& sum = sums[static_cast<size_t>(m * scales_stride + k / shape.group)];
        if (k % shape.group == 0) sum = 0;
        sum += values[static_cast<size_t>(m * values_stride + k)];
      }
    }
  }
};

void check(const Shape& shape) {
  if (left_out()) return;
  Linear linear(shape);
  const auto fused = linear.run([](const LinearInt4Args& a) { reference::linear_int4(a, true); });
  const auto twice = linear.run([](const LinearInt4Args& a) { reference::linear_int4(a, false); });
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    for (Workspace* memory : {static_cast<Workspace*>(nullptr), &linear.workspace}) {
      const auto y = linear.run([&](LinearInt4Args a) {
        a.workspace = memory;
        kernels.linear_int4(a, pool);
      });
      // Bit for bit: the integers are exact, and the order of the float sums is fixed.
      CHECK(same_bits(y, std::string(kernels.isa) == "portable" ? twice : fused))
          << what << describe(linear.shape) << (memory == nullptr ? "" : " unpacked");
    }
  });
}

void equals_reference() {
  for (const int64_t m : {1, 2, 3, 4, 7, 8, 9, 10, 11, 13, 25, 70}) {
    for (const int64_t n : {1, 31, 32, 33, 160}) {
      for (const int64_t groups : {1, 2, 3, 9}) {
        const int64_t group = (m + n + groups) % 2 == 0 ? 32 : 64;
        check({m, n, group * groups, group, groups % 2 == 0, n % 2 == 0});
      }
    }
  }
}

// However rows fall into blocks, and blocks into tasks.
void every_number_of_rows() {
  for (int64_t m = 1; m <= 70; ++m) check({m, 33, 64, 32, m % 2 == 0, false});
}

// Of other bits than 4 too, and with scales in blocks: of groups of 16 and 32, as files of GGUF have them.
void bits_and_blocks() {
  for (const int64_t bits : {2, 3, 4, 5, 6}) {
    for (const int64_t block : {0, 8, 16}) {
      for (const int64_t m : {1, 2, 3, 5, 8, 9, 14, 70}) {
        const int64_t group = (m + bits + block) % 2 == 0 ? 16 : 32, blocks = m % 3 + 1;
        const int64_t groups = block == 0 ? 3 * blocks : block * blocks;
        check({m, m % 2 == 0 ? 33 : 160, group * groups, group, m % 4 < 2, true, bits, block});
      }
    }
  }
}

// Rows of prompts (linear_many.h, linear_short.h): those with which blocks of two sizes begin, and several
// tasks; groups of each size, of one sum of 16 bits and of several; in sweeps of several panels and of one; a
// K of several chunks, the last of them shorter.
void many_rows() {
  for (const int64_t m : {29, 30, 36, 59, 100, 203}) {
    for (const int64_t group : {16, 32, 64, 128}) {
      for (const int64_t bits : {2, 3, 4, 5, 6}) {
        for (const bool offsets : {false, true})
          check({m, m % 2 == 0 ? 33 : 290, 3 * group, group, offsets, bits % 2 == 0, bits});
        check({m, 70, 16 * group, group, m % 2 == 0, true, bits, 8});
      }
    }
  }
  check({31, 161, 12288, 32, true, true, 5});
  for (const int64_t group : {48, 80, 1040}) {
    for (const bool offsets : {false, true}) check({66, 70, 3 * group, group, offsets, true});
  }
}

// Tasks of fewer rows than a call has, also too few for blocks of one size.
void many_rows_of_tuned_tasks() {
  for (const int64_t rows : {16, 64, 97}) {
    for (const bool offsets : {false, true}) {
      Linear linear({200, 161, 576, 32, offsets, true});
      linear.args.workspace = &linear.workspace;
      const auto fused = linear.run([](const LinearInt4Args& a) { reference::linear_int4(a, true); });
      for_all(
          [&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
            const auto y = linear.run<&KernelTable::linear_int4>(kernels, pool);
            CHECK(std::string(kernels.isa) == "portable" || same_bits(y, fused)) << what << " rows " << rows;
          },
          {.task_rows = rows});
    }
  }
}

// Of sizes on both sides of what 16-bit sums take at a time.
void group_sizes() {
  for (const int64_t group : {8, 16, 24, 40, 72, 128, 1024}) {
    for (const int64_t m : {1, 5, 14}) {
      for (const bool offsets : {false, true}) check({m, 70, 3 * group, group, offsets, true});
    }
  }
}

// The largest products there are, of one sign: the sums of 16 bits that AVX-512, AVX2 and portable keep come
// as near to their end as they can.
void largest_sums_of(int64_t bits, int64_t rows, uint8_t weight) {
  const int64_t largest = (1 << bits) - 1, half = 1 << (bits - 1);
  for (const int64_t group : {32, 64, 4096}) {
    for (const int8_t value : {int8_t{-127}, int8_t{127}}) {
      for (const bool offsets : {false, true}) {
        Linear linear({rows, 40, group, group, offsets, false, bits});
        linear.args.workspace = &linear.workspace;
        std::fill(linear.values.begin(), linear.values.end(), value);
        std::fill(linear.weight.begin(), linear.weight.end(), weight);
        std::fill(linear.scales.begin(), linear.scales.end(), 1.0f);
        linear.weight_scales.assign(linear.weight_scales.size(), 0x3c00);  // 1
        linear.weight_offsets.assign(linear.weight_offsets.size(), 0);
        linear.add_up();
        const int64_t product = value * ((weight == 0 ? 0 : largest) - (offsets ? 0 : half));
        const float expected = static_cast<float>(product * group);
        for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
          const auto y = linear.run<&KernelTable::linear_int4>(kernels, pool);
          CHECK(y[0] == expected && y[39] == y[0] && y[40] == -7) << what << " " << y[0];
        });
      }
    }
  }
}

// Enough work for several tasks.
void largest_sums() {
  for (const int64_t bits : {2, 3, 4, 5, 6}) {
    for (const uint8_t weight : {0, 0xff})
      largest_sums_of(bits, 12, weight), largest_sums_of(bits, 64, weight);
  }
}

void deep_and_wide() {
  check({30, 330, 2560, 32, false, true});
  check({30, 330, 2560, 64, true, true});
  check({200, 96, 1536, 32, true, false});
  check({460, 290, 576, 64, true, false, 5});  // more rows to a task than usual
}

void row_alone_equals_row_in_batch() {
  for (const int64_t group : {32, 64}) {
    for (const bool offsets : {false, true}) {
      Linear batch({70, 96, 320, group, offsets, true}, 0);
      check_single_rows<&KernelTable::linear_int4>(batch, {0, 13, 39, 69}, describe(batch.shape));
    }
  }
}

void empty_sizes() {
  check_empty<&KernelTable::linear_int4>(Linear({0, 32, 32, 32}), Linear({2, 33, 0, 32, true, true}, 0));
}

void nan_scale() {
  for (const bool offsets : {false, true}) {
    Linear linear({15, 40, 96, 32, offsets}, 0);
    check_nan_scale<&KernelTable::linear_int4>(linear);
  }
}

// A weight is value * scale + offset: with whole numbers nothing rounds, and the product is that of floats.
void offsets_are_added_to_weights() {
  const int64_t n = 34, k = 64, m = 9;
  Linear linear({m, n, k, 32, true, false}, 0);
  std::fill(linear.scales.begin(), linear.scales.end(), 1.0f);
  linear.weight_scales.assign(linear.weight_scales.size(), 0x4000);    // 2
  linear.weight_offsets.assign(linear.weight_offsets.size(), 0xc900);  // -10
  const auto integers = random_ints(n * k, 16, 3);
  std::vector<float> expected;
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t column = 0; column < n; ++column) {
      int32_t sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        sum += linear.values[static_cast<size_t>(row * linear.values_stride + i)] *
               (2 * integers[static_cast<size_t>(column * k + i)] - 10);
      }
      expected.push_back(static_cast<float>(sum));
    }
  }
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    CHECK(linear.run<&KernelTable::linear_int4>(kernels, pool) == expected) << what;
  });
}

}  // namespace

int main() {
  RUN(equals_reference);
  RUN(every_number_of_rows);
  RUN(group_sizes);
  RUN(many_rows);
  RUN(many_rows_of_tuned_tasks);
  RUN(bits_and_blocks);
  RUN(largest_sums);
  RUN(deep_and_wide);
  RUN(row_alone_equals_row_in_batch);
  RUN(empty_sizes);
  RUN(nan_scale);
  RUN(offsets_are_added_to_weights);
  return check::result();
}
