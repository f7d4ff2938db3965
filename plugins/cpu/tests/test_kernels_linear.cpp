#include "linear_checks.h"

using namespace ew;
using namespace ew::testing;

namespace {

// A linear in buffers with gaps between rows, which must stay untouched.
struct Linear : LinearRun<LinearArgs> {
  int64_t m, n, k, gap;
  std::vector<float> x, weight, bias;

  Linear(int64_t rows, int64_t columns, int64_t depth, int64_t space, bool with_bias)
      : m(rows), n(columns), k(depth), gap(space), x(random_floats(m * (k + gap), 1)) {
    weight = to_panels(random_floats(n * k, 2), n, k);
    bias = random_floats(n, 3);
    args.m = m, args.n = n, args.k = k;
    args.x = x.data(), args.x_stride = k + gap;
    args.weight = weight.data(), args.bias = with_bias ? bias.data() : nullptr;
    args.y_stride = n + gap;
  }
};

void check(Linear linear) {
  check_bits<&KernelTable::linear>(
      linear, reference::linear,
      " m=" + std::to_string(linear.m) + " n=" + std::to_string(linear.n) + " k=" + std::to_string(linear.k));
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
  check_single_rows<&KernelTable::linear>(batch, {0, 13, 39});
}

void empty_sizes() {
  check_empty<&KernelTable::linear>(Linear(0, 32, 8, 0, false), Linear(2, 33, 0, 0, true));
}

void special_values() {
  Linear linear(5, 40, 16, 0, false);
  linear.x[2 * 16 + 3] = kNaN;
  linear.weight[static_cast<size_t>((1 * 16 + 4) * 32 + 6)] = kInf;  // n = 38, k = 4
  check_special_values<&KernelTable::linear>(linear);
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
