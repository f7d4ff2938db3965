// The kernels of AMX's tiles: linears of integers have the bits of avx512_vnni, and p.v of attention has the
// order that docs/inside/numerics.md says.
#include "attention_scene.h"

using namespace ew;
using namespace ew::testing;

namespace {

struct Shape {
  int64_t m, n, k, weight_group, activation_group;
};

std::string describe(const Shape& s) {
  return " m=" + std::to_string(s.m) + " n=" + std::to_string(s.n) + " k=" + std::to_string(s.k) +
         " groups " + std::to_string(s.weight_group) + "/" + std::to_string(s.activation_group);
}

// What linears of integers share: activations, and results with gaps between rows.
struct Operands {
  int64_t groups, padded;
  std::vector<int8_t> values;
  std::vector<float> scales, bias, residual;
  std::vector<int32_t> sums;

  explicit Operands(const Shape& s)
      : groups(s.activation_group > 0 ? (s.k + s.activation_group - 1) / s.activation_group : 1),
        padded((s.k + 3) / 4 * 4),
        values(random_activations(s.m * padded, 1)),
        scales(random_floats(s.m * groups, 2)),
        bias(random_floats(s.n, 5)),
        residual(random_floats(s.m * s.n, 6)),
        sums(static_cast<size_t>(s.m * groups)) {
    for (int64_t m = 0; m < s.m; ++m) {
      for (int64_t k = s.k; k < padded; ++k) values[static_cast<size_t>(m * padded + k)] = 0;
      for (int64_t k = 0; k < s.k; ++k) {
        const int64_t g = s.activation_group > 0 ? k / s.activation_group : 0;
        sums[static_cast<size_t>(m * groups + g)] += values[static_cast<size_t>(m * padded + k)];
      }
    }
  }
  template <class Args>
  void give(const Shape& s, Args& a) const {
    a.m = s.m, a.n = s.n, a.k = s.k;
    a.values = values.data(), a.values_stride = padded;
    a.scales = scales.data(), a.scales_stride = groups;
    a.sums = sums.data(), a.sums_stride = groups;
    a.bias = bias.data();
    a.epilogue = {LinearActivation::silu, residual.data(), s.n};
    a.y_stride = s.n + 3;
  }
};

template <class Args, class Kernel>
void equals_vnni(const Shape& s, Args& a, Kernel kernel, const char* what) {
  Workspace workspace;
  a.workspace = &workspace;
  const auto run = [&](const char* isa, int threads) {
    ThreadPool pool(threads);
    std::vector<float> y = filled(s.m * (s.n + 3), -7);
    a.y = y.data();
    (kernels_for(isa)->*kernel)(a, pool);
    return y;
  };
  const auto expected = run("avx512_vnni", 1);
  for (const int threads : {1, 3})
    CHECK(same_bits(run("avx512_amx", threads), expected)) << what << describe(s) << " threads " << threads;
}

void check_int8(const Shape& s) {
  const Operands operands(s);
  const auto weight = to_panels_int8(random_bytes(s.n * s.k, 3), s.n, s.k);
  const auto weight_scales =
      random_half_panels(s.n, s.weight_group > 0 ? (s.k + s.weight_group - 1) / s.weight_group : 1);
  LinearInt8Args a;
  operands.give(s, a);
  a.weight_group = s.weight_group, a.activation_group = s.activation_group;
  a.weight = weight.data(), a.weight_scales = weight_scales.data();
  equals_vnni(s, a, &KernelTable::linear_int8, "int8");
}

void check_int4(const Shape& s, bool offsets) {
  const Operands operands(s);
  const auto weight = to_panels_int4(random_ints(s.n * s.k, 16, 3), s.n, s.k);
  const auto scales = random_half_panels(s.n, s.k / s.weight_group);
  const auto shifts = random_half_panels(s.n, s.k / s.weight_group, 8);
  LinearInt4Args a;
  operands.give(s, a);
  a.group = s.weight_group;
  a.weight = weight.data(), a.weight_scales = scales.data();
  a.weight_offsets = offsets ? shifts.data() : nullptr;
  equals_vnni(s, a, &KernelTable::linear_int4, offsets ? "int4 with offsets" : "int4");
}

// Rows that fill tiles and that don't, one batch and several, columns that end within a panel, chunks of K of
// which the last is short or none is.
void int8_has_the_bits_of_vnni() {
  for (const int64_t m : {16, 31, 32, 33, 47, 48, 54, 190, 193, 400}) {
    for (const int64_t n : {1, 33, 160}) {
      for (const int64_t k : {32, 160, 608}) check_int8({m, n, k, 32, 32});
    }
  }
  for (const int64_t m : {32, 47, 64}) {
    for (const int64_t group : {32, 44, 64, 96, 128, 100, 1000}) {
      check_int8({m, 70, 8 * group, group, group});
      check_int8({m, 70, 3 * group + 8, group, group});  // the last group is short
      check_int8({m, 70, 3 * group, group, 0});
      check_int8({m, 70, 3 * group, 0, group});
    }
    for (const int64_t k : {30, 62, 64, 576, 1536, 4096, 4160}) check_int8({m, 70, k, 0, 0});
  }
  check_int8({192, 300, 2048, 32, 32});
  check_int8({40, 40, 16384, 32, 32});  // so many scales that fewer rows share a batch
}

void int4_has_the_bits_of_vnni() {
  for (const bool offsets : {false, true}) {
    for (const int64_t m : {16, 31, 32, 33, 47, 54, 190, 193, 400}) {
      for (const int64_t n : {1, 33, 160}) {
        for (const int64_t k : {32, 160, 608}) check_int4({m, n, k, 32, 32}, offsets);
      }
    }
    for (const int64_t m : {32, 47, 64}) {
      for (const int64_t group : {32, 64, 128, 40, 576})
        check_int4({m, 70, 3 * group, group, group}, offsets);
    }
    check_int4({192, 300, 2048, 32, 32}, offsets);
  }
}

// Any part of a batch, whichever kernel takes it.
void rows_do_not_depend_on_their_number() {
  const Shape s{130, 96, 320, 32, 32};
  const Operands operands(s);
  const auto weight = to_panels_int8(random_bytes(s.n * s.k, 3), s.n, s.k);
  const auto weight_scales = random_half_panels(s.n, s.k / 32);
  ThreadPool pool(2);
  LinearInt8Args a;
  operands.give(s, a);
  a.weight_group = a.activation_group = 32;
  a.weight = weight.data(), a.weight_scales = weight_scales.data();
  std::vector<float> all = filled(s.m * a.y_stride, -7);
  a.y = all.data();
  kernels_for("avx512_amx")->linear_int8(a, pool);
  for (const int64_t rows : {1, 7, 16, 33, 64}) {
    for (int64_t first = 0; first + rows <= s.m; first += 29) {
      LinearInt8Args part = a;
      std::vector<float> some = filled(rows * a.y_stride, -7);
      part.m = rows, part.y = some.data();
      part.values += first * a.values_stride, part.scales += first * a.scales_stride;
      part.sums += first * a.sums_stride, part.epilogue.residual += first * s.n;
      kernels_for("avx512_amx")->linear_int8(part, pool);
      CHECK(std::memcmp(some.data(), all.data() + first * a.y_stride, some.size() * sizeof(float)) == 0)
          << rows << " rows from " << first;
    }
  }
}

// Of a query of zeros all weights are 1, so that what is left is the order in which values are added up: of a
// block those of even slots and those of odd ones, then blocks, then steps of 128.
void values_are_added_in_the_order_of_tiles() {
  const int64_t tokens = 300, heads = 3, width = 80;
  Scene scene({.heads = heads, .kv_heads = 1, .key_size = 80, .value_size = width, .format = KvFormat::bf16},
              {0}, {tokens});
  const std::vector<float> zeros = filled(tokens * heads * 80, 0);
  ThreadPool pool(1);
  const auto out = scene.run([&](PagedAttentionArgs a) {
    a.q.data = zeros.data();
    kernels_for("avx512_amx")->paged_attention(a, pool);
  });
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t d = 0; d < width; ++d) {
      float sum = 0;
      for (int64_t step = 0; step <= t; step += 128) {
        float of_step = 0;
        for (int64_t block = step; block < step + 128 && block <= t; block += kBlock) {
          float half[2] = {0, 0};
          for (int64_t slot = 0; slot < kBlock && block + slot <= t; ++slot)
            half[slot % 2] += static_cast<float>(scene.value(0, block + slot, 0, d));
          of_step += half[0] + half[1];
        }
        sum += of_step;
      }
      const float expected = sum * (1.0f / static_cast<float>(t + 1));
      for (int64_t h = 0; h < heads; ++h) {
        const float found = out[static_cast<size_t>((t * heads + h) * width + d)];
        CHECK(std::memcmp(&found, &expected, sizeof found) == 0)
            << "token " << t << " channel " << d << ": " << found << ", not " << expected;
      }
    }
  }
}

}  // namespace

int main() {
  if (kernels_for("avx512_amx") == nullptr) {
    std::printf("skipped: no AMX here, or Linux doesn't give it to this process\n");
    return 0;
  }
  RUN(int8_has_the_bits_of_vnni);
  RUN(int4_has_the_bits_of_vnni);
  RUN(rows_do_not_depend_on_their_number);
  RUN(values_are_added_in_the_order_of_tiles);
  return check::result();
}
