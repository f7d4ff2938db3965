// Linears of weights in sparse32 against those of the same weights in dense panels: the same sums, bit for
// bit, and where VDPBF16 pairs others, within the bound of its roundings.
#include "test_kernels.h"

using namespace ew;
using namespace ew::testing;

namespace {

// Which k of each four are kept of [N, K]: two of them, or fewer in every seventh quad.
std::vector<uint8_t> random_mask(int64_t n, int64_t k, unsigned seed) {
  const auto draws = random_ints(n * k / 4, 1 << 20, seed);
  std::vector<uint8_t> mask(static_cast<size_t>(n * k));
  for (size_t q = 0; q < draws.size(); ++q) {
    const int first = draws[q] % 4, second = (first + 1 + draws[q] / 4 % 3) % 4;
    mask[4 * q + static_cast<size_t>(first)] = draws[q] / 12 % 7 != 0;
    mask[4 * q + static_cast<size_t>(second)] = draws[q] / 12 % 14 != 0;
  }
  return mask;
}

// A value's bytes at the step and column of a block: see sparse_panel.h.
template <class T>
void put(uint8_t* values, int64_t quad, int64_t column, int which, T value) {
  const int64_t pair = sizeof(T) == 4 ? which * 32 + column : 2 * column + which;
  std::memcpy(values + (quad * 64 + pair) * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}
struct Half {  // a value of 4 bits, + 8
  uint8_t bits;
};
void put(uint8_t* values, int64_t quad, int64_t column, int which, Half value) {
  uint8_t& byte = values[(quad / 2 * 32 + column) * 2 + which];
  byte = static_cast<uint8_t>(quad % 2 == 0 ? (byte & 0xf0) | value.bits : (byte & 0x0f) | value.bits << 4);
}

// [N, K] and its mask to sparse32; `fill` stands for zero. Bytes of values take `value_bytes` a block.
template <class T>
std::vector<uint8_t> to_sparse(const std::vector<T>& rows, const std::vector<uint8_t>& mask, int64_t n,
                               int64_t k, int64_t value_bytes, T fill) {
  const int64_t blocks = (k + 31) / 32, bytes = 128 + value_bytes;
  std::vector<uint8_t> stored(static_cast<size_t>((n + 31) / 32 * blocks * bytes));
  for (int64_t i = 0; i < (n + 31) / 32 * 32; ++i) {
    for (int64_t q = 0; q < blocks * 8; ++q) {
      uint8_t* block = stored.data() + (i / 32 * blocks + q / 8) * bytes;
      const auto is_kept = [&](int j) {
        return i < n && 4 * q < k && mask[static_cast<size_t>(i * k + 4 * q + j)] != 0;
      };
      int kept = 0;
      for (int j = 0; j < 4; ++j) kept += is_kept(j);
      int which = 0;
      uint32_t places = 0;
      for (int j = 0, spare = 2 - kept; j < 4 && which < 2; ++j) {
        if (!is_kept(j) && spare-- <= 0) continue;
        places |= static_cast<uint32_t>(j) << (2 * which);
        put(block + 128, q % 8, i % 32, which++,
            is_kept(j) ? rows[static_cast<size_t>(i * k + 4 * q + j)] : fill);
      }
      block[i % 32 * 4 + q % 8 / 2] |= static_cast<uint8_t>(places << (q % 2 * 4));
    }
  }
  return stored;
}

struct Shape {
  int64_t m, n, k, group = 0;
};
std::string describe(const Shape& s) {
  return " m=" + std::to_string(s.m) + " n=" + std::to_string(s.n) + " k=" + std::to_string(s.k) +
         " groups " + std::to_string(s.group);
}

template <class Args, class F>
std::vector<float> run(Args args, const F& fn) {
  std::vector<float> y = filled(args.m * args.n, -7);
  args.y = y.data(), args.y_stride = args.n;
  fn(args);
  return y;
}

// Every instruction set's sparse sums are its dense ones, and row by row the same.
template <class Args>
void compare(const Args& dense, const Args& sparse, const Shape& shape,
             void (*KernelTable::*kernel)(const Args&, Workers&), int64_t row_step) {
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto call = [&](const Args& a) { (kernels.*kernel)(a, pool); };
    const auto expected = run(dense, call), y = run(sparse, call);
    CHECK(same_bits(y, expected)) << what << describe(shape);
    for (int64_t row = 0; row < shape.m; row += row_step) {
      Args one = sparse;
      one.m = 1;
      if constexpr (requires { one.values; }) {
        one.values += row * one.values_stride, one.scales += row * one.scales_stride;
        one.sums += row * one.sums_stride;
      } else {
        one.x += row * one.x_stride;
      }
      const auto alone = run(one, call);
      CHECK(std::memcmp(alone.data(), y.data() + row * shape.n, sizeof(float) * alone.size()) == 0)
          << what << describe(shape) << " row " << row;
    }
  });
}

template <class T>
std::vector<T> masked(std::vector<T> rows, const std::vector<uint8_t>& mask, T zero) {
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = mask[i] != 0 ? rows[i] : zero;
  return rows;
}

void check_f32(const Shape& s) {
  const auto mask = random_mask(s.n, s.k, 1);
  const auto rows = masked(random_floats(s.n * s.k, 2), mask, 0.0f), x = random_floats(s.m * s.k, 3);
  const auto bias = random_floats(s.n, 4);
  const auto panels = to_panels(rows, s.n, s.k);
  const auto stored = to_sparse(rows, mask, s.n, s.k, 2048, 0.0f);
  LinearArgs dense{.m = s.m, .n = s.n, .k = s.k, .x = x.data(), .x_stride = s.k, .weight = panels.data()};
  dense.bias = bias.data();
  LinearArgs sparse = dense;
  sparse.weight = reinterpret_cast<const float*>(stored.data()), sparse.sparse = true;
  compare(dense, sparse, s, &KernelTable::linear, 5);
}

void check_bf16(const Shape& s) {
  const auto mask = random_mask(s.n, s.k, 1);
  const auto to_bf16 = [](const std::vector<float>& values) {
    std::vector<uint16_t> bits(values.size());
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = reference::to_bf16(values[i]);
    return bits;
  };
  const auto wide = masked(random_floats(s.n * s.k, 2), mask, 0.0f), wide_x = random_floats(s.m * s.k, 3);
  const auto rows = to_bf16(wide), x = to_bf16(wide_x);
  const auto panels = to_packed_panels<uint16_t>(rows, s.n, s.k, 2, 0);
  const auto stored = to_sparse<uint16_t>(rows, mask, s.n, s.k, 1024, 0);
  LinearBf16Args dense{.m = s.m, .n = s.n, .k = s.k, .x = x.data(), .x_stride = s.k, .weight = panels.data()};
  LinearBf16Args sparse = dense;
  sparse.weight = reinterpret_cast<const uint16_t*>(stored.data()), sparse.sparse = true;
  std::vector<float> packed;  // the sums of VDPBF16, whose pairs are of what is kept
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto call = [&](const LinearBf16Args& a) { kernels.linear_bf16(a, pool); };
    const auto expected = run(dense, call), y = run(sparse, call);
    if (!has_vdpbf16(kernels)) {
      CHECK(same_bits(y, expected)) << what << describe(s);
    } else {
      for (size_t i = 0; i < y.size(); ++i) {
        double size = 0;
        const size_t row = i / static_cast<size_t>(s.n) * static_cast<size_t>(s.k);
        const size_t column = i % static_cast<size_t>(s.n) * static_cast<size_t>(s.k);
        for (size_t k = 0; k < static_cast<size_t>(s.k); ++k) {
          size += std::fabs(static_cast<double>(wide_x[row + k]) * wide[column + k]);
        }
        // Two sums of at most K roundings each, of magnitudes that rounding to bf16 may have made larger.
        CHECK(std::fabs(y[i] - expected[i]) <= 1.02 * static_cast<double>(s.k) * kEps * size)
            << what << describe(s);
      }
      if (packed.empty()) packed = y;
      CHECK(same_bits(y, packed)) << what << describe(s);
    }
    for (int64_t row = 0; row < s.m; row += 5) {
      LinearBf16Args one = sparse;
      one.m = 1, one.x += row * s.k;
      const auto alone = run(one, call);
      CHECK(std::memcmp(alone.data(), y.data() + row * s.n, sizeof(float) * alone.size()) == 0)
          << what << describe(s) << " row " << row;
    }
  });
}

// Activations of both integer formats, as quantize_activation makes them.
struct Activations {
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;
  int64_t groups;

  Activations(const Shape& s) : groups(s.group > 0 ? (s.k + s.group - 1) / s.group : 1) {
    values = random_activations(s.m * s.k, 5);
    scales = random_floats(s.m * groups, 6);
    sums.assign(static_cast<size_t>(s.m * groups), 0);
    for (int64_t i = 0; i < s.m * s.k; ++i) {
      const int64_t group = s.group > 0 ? i % s.k / s.group : 0;
      sums[static_cast<size_t>(i / s.k * groups + group)] += values[static_cast<size_t>(i)];
    }
  }
  template <class Args>
  void give(Args* a, const Shape& s) const {
    a->m = s.m, a->n = s.n, a->k = s.k;
    a->values = values.data(), a->values_stride = s.k;
    a->scales = scales.data(), a->scales_stride = groups;
    a->sums = sums.data(), a->sums_stride = groups;
  }
};

void check_int8(const Shape& s, bool weight_groups = true) {
  const auto mask = random_mask(s.n, s.k, 1);
  const auto rows = masked<int8_t>(random_bytes(s.n * s.k, 2), mask, 0);
  const auto panels = to_panels_int8(rows, s.n, s.k);
  std::vector<uint8_t> bytes(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) bytes[i] = static_cast<uint8_t>(rows[i] + 128);
  const auto stored = to_sparse<uint8_t>(bytes, mask, s.n, s.k, 512, 128);
  const Activations x(s);
  const auto scales = random_half_panels(s.n, weight_groups ? x.groups : 1);
  LinearInt8Args dense;
  x.give(&dense, s);
  Workspace workspace;
  dense.weight_group = weight_groups ? s.group : 0, dense.activation_group = s.group;
  dense.weight = panels.data(), dense.weight_scales = scales.data(), dense.workspace = &workspace;
  LinearInt8Args sparse = dense;
  sparse.weight = stored.data(), sparse.sparse = true;
  compare(dense, sparse, s, &KernelTable::linear_int8, 5);
  if (!weight_groups || s.group == 0) return;
  const float* one_scale = dense.scales;  // weights alone in groups, whose sums need the workspace as well
  dense.activation_group = sparse.activation_group = 0;
  dense.scales = sparse.scales = one_scale;
  compare(dense, sparse, s, &KernelTable::linear_int8, 5);
}

void check_int4(const Shape& s) {
  const auto mask = random_mask(s.n, s.k, 1);
  const auto rows = masked(random_ints(s.n * s.k, 16, 2), mask, 8);
  std::vector<Half> halves(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) halves[i].bits = static_cast<uint8_t>(rows[i]);
  const auto panels = to_panels_int4(rows, s.n, s.k);
  const auto stored = to_sparse(halves, mask, s.n, s.k, 256, Half{8});
  const Activations x(s);
  const auto scales = random_half_panels(s.n, x.groups);
  LinearInt4Args dense;
  x.give(&dense, s);
  Workspace workspace;
  dense.group = s.group, dense.workspace = &workspace;
  dense.weight = panels.data(), dense.weight_scales = scales.data();
  LinearInt4Args sparse = dense;
  sparse.weight = stored.data(), sparse.sparse = true;
  compare(dense, sparse, s, &KernelTable::linear_int4, 5);
}

// Rows that make one block and several, columns that don't fill a panel, K of one quad, of a part of a block
// and of several.
template <class F>
void shapes(const F& check) {
  for (const int64_t m : {1, 2, 3, 5, 8, 9, 13, 97}) {
    for (const int64_t n : {1, 33, 160}) check(m, n);
  }
}
void f32_equals_dense() {
  shapes([](int64_t m, int64_t n) {
    for (const int64_t k : {4, 36, 64, 132}) check_f32({m, n, k});
  });
  check_f32({30, 330, 2500});
}
void bf16_equals_dense() {
  shapes([](int64_t m, int64_t n) {
    for (const int64_t k : {4, 36, 64, 132}) check_bf16({m, n, k});
  });
  check_bf16({30, 330, 2500});
}
void int8_equals_dense() {
  shapes([](int64_t m, int64_t n) {
    for (const int64_t k : {4, 36, 64, 132}) {
      check_int8({m, n, k, 0});
      check_int8({m, n, k, 32});
      check_int8({m, n, k, 64}, false);
    }
  });
  check_int8({9, 70, 100, 12});
  check_int8({30, 330, 2500, 32});
}
void int4_equals_dense() {
  shapes([](int64_t m, int64_t n) {
    for (const int64_t k : {32, 64, 192}) check_int4({m, n, k, k == 32 ? 32 : 64});
  });
  check_int4({9, 70, 40, 8});
  check_int4({21, 70, 96, 32});  // just more rows than are spread in registers, by any instruction set
  check_int4({30, 330, 2560, 32});
}

// However rows fall into blocks.
void every_number_of_rows() {
  for (int64_t m = 1; m <= 70; ++m) {
    check_f32({m, 33, 36});
    check_bf16({m, 33, 36});
    check_int8({m, 33, 36, m % 2 == 0 ? 0 : 32});
    check_int4({m, 33, 64, 32});
  }
}

// A damaged file's places are any 4 bits: all of them stay within the row, whose end is the end of its
// memory.
void any_places_stay_inside() {
  const int64_t n = 40, k = 36;
  for (const int value : {0x00, 0xff, 0x55, 0x1b, 0xe4}) {
    const std::vector<uint8_t> stored(2 * 2 * (128 + 2048), static_cast<uint8_t>(value));
    for (const int64_t m : {1, 20}) {
      const std::vector<float> x = random_floats(m * k, 1);
      const std::vector<uint16_t> narrow(static_cast<size_t>(m * k), 0x3f80);
      const std::vector<uint16_t> scales(64 * 5, 0x3c00);
      const Shape shape{m, n, k, 0};
      const Activations integers(shape);
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        std::vector<float> y = filled(m * n, 0);
        LinearArgs wide{.m = m, .n = n, .k = k, .x = x.data(), .x_stride = k};
        wide.weight = reinterpret_cast<const float*>(stored.data());
        wide.y = y.data(), wide.y_stride = n, wide.sparse = true;
        kernels.linear(wide, pool);
        LinearBf16Args half{.m = m, .n = n, .k = k, .x = narrow.data(), .x_stride = k};
        half.weight = reinterpret_cast<const uint16_t*>(stored.data());
        half.y = y.data(), half.y_stride = n, half.sparse = true;
        kernels.linear_bf16(half, pool);
        Workspace workspace;
        LinearInt8Args bytes;
        integers.give(&bytes, shape);
        bytes.weight = stored.data(), bytes.weight_scales = scales.data(), bytes.workspace = &workspace;
        bytes.y = y.data(), bytes.y_stride = n, bytes.sparse = true;
        kernels.linear_int8(bytes, pool);
        CHECK(std::isfinite(y[0])) << what;
      });
    }
  }
}

}  // namespace

int main() {
  RUN(f32_equals_dense);
  RUN(bf16_equals_dense);
  RUN(int8_equals_dense);
  RUN(int4_equals_dense);
  RUN(every_number_of_rows);
  RUN(any_places_stay_inside);
  return check::result();
}
