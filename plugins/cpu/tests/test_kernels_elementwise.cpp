// elementwise, copy and reduce over strided views.
#include "test_kernels.h"

namespace ew::reference {
namespace {

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

}  // namespace
}  // namespace ew::reference

using namespace ew;
using namespace ew::testing;

namespace {

using Fn = ElementwiseFn;

struct Shape {
  int64_t size[kMaxRank];
  int64_t in[2][kMaxRank], out[kMaxRank];
};

// Contiguous, rows with gaps, one operand broadcast over rows and the other over columns, transposed.
const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {{1, 1, 1, 1}, {{0, 0, 0, 1}, {0, 0, 0, 1}}, {0, 0, 0, 1}},
      {{1, 1, 7, 300}, {{0, 0, 300, 1}, {0, 0, 300, 1}}, {0, 0, 300, 1}},
      {{1, 3, 5, 33}, {{0, 200, 40, 1}, {0, 165, 33, 1}}, {0, 170, 34, 1}},
      {{1, 1, 40, 50}, {{0, 0, 0, 1}, {0, 0, 1, 0}}, {0, 0, 50, 1}},
      {{2, 3, 4, 19}, {{1, 2, 6, 24}, {0, 0, 0, 0}}, {228, 76, 19, 1}},
      {{1, 1, 30, 20}, {{0, 0, 20, 1}, {0, 0, 1, 30}}, {0, 0, 2, 61}},
      {{3, 2, 2, 4000}, {{16000, 8000, 4000, 1}, {0, 0, 0, 1}}, {16000, 8000, 4000, 1}},
  };
  return all;
}

constexpr int64_t kBuffer = 50000;

View view(std::vector<float>& data, const int64_t (&stride)[kMaxRank]) {
  View v{data.data(), {}};
  std::copy_n(stride, kMaxRank, v.stride);
  return v;
}

ElementwiseArgs binary_args(Fn fn, const Shape& s, std::vector<float>& x, std::vector<float>& y) {
  ElementwiseArgs a;
  a.fn = fn;
  std::copy_n(s.size, kMaxRank, a.shape);
  a.in[0] = view(x, s.in[0]);
  a.in[1] = view(y, s.in[1]);
  a.in[2] = view(x, s.in[1]);
  return a;
}

// Runs the kernel and the reference on equal outputs and compares everything, the gaps too.
void compare(ElementwiseArgs a, const int64_t (&stride)[kMaxRank], double absolute, double relative,
             const std::string& about) {
  std::vector<float> expected = filled(kBuffer, -7);
  a.out = view(expected, stride);
  reference::elementwise(a);
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    std::vector<float> out = filled(kBuffer, -7);
    a.out = view(out, stride);
    kernels.elementwise(a, pool);
    CHECK(worst(out, expected, absolute, relative) <= 1) << what << " " << about;
  });
}

void functions_of_two() {
  for (size_t i = 0; i < shapes().size(); ++i) {
    for (const Fn fn : {Fn::add, Fn::sub, Fn::mul, Fn::div, Fn::maximum, Fn::minimum, Fn::where, Fn::pow,
                        Fn::lt, Fn::le, Fn::gt, Fn::ge, Fn::eq, Fn::ne, Fn::logical_and, Fn::logical_or}) {
      auto x = random_floats(kBuffer, 1), y = random_floats(kBuffer, 2);
      for (float& v : x) v = fn == Fn::pow ? std::fabs(v) : v;
      // Correctly rounded but for pow, which is libm's (within an ulp).
      compare(binary_args(fn, shapes()[i], x, y), shapes()[i].out, 0, fn == Fn::pow ? 2 * kEps : 0.0,
              "fn " + std::to_string(static_cast<int>(fn)) + " shape " + std::to_string(i));
    }
  }
}

// Every function that elementwise_functions.h lists, also a new one; test_kernels_math.cpp has how near each
// is.
void all_functions() {
  auto x = random_floats(kBuffer, 3), y = random_floats(kBuffer, 4);
  for (auto* values : {&x, &y}) {
    for (float& v : *values) v = std::fabs(v) + 0.1f;
  }
  for (int f = 0; f < static_cast<int>(Fn::cast); ++f) {
    compare(binary_args(static_cast<Fn>(f), shapes()[2], x, y), shapes()[2].out, 4 * kEps, 16 * kEps,
            "fn " + std::to_string(f));
  }
}

// Values that are often equal or 0, with NaN and infinities.
void comparisons_and_logic_of_awkward_values() {
  auto x = random_floats(kBuffer, 1), y = random_floats(kBuffer, 2);
  for (auto* values : {&x, &y}) {
    for (float& v : *values) v = std::round(v);
    for (size_t i = 0; i < values->size(); i += 7)
      (*values)[i] = i % 2 == 0 ? kNaN : i % 3 == 0 ? kInf : -0.0f;
  }
  for (const Fn fn :
       {Fn::lt, Fn::le, Fn::gt, Fn::ge, Fn::eq, Fn::ne, Fn::logical_and, Fn::logical_or, Fn::logical_not}) {
    for (const Shape& s : shapes()) {
      compare(binary_args(fn, s, x, y), s.out, 0, 0, "fn " + std::to_string(static_cast<int>(fn)));
    }
  }
}

void rounding() {
  auto x = random_floats(kBuffer, 1, 5);
  for (size_t i = 0; i < 200; ++i) x[i] = static_cast<float>(i) / 2 - 50;  // halves go to the even side
  x[200] = kNaN, x[201] = -kInf, x[202] = 3e9f, x[203] = -0.4f;
  for (const Fn fn : {Fn::floor, Fn::round}) {
    for (const Shape& s : shapes()) compare(binary_args(fn, s, x, x), s.out, 0, 0, "rounding");
  }
}

void integers_are_compared() {
  for (const Fn fn : {Fn::lt, Fn::le, Fn::gt, Fn::ge, Fn::eq, Fn::ne}) {
    for (const bool scalar : {false, true}) {
      auto x = random_ints(900, 5, 1), y = random_ints(900, 5, 2);
      x[0] = INT32_MAX, x[31] = INT32_MIN, x[2] = 16777217, y[60] = 16777216;  // equal as f32
      std::vector<float> expected = filled(2000, -7);
      ElementwiseArgs a;
      a.fn = fn, a.integer = true, a.has_scalar = scalar, a.scalar = 3;
      a.shape[2] = 30, a.shape[3] = 30;
      a.in[0] = {x.data(), {0, 0, 1, 30}};
      if (!scalar) a.in[1] = {y.data(), {0, 0, 30, 1}};
      a.out = {expected.data(), {0, 0, 60, 2}};
      reference::elementwise(a);
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        std::vector<float> out = filled(2000, -7);
        a.out.data = out.data();
        kernels.elementwise(a, pool);
        CHECK(same_bits(out, expected)) << what << " fn " << static_cast<int>(fn);
      });
    }
  }
}

void a_number_as_operand() {
  for (const bool first : {false, true}) {
    for (const Fn fn : {Fn::add, Fn::sub, Fn::div, Fn::maximum, Fn::pow}) {
      auto x = random_floats(kBuffer, 1);
      for (float& v : x) v = std::fabs(v);
      ElementwiseArgs a = binary_args(fn, shapes()[2], x, x);
      a.in[1] = {};
      a.has_scalar = true, a.scalar_first = first, a.scalar = 0.3;
      compare(a, shapes()[2].out, 0, fn == Fn::pow ? 2 * kEps : 0.0, "number " + std::to_string(first));
      if (fn == Fn::pow && !first) {
        for (const double power : {2.0, 3.0}) {  // products: two roundings at most
          a.scalar = power;
          compare(a, shapes()[2].out, 0, 2 * kEps, "power");
        }
      }
    }
  }
}

void integers() {
  for (const Fn fn : {Fn::add, Fn::sub, Fn::mul, Fn::maximum, Fn::minimum}) {
    for (const bool scalar : {false, true}) {
      auto x = random_ints(900, 2000000000, 1), y = random_ints(900, 2000000000, 2);
      std::vector<int32_t> expected(900), out(900);
      ElementwiseArgs a;
      a.fn = fn, a.integer = true, a.has_scalar = scalar, a.scalar = -5;
      a.shape[2] = 30, a.shape[3] = 30;
      a.in[0] = {x.data(), {0, 0, 1, 30}};
      if (!scalar) a.in[1] = {y.data(), {0, 0, 30, 1}};
      a.out = {expected.data(), {0, 0, 30, 1}};
      reference::elementwise(a);
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        a.out.data = out.data();
        kernels.elementwise(a, pool);
        CHECK(out == expected) << what << " fn " << static_cast<int>(fn);
      });
    }
  }
}

void cast_to_float() {
  auto x = random_ints(1000, 2147483647, 1);
  x[0] = -2147483647;
  std::vector<float> expected = filled(1000, 0), out = expected;
  ElementwiseArgs a;
  a.fn = Fn::cast;
  a.shape[2] = 20, a.shape[3] = 50;
  a.in[0] = {x.data(), {0, 0, 1, 20}};
  a.out = {expected.data(), {0, 0, 50, 1}};
  reference::elementwise(a);
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    a.out.data = out.data();
    kernels.elementwise(a, pool);
    CHECK(same_bits(out, expected)) << what;
  });
}

void nan_passes_through_maximum() {
  std::vector<float> x = {kNaN, 1, 2, -kInf}, y = {1, kNaN, 3, -kInf};
  for (const Fn fn : {Fn::maximum, Fn::minimum}) {
    compare(binary_args(fn, {{1, 1, 1, 4}, {{0, 0, 0, 1}, {0, 0, 0, 1}}, {0, 0, 0, 1}}, x, y), {0, 0, 0, 1},
            0, 0, "NaN");
  }
}

// The same value at every place of a vector, contiguous or strided, has the same bits.
void place_does_not_matter() {
  for (int f = 0; f < static_cast<int>(Fn::cast); ++f) {
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      std::vector<float> x = filled(500, 0.7123f), out = filled(500, 0), strided = filled(500, 0);
      ElementwiseArgs a;
      a.fn = static_cast<Fn>(f);
      a.shape[3] = 50;
      for (View& in : a.in) in = {x.data(), {0, 0, 0, 1}};
      a.out = {out.data(), {0, 0, 0, 1}};
      kernels.elementwise(a, pool);
      for (View& in : a.in) in.stride[3] = 7;
      a.out = {strided.data(), {0, 0, 0, 9}};
      kernels.elementwise(a, pool);
      for (size_t i = 0; i < 50; ++i) {
        CHECK(std::memcmp(&out[i], &out[0], 4) == 0 && std::memcmp(&strided[9 * i], &out[0], 4) == 0)
            << what << " fn " << f << " place " << i;
      }
    });
  }
}

void in_place() {
  auto x = random_floats(1000, 1);
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    std::vector<float> out = filled(1000, 0), same = x;
    ElementwiseArgs a;
    a.fn = Fn::tanh;
    a.shape[3] = 1000;
    a.in[0] = {x.data(), {0, 0, 0, 1}};
    a.out = {out.data(), {0, 0, 0, 1}};
    kernels.elementwise(a, pool);
    a.in[0].data = a.out.data = same.data();
    kernels.elementwise(a, pool);
    CHECK(same_bits(out, same)) << what;
  });
}

void copy() {
  auto x = random_floats(kBuffer, 1);
  for (const Shape& s : shapes()) {
    CopyArgs a;
    std::copy_n(s.size, kMaxRank, a.shape);
    a.in = view(x, s.in[0]);
    std::vector<float> expected = filled(kBuffer, -7);
    a.out = view(expected, s.out);
    reference::copy(a);
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      std::vector<float> out = filled(kBuffer, -7);
      a.out.data = out.data();
      kernels.copy(a, pool);
      CHECK(same_bits(out, expected)) << what << " " << s.size[3];
    });
  }
}

void reduce() {
  for (const int64_t columns : {1, 15, 16, 33, 900}) {
    for (const ReduceKind kind : {ReduceKind::sum, ReduceKind::mean, ReduceKind::max}) {
      for (const bool with_nan : {false, true}) {
        const int64_t gap = columns % 2;
        auto x = random_floats(24 * (columns + gap), 1);
        for (float& v : x)
          v -= 3;  // the largest may be below 0, which the padding of a tail must not win against
        if (with_nan) x[static_cast<size_t>(2 * (columns + gap))] = kNaN;
        ReduceArgs a;
        a.kind = kind;
        const int64_t shape[kMaxRank] = {2, 3, 4, columns};
        std::copy_n(shape, kMaxRank, a.shape);
        const int64_t row = columns + gap;
        a.in = {x.data(), {12 * row, 4 * row, row, 1}};
        std::vector<float> expected = filled(60, -7);
        a.out = {expected.data(), {1, 8, 2, 5}};
        reference::reduce(a);
        for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
          std::vector<float> out = filled(60, -7);
          a.out.data = out.data();
          kernels.reduce(a, pool);
          // Terms of one sign, mostly: (columns / 16 + 5) roundings of the sum.
          const double relative =
              kind == ReduceKind::max ? 0 : (static_cast<double>(columns) / 16 + 6) * kEps;
          CHECK(worst(out, expected, 0, relative) <= 1) << what << " columns " << columns;
        });
      }
    }
  }
}

void names() {
  Fn fn = Fn::add;
  CHECK(parse_elementwise("gelu_tanh", &fn) && fn == Fn::gelu_tanh);
  CHECK(!parse_elementwise("gelu_tan", &fn) && fn == Fn::gelu_tanh);
  CHECK(parse_elementwise("logical_not", &fn) && fn == Fn::logical_not);
  Activation activation = Activation::silu;
  CHECK(parse_activation("relu", &activation) && activation == Activation::relu);
  CHECK(!parse_activation("swish", &activation));
  ReduceKind kind = ReduceKind::sum;
  CHECK(parse_reduce("max", &kind) && kind == ReduceKind::max);
  CHECK(!parse_reduce("min", &kind));
  CHECK(kernels_for("sse") == nullptr && available_isas().back() == "portable");
}

}  // namespace

int main() {
  RUN(functions_of_two);
  RUN(all_functions);
  RUN(comparisons_and_logic_of_awkward_values);
  RUN(rounding);
  RUN(integers_are_compared);
  RUN(a_number_as_operand);
  RUN(integers);
  RUN(cast_to_float);
  RUN(nan_passes_through_maximum);
  RUN(place_does_not_matter);
  RUN(in_place);
  RUN(copy);
  RUN(reduce);
  RUN(names);
  return check::result();
}
