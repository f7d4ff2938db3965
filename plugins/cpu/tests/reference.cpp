#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace ew::reference {
float end_of(const Epilogue& epilogue, int64_t m, int64_t n, float sum) {
  const auto activated = [sum](LinearActivation kind) {
    switch (kind) {
      case LinearActivation::none:
        return static_cast<double>(sum);
      case LinearActivation::silu:
        return apply(ElementwiseFn::silu, sum, 0, 0);
      case LinearActivation::gelu:
        return apply(ElementwiseFn::gelu, sum, 0, 0);
      case LinearActivation::gelu_tanh:
        return apply(ElementwiseFn::gelu_tanh, sum, 0, 0);
      case LinearActivation::relu:
        return apply(ElementwiseFn::relu, sum, 0, 0);
      case LinearActivation::relu2:
        return std::pow(apply(ElementwiseFn::relu, sum, 0, 0), 2);
      case LinearActivation::sigmoid:
        return apply(ElementwiseFn::sigmoid, sum, 0, 0);
      case LinearActivation::tanh:
        return apply(ElementwiseFn::tanh, sum, 0, 0);
    }
    return 0.0;
  };
  const float y = static_cast<float>(activated(epilogue.activation));
  return epilogue.residual != nullptr ? y + epilogue.residual[m * epilogue.residual_stride + n] : y;
}

void linear(const LinearArgs& a, bool fused) {
  for (int64_t m = 0; m < a.m; ++m) {
    for (int64_t n = 0; n < a.n; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < a.k; ++k) {
        const float x = a.x[m * a.x_stride + k], w = a.weight[(n / kPanel * a.k + k) * kPanel + n % kPanel];
        sum = fused ? std::fma(x, w, sum) : x * w + sum;
      }
      a.y[m * a.y_stride + n] = end_of(a.epilogue, m, n, a.bias != nullptr ? sum + a.bias[n] : sum);
    }
  }
}

double apply(ElementwiseFn fn, double x, double y, double z) {
  using Fn = ElementwiseFn;
  const double pi = std::acos(-1.0);
  switch (fn) {
    case Fn::add:
      return x + y;
    case Fn::sub:
      return x - y;
    case Fn::mul:
      return x * y;
    case Fn::div:
      return x / y;
    case Fn::pow:
      return std::pow(x, y);
    case Fn::maximum:
      return x != x || y != y ? x + y : std::max(x, y);
    case Fn::minimum:
      return x != x || y != y ? x + y : std::min(x, y);
    case Fn::lt:
      return x < y;
    case Fn::le:
      return x <= y;
    case Fn::gt:
      return x > y;
    case Fn::ge:
      return x >= y;
    case Fn::eq:
      return x == y;
    case Fn::ne:
      return x != y;
    case Fn::logical_and:
      return x != 0 && y != 0;
    case Fn::logical_or:
      return x != 0 || y != 0;
    case Fn::logical_not:
      return x == 0;
    case Fn::floor:
      return std::floor(x);
    case Fn::round:
      return std::nearbyint(x);
    case Fn::neg:
      return -x;
    case Fn::abs:
      return std::fabs(x);
    case Fn::exp:
      return std::exp(x);
    case Fn::log:
      return std::log(x);
    case Fn::sqrt:
      return std::sqrt(x);
    case Fn::rsqrt:
      return 1 / std::sqrt(x);
    case Fn::tanh:
      return std::tanh(x);
    case Fn::sigmoid:
      return 1 / (1 + std::exp(-x));
    case Fn::silu:
      return x / (1 + std::exp(-x));
    case Fn::gelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Fn::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / pi) * (x + 0.044715 * x * x * x)));
    case Fn::relu:
      return x != x ? x : std::max(x, 0.0);
    case Fn::sin:
      return std::sin(x);
    case Fn::cos:
      return std::cos(x);
    case Fn::erf:
      return std::erf(x);
    case Fn::where:
      return x != 0 ? y : z;
    case Fn::cast:
      return x;
  }
  return 0;
}

double activate(Activation kind, double x) {
  switch (kind) {
    case Activation::silu:
      return apply(ElementwiseFn::silu, x, 0, 0);
    case Activation::gelu:
      return apply(ElementwiseFn::gelu, x, 0, 0);
    case Activation::gelu_tanh:
      return apply(ElementwiseFn::gelu_tanh, x, 0, 0);
    case Activation::relu:
      return apply(ElementwiseFn::relu, x, 0, 0);
    case Activation::sigmoid:
      return apply(ElementwiseFn::sigmoid, x, 0, 0);
  }
  return 0;
}

}  // namespace ew::reference
