#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace ew::reference {
namespace {

template <class T>
T* row(const Rows<T>& rows, int64_t i, int64_t j) {
  return rows.data + i * rows.stride0 + j * rows.stride1;
}

float weight_or(const float* weight, int64_t i, float otherwise) {
  return weight != nullptr ? weight[i] : otherwise;
}

// Calls fn(index[4]) for every index of a shape.
template <class F>
void for_index(const int64_t (&shape)[kMaxRank], const F& fn) {
  int64_t at[kMaxRank];
  for (at[0] = 0; at[0] < shape[0]; ++at[0]) {
    for (at[1] = 0; at[1] < shape[1]; ++at[1]) {
      for (at[2] = 0; at[2] < shape[2]; ++at[2]) {
        for (at[3] = 0; at[3] < shape[3]; ++at[3]) fn(at);
      }
    }
  }
}

template <class T>
T& element(const View& view, const int64_t (&at)[kMaxRank]) {
  int64_t offset = 0;
  for (int d = 0; d < kMaxRank; ++d) offset += at[d] * view.stride[d];
  return static_cast<T*>(view.data)[offset];
}

// The sum into sum, if wanted; then `one` on each row, as doubles.
template <class F>
void for_norm_rows(const NormArgs& a, const F& one) {
  for (int64_t i = 0; i < a.outer; ++i) {
    for (int64_t j = 0; j < a.inner; ++j) {
      std::vector<double> x(static_cast<size_t>(a.size));
      for (int64_t c = 0; c < a.size; ++c) {
        float value = row(a.x, i, j)[c];
        if (a.sum.data != nullptr) value = row(a.sum, i, j)[c] = value + row(a.residual, i, j)[c];
        x[static_cast<size_t>(c)] = value;
      }
      one(x, row(a.normed, i, j));
    }
  }
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

int32_t apply_integer(ElementwiseFn fn, int32_t x, int32_t y) {
  const int64_t a = x, b = y;
  switch (fn) {
    case ElementwiseFn::add:
      return static_cast<int32_t>(a + b);
    case ElementwiseFn::sub:
      return static_cast<int32_t>(a - b);
    case ElementwiseFn::mul:
      return static_cast<int32_t>(a * b);
    case ElementwiseFn::maximum:
      return std::max(x, y);
    default:
      return std::min(x, y);
  }
}

}  // namespace

// Exact.
void embedding(const EmbeddingArgs& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t i = 0; i < a.hidden; ++i) {
      const int64_t id = a.ids[t];
      const int64_t at = a.layout == WeightLayout::rows ? id * a.hidden + i
                                                        : (id / kPanel * a.hidden + i) * kPanel + id % kPanel;
      a.out[t * a.out_stride + i] = a.weight[at];
    }
  }
}

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

// In double.
void rms_norm(const NormArgs& a) {
  for_norm_rows(a, [&](const std::vector<double>& x, float* y) {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double factor = 1 / std::sqrt(squares / static_cast<double>(a.size) + a.eps);
    for (int64_t c = 0; c < a.size; ++c) {
      y[c] = static_cast<float>(x[static_cast<size_t>(c)] * factor * weight_or(a.weight, c, 1));
    }
  });
}

// In double.
void layer_norm(const NormArgs& a) {
  for_norm_rows(a, [&](const std::vector<double>& x, float* y) {
    const double count = static_cast<double>(a.size);
    double mean = 0, squares = 0;
    for (const double v : x) mean += v / count;
    for (const double v : x) squares += (v - mean) * (v - mean);
    const double factor = 1 / std::sqrt(squares / count + a.eps);
    for (int64_t c = 0; c < a.size; ++c) {
      y[c] = static_cast<float>((x[static_cast<size_t>(c)] - mean) * factor * weight_or(a.weight, c, 1) +
                                weight_or(a.bias, c, 0));
    }
  });
}

// The angle is a float product; the rest in double.
void rope_table(const RopeTableArgs& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t f = 0; f < a.freqs; ++f) {
      const float angle = static_cast<float>(a.positions[t]) * a.inv_freq[f];
      float* out = a.out + t * a.out_stride;
      out[f] = static_cast<float>(std::cos(static_cast<double>(angle)) * a.scale);
      out[a.freqs + f] = static_cast<float>(std::sin(static_cast<double>(angle)) * a.scale);
    }
  }
}

// In double.
void rope(const RopeArgs& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float* table = a.table + t * a.table_stride;
    for (int64_t h = 0; h < a.heads; ++h) {
      const float* x = row(a.x, t, h);
      float* out = row(a.out, t, h);
      for (int64_t i = 0; i < a.freqs; ++i) {
        const int64_t p = a.interleaved ? 2 * i : i, q = a.interleaved ? 2 * i + 1 : i + a.freqs;
        const double c = table[i], s = table[a.freqs + i], first = x[p], second = x[q];
        out[p] = static_cast<float>(first * c - second * s);
        out[q] = static_cast<float>(second * c + first * s);
      }
      for (int64_t i = 2 * a.freqs; i < a.size; ++i) out[i] = x[i];
    }
  }
}

// In double.
void gated_activation(const GatedActivationArgs& a) {
  for (int64_t i = 0; i < a.outer; ++i) {
    for (int64_t j = 0; j < a.inner; ++j) {
      const float *gate = row(a.gate, i, j), *up = row(a.up, i, j);
      for (int64_t c = 0; c < a.size; ++c) {
        row(a.out, i, j)[c] = static_cast<float>(activate(a.kind, gate[c]) * up[c]);
      }
    }
  }
}

// Exact.
void take_rows(const TakeRowsArgs& a) {
  for (int64_t r = 0; r < a.count; ++r) {
    for (int64_t j = 0; j < a.inner; ++j) std::copy_n(row(a.x, a.rows[r], j), a.size, row(a.out, r, j));
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

// In double, or exact for integers.
void elementwise(const ElementwiseArgs& a) {
  for_index(a.shape, [&](const int64_t (&at)[kMaxRank]) {
    if (a.fn == ElementwiseFn::cast) {
      element<float>(a.out, at) = static_cast<float>(element<int32_t>(a.in[0], at));
      return;
    }
    const auto operand = [&](int i) {
      if (a.has_scalar && i < 2 && (i == 0) == a.scalar_first)
        return a.integer ? a.scalar : static_cast<float>(a.scalar);
      const View& view = a.in[a.has_scalar ? 0 : i];
      if (view.data == nullptr) return 0.0;
      return a.integer ? static_cast<double>(element<int32_t>(view, at)) : element<float>(view, at);
    };
    const bool compares = ElementwiseFn::lt <= a.fn && a.fn <= ElementwiseFn::ne;
    if (a.integer && !compares) {
      element<int32_t>(a.out, at) =
          apply_integer(a.fn, static_cast<int32_t>(operand(0)), static_cast<int32_t>(operand(1)));
    } else {
      element<float>(a.out, at) = static_cast<float>(apply(a.fn, operand(0), operand(1), operand(2)));
    }
  });
}

// Exact.
void copy(const CopyArgs& a) {
  for_index(a.shape,
            [&](const int64_t (&at)[kMaxRank]) { element<int32_t>(a.out, at) = element<int32_t>(a.in, at); });
}

// In double.
void reduce(const ReduceArgs& a) {
  const int64_t rows[kMaxRank] = {a.shape[0], a.shape[1], a.shape[2], 1};
  for_index(rows, [&](const int64_t (&at)[kMaxRank]) {
    const float* x = &element<float>(a.in, at);
    double sum = 0, best = x[0];
    for (int64_t c = 0; c < a.shape[3]; ++c) {
      sum += x[c];
      best = best != best || x[c] != x[c] ? std::numeric_limits<double>::quiet_NaN()
                                          : std::max<double>(best, x[c]);
    }
    if (a.kind == ReduceKind::mean) sum /= static_cast<double>(a.shape[3]);
    element<float>(a.out, at) = static_cast<float>(a.kind == ReduceKind::max ? best : sum);
  });
}

}  // namespace ew::reference
