// The errors that vector_math.h promises, over a dense sweep of the arguments, and what happens at the edges.
#include "test_kernels.h"

using namespace ew;
using namespace ew::testing;

namespace {

using Fn = ElementwiseFn;

std::vector<float> evaluate(const KernelTable& kernels, Fn fn, std::vector<float> x) {
  ThreadPool pool(1);
  std::vector<float> out = filled(static_cast<int64_t>(x.size()), 0);
  ElementwiseArgs a;
  a.fn = fn;
  a.shape[3] = static_cast<int64_t>(x.size());
  a.in[0] = {x.data(), {0, 0, 0, 1}};
  a.out = {out.data(), {0, 0, 0, 1}};
  kernels.elementwise(a, pool);
  return out;
}

std::vector<float> sweep(float low, float high, int count) {
  std::vector<float> x;
  for (int i = 0; i <= count; ++i) {
    x.push_back(low + (high - low) * static_cast<float>(i) / static_cast<float>(count));
  }
  return x;
}

// The largest error over the sweep against double, in units of absolute + relative |f(x)|.
double error(const KernelTable& kernels, Fn fn, float low, float high, double absolute, double relative) {
  const std::vector<float> x = sweep(low, high, 200000), y = evaluate(kernels, fn, x);
  double most = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = reference::apply(fn, x[i], 0, 0);
    most = std::max(most, std::fabs(y[i] - expected) / (absolute + relative * std::fabs(expected)));
  }
  return most;
}

void accuracy() {
  struct Case {
    Fn fn;
    float low, high;
    double absolute, relative;  // what is promised with fma; portable has twice as much
  };
  // kEps is one to two ulp. Functions near a zero that they reach by cancellation have an absolute bound.
  const Case cases[] = {
      {Fn::exp, -87, 88.7f, 0, kEps},         {Fn::exp, -1, 1, 0, kEps},
      {Fn::exp, -104, -87, 2e-45, kEps},  // subnormal results: the last place is 1.4e-45
      {Fn::tanh, -12, 12, 0, 1.5 * kEps},     {Fn::tanh, -1, 1, 0, 1.5 * kEps},
      {Fn::tanh, -1e-3f, 1e-3f, 0, kEps},     {Fn::erf, -5, 5, 1.5e-7, 0},
      {Fn::erf, -1e-2f, 1e-2f, 0, 2 * kEps},  {Fn::sigmoid, -80, 30, 0, 2 * kEps},
      {Fn::silu, -80, 30, 0, 3 * kEps},       {Fn::gelu, -6, 6, 4e-7, 2 * kEps},
      {Fn::gelu_tanh, -6, 6, 4e-7, 2 * kEps}, {Fn::sqrt, 0, 1e6f, 0, kEps / 2},
      {Fn::rsqrt, 1e-6f, 1e4f, 0, kEps},      {Fn::log, 1e-6f, 1e4f, 1e-9, kEps},
      {Fn::sin, -200, 200, 1e-9, kEps},       {Fn::cos, -200, 200, 1e-9, kEps},
  };
  for (const std::string& isa : available_isas()) {
    const double allowed = isa == "portable" ? 2 : 1;
    for (const Case& c : cases) {
      const double found = error(*kernels_for(isa.c_str()), c.fn, c.low, c.high, c.absolute, c.relative);
      CHECK(found <= allowed) << isa << " fn " << static_cast<int>(c.fn) << " on [" << c.low << ", " << c.high
                              << "]: " << found << " of the bound";
    }
  }
}

void edges() {
  for (const std::string& isa : available_isas()) {
    const KernelTable& kernels = *kernels_for(isa.c_str());
    const auto at = [&](Fn fn, float x) { return evaluate(kernels, fn, {x})[0]; };
    CHECK(at(Fn::exp, 0) == 1 && at(Fn::exp, -0.0f) == 1) << isa;
    CHECK(at(Fn::exp, -kInf) == 0 && at(Fn::exp, -110) == 0 && at(Fn::exp, -1e30f) == 0) << isa;
    CHECK(at(Fn::exp, kInf) == kInf && at(Fn::exp, 89) == kInf && std::isfinite(at(Fn::exp, 88.72f))) << isa;
    CHECK(at(Fn::tanh, kInf) == 1 && at(Fn::tanh, -kInf) == -1 && at(Fn::tanh, 0) == 0) << isa;
    CHECK(at(Fn::erf, kInf) == 1 && at(Fn::erf, -kInf) == -1 && at(Fn::erf, 0) == 0) << isa;
    CHECK(at(Fn::sigmoid, -kInf) == 0 && at(Fn::sigmoid, kInf) == 1 && at(Fn::sigmoid, 0) == 0.5f) << isa;
    CHECK(at(Fn::silu, kInf) == kInf && at(Fn::silu, -200) == 0) << isa;
    for (const float x : {20.0f, 1e5f, 1e30f, kInf}) {
      CHECK(at(Fn::gelu, x) == x && at(Fn::gelu, -x) == 0) << isa << " " << x;
    }
    CHECK(at(Fn::relu, -3) == 0 && at(Fn::relu, 3) == 3) << isa;
    CHECK(std::signbit(at(Fn::neg, 0)) && !std::signbit(at(Fn::neg, -0.0f))) << isa;
    for (const Fn fn : {Fn::exp, Fn::tanh, Fn::erf, Fn::sigmoid, Fn::silu, Fn::gelu, Fn::gelu_tanh, Fn::relu,
                        Fn::abs, Fn::neg, Fn::sqrt, Fn::rsqrt, Fn::log, Fn::sin, Fn::cos}) {
      CHECK(std::isnan(at(fn, kNaN))) << isa << " fn " << static_cast<int>(fn);
    }
  }
}

// With one fused multiply-add the two x86 variants compute the same bits.
void avx512_equals_avx2() {
  if (kernels_for("avx512") == nullptr) return;
  for (const Fn fn : {Fn::exp, Fn::tanh, Fn::erf, Fn::silu, Fn::gelu, Fn::gelu_tanh}) {
    const auto x = sweep(-20, 20, 50001);
    CHECK(same_bits(evaluate(*kernels_for("avx512"), fn, x), evaluate(*kernels_for("avx2"), fn, x)))
        << static_cast<int>(fn);
  }
}

}  // namespace

int main() {
  RUN(accuracy);
  RUN(edges);
  RUN(avx512_equals_avx2);
  return check::result();
}
