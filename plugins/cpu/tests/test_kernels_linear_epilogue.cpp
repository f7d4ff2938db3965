// Activation and residual in a linear's store: the bits of the linear, the elementwise function and the sum
// one after the other, in every format.
#include <array>

#include "test_kernels.h"

using namespace ew;
using namespace ew::testing;

namespace {

struct Kind {
  LinearActivation kind;
  std::vector<ElementwiseFn> functions;  // one after the other
};
const std::vector<Kind> kKinds = {
    {LinearActivation::none, {}},
    {LinearActivation::silu, {ElementwiseFn::silu}},
    {LinearActivation::gelu, {ElementwiseFn::gelu}},
    {LinearActivation::gelu_tanh, {ElementwiseFn::gelu_tanh}},
    {LinearActivation::relu, {ElementwiseFn::relu}},
    {LinearActivation::relu2, {ElementwiseFn::relu, ElementwiseFn::pow}},
    {LinearActivation::sigmoid, {ElementwiseFn::sigmoid}},
    {LinearActivation::tanh, {ElementwiseFn::tanh}},
};

// The factors of a linear in every format. K is a multiple of 8.
struct Factors {
  int64_t m, n, k;
  std::vector<float> x, weight, bias;
  std::vector<uint16_t> narrow_x, narrow_weight, half_scales;
  std::vector<int8_t> values;
  std::vector<uint8_t> bytes;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  Factors(int64_t rows, int64_t columns, int64_t depth) : m(rows), n(columns), k(depth) {
    const float spread = 1 / std::sqrt(static_cast<float>(k));
    x = random_floats(m * k, 1), bias = random_floats(n, 3);
    const auto plain = random_floats(n * k, 2, spread);
    weight = to_panels(plain, n, k);
    for (const float v : x) narrow_x.push_back(reference::to_bf16(v));
    std::vector<uint16_t> narrow;
    for (const float v : plain) narrow.push_back(reference::to_bf16(v));
    narrow_weight = to_packed_panels<uint16_t>(narrow, n, k, 2, 0);
    values = random_activations(m * k, 5);
    bytes = to_panels_int8(random_bytes(n * k, 6), n, k);
    half_scales = random_half_panels(n, 1);
    scales = filled(m, 1e-4f);
    for (int64_t row = 0; row < m; ++row) {
      int32_t sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += values[static_cast<size_t>(row * k + i)];
      sums.push_back(sum);
    }
  }
  LinearArgs f32() const {
    LinearArgs a;
    a.m = m, a.n = n, a.k = k, a.x = x.data(), a.x_stride = k, a.weight = weight.data(), a.bias = bias.data();
    return a;
  }
  LinearBf16Args bf16() const {
    LinearBf16Args a;
    a.m = m, a.n = n, a.k = k, a.x = narrow_x.data(), a.x_stride = k;
    a.weight = narrow_weight.data(), a.bias = bias.data();
    return a;
  }
  LinearInt8Args int8() const {
    LinearInt8Args a;
    a.m = m, a.n = n, a.k = k, a.values = values.data(), a.values_stride = k;
    a.scales = scales.data(), a.scales_stride = 1, a.sums = sums.data(), a.sums_stride = 1;
    a.weight = bytes.data(), a.weight_scales = half_scales.data(), a.bias = bias.data();
    return a;
  }
  LinearInt4Args int4() const {  // any bytes are weights
    LinearInt4Args a;
    a.m = m, a.n = n, a.k = k, a.group = k, a.values = values.data(), a.values_stride = k;
    a.scales = scales.data(), a.scales_stride = 1, a.sums = sums.data(), a.sums_stride = 1;
    a.weight = bytes.data(), a.weight_scales = half_scales.data(), a.bias = bias.data();
    return a;
  }
};

std::vector<float> by_itself(const KernelTable& kernels, ThreadPool& pool, ElementwiseFn fn,
                             std::vector<float> x, const float* with) {
  ElementwiseArgs a;
  a.fn = fn, a.shape[3] = static_cast<int64_t>(x.size());
  a.in[0] = a.out = View{x.data(), {0, 0, 0, 1}};
  if (fn == ElementwiseFn::pow) a.has_scalar = true, a.scalar = 2;
  if (with != nullptr) a.in[1] = View{const_cast<float*>(with), {0, 0, 0, 1}};
  kernels.elementwise(a, pool);
  return x;
}

template <class Args>
void check_store(const KernelTable& kernels, ThreadPool& pool, const std::string& what, Args a,
                 void (*linear)(const Args&, Workers&)) {
  const int64_t gap = 3;
  const auto residual = random_floats(a.m * a.n, 9);
  std::vector<float> plain(residual.size());
  a.y = plain.data(), a.y_stride = a.n;
  linear(a, pool);
  for (const Kind& kind : kKinds) {
    std::vector<float> activated = plain;
    for (const ElementwiseFn fn : kind.functions) {
      activated = by_itself(kernels, pool, fn, activated, nullptr);
    }
    const auto summed = by_itself(kernels, pool, ElementwiseFn::add, activated, residual.data());
    a.epilogue = {.activation = kind.kind};
    std::vector<float> y(plain.size());
    a.y = y.data(), a.y_stride = a.n;
    linear(a, pool);
    CHECK(same_bits(y, activated)) << what;

    // From another buffer, both with gaps between the rows, which stay as they are.
    std::vector<float> wide = filled(a.m * (a.n + gap), -7), from(wide.size());
    for (int64_t m = 0; m < a.m; ++m) {
      std::copy_n(residual.data() + m * a.n, a.n, from.data() + m * (a.n + gap));
    }
    a.epilogue = {.activation = kind.kind, .residual = from.data(), .residual_stride = a.n + gap};
    a.y = wide.data(), a.y_stride = a.n + gap;
    linear(a, pool);
    for (int64_t m = 0; m < a.m; ++m) {
      CHECK(std::equal(wide.begin() + m * (a.n + gap), wide.begin() + m * (a.n + gap) + a.n,
                       summed.begin() + m * a.n))
          << what << " row " << m;
      CHECK(wide[static_cast<size_t>(m * (a.n + gap) + a.n)] == -7) << what << " gap " << m;
    }

    std::vector<float> place = residual;  // in place
    a.epilogue = {.activation = kind.kind, .residual = place.data(), .residual_stride = a.n};
    a.y = place.data(), a.y_stride = a.n;
    linear(a, pool);
    CHECK(same_bits(place, summed)) << what << " in place";
  }
}

// A token alone, blocks of rows, and K in tiles (f32, beyond 1024); columns that end within a panel, and
// panels enough for several sweeps.
void equals_one_after_the_other() {
  for (const auto& [m, n, k] :
       {std::array<int64_t, 3>{1, 70, 64}, {13, 33, 64}, {30, 96, 1504}, {9, 290, 40}}) {
    const Factors f(m, n, k);
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const std::string where = what + " m=" + std::to_string(m);
      check_store(kernels, pool, where + " f32", f.f32(), kernels.linear);
      check_store(kernels, pool, where + " bf16", f.bf16(), kernels.linear_bf16);
      check_store(kernels, pool, where + " int8", f.int8(), kernels.linear_int8);
      check_store(kernels, pool, where + " int4", f.int4(), kernels.linear_int4);
    });
  }
}

// Against the scalar reference, whose activations are in double.
void equals_reference() {
  const Factors f(7, 45, 24);
  const auto residual = random_floats(7 * 45, 9);
  for (const Kind& kind : kKinds) {
    LinearArgs a = f.f32();
    a.epilogue = {.activation = kind.kind, .residual = residual.data(), .residual_stride = 45};
    std::vector<float> expected(residual.size());
    a.y = expected.data(), a.y_stride = 45;
    reference::linear(a, true);
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      std::vector<float> y(residual.size());
      a.y = y.data();
      kernels.linear(a, pool);
      // Activations are within some ulp of a number of the order of 1; portable rounds products too.
      CHECK(worst(y, expected, 16 * kEps, 16 * kEps) <= 1) << what;
    });
  }
}

// Experts' linears have activations too.
void grouped() {
  const Factors f(9, 64, 32);
  const std::vector<int32_t> starts = {0, 4, 9};
  std::vector<float> twice = f.weight;  // one weight for both experts, so that all rows make one linear
  twice.insert(twice.end(), f.weight.begin(), f.weight.end());
  Grouped<LinearArgs> g{.all = f.f32(), .experts = 2, .starts = starts.data(), .weight_stride = 2 * 32 * 32};
  g.all.weight = twice.data(), g.all.y_stride = 64;
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    LinearArgs a = f.f32();
    std::vector<float> y(9 * 64), expected(9 * 64);
    a.epilogue.activation = g.all.epilogue.activation = LinearActivation::gelu;
    a.y = expected.data(), a.y_stride = 64, g.all.y = y.data();
    kernels.linear(a, pool);
    kernels.grouped_linear(g, pool);
    CHECK(same_bits(y, expected)) << what;
  });
}

}  // namespace

int main() {
  RUN(equals_one_after_the_other);
  RUN(equals_reference);
  RUN(grouped);
  return check::result();
}
