// elementwise: what no ew op covers, on views of any strides. elementwise_functions.h lists the functions.
//
// A piece of up to 256 elements is computed at a time. An operand that isn't contiguous is first gathered
// into a buffer (a broadcast one is filled), and a result that isn't is scattered, so that the arithmetic
// itself always runs over contiguous vectors of 16, the last one padded: an element's result doesn't depend
// on strides or place.
#pragma once

#include "kernels.h"
#include "strided.h"
#include "vector_math.h"

namespace ew {
namespace {

constexpr int64_t kPiece = 256;

template <class T>
const T* contiguous(const T* from, int64_t stride, int64_t count, T* buffer) {
  if (stride == 1) return from;
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i * stride];
  return buffer;
}

template <class F>
EW_INLINE void map_vectors(int64_t count, float* out, const float* a, const float* b, const float* c,
                           const F& fn) {
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = count - i;
    store_some(out + i, fn(load_some(a + i, n), load_some(b + i, n), load_some(c + i, n)), n);
  }
}

template <class F>
EW_INLINE void map_scalars(int64_t count, float* out, const float* a, const float* b, const F& fn) {
  for (int64_t i = 0; i < count; ++i) out[i] = fn(a[i], b[i]);
}

// x^2 and x^3 are products, as in torch; other powers are libm's.
EW_INLINE float power(float x, float y) {
  return y == 2.0f ? x * x : y == 3.0f ? x * x * x : __builtin_powf(x, y);
}

// out[i] = fn(a[i], b[i], c[i]) over contiguous floats; operands that fn lacks may be any readable array.
void compute(ElementwiseFn fn, int64_t n, float* out, const float* a, const float* b, const float* c) {
  [[maybe_unused]] const F16 one = splat(1.0f);
  switch (fn) {
#define EW_VECTOR(name, operands, result) \
  case ElementwiseFn::name:               \
    return map_vectors(                   \
        n, out, a, b, c,                  \
        [&]([[maybe_unused]] F16 x, [[maybe_unused]] F16 y, [[maybe_unused]] F16 z) { return result; });
#define EW_SCALAR(name, operands, result) \
  case ElementwiseFn::name:               \
    return map_scalars(n, out, a, b, [](float x, [[maybe_unused]] float y) { return result; });
#define EW_SPECIAL(name, operands) \
  case ElementwiseFn::name:        \
    return;
    EW_ELEMENTWISE_FUNCTIONS(EW_VECTOR, EW_SCALAR, EW_SPECIAL)
#undef EW_VECTOR
#undef EW_SCALAR
#undef EW_SPECIAL
  }
}

// Of integers: add, sub, mul, which wrap around, maximum and minimum.
void compute(ElementwiseFn fn, int64_t n, int32_t* out, const int32_t* a, const int32_t* b, const int32_t*) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t x = static_cast<uint32_t>(a[i]), y = static_cast<uint32_t>(b[i]);
    switch (fn) {
      case ElementwiseFn::add:
        out[i] = static_cast<int32_t>(x + y);
        break;
      case ElementwiseFn::sub:
        out[i] = static_cast<int32_t>(x - y);
        break;
      case ElementwiseFn::mul:
        out[i] = static_cast<int32_t>(x * y);
        break;
      case ElementwiseFn::maximum:
        out[i] = a[i] > b[i] ? a[i] : b[i];
        break;
      default:
        out[i] = a[i] < b[i] ? a[i] : b[i];
        break;
    }
  }
}

// Comparisons of integers: 1 or 0 as f32.
void compute(ElementwiseFn fn, int64_t n, float* out, const int32_t* a, const int32_t* b, const int32_t*) {
  const auto map = [&](const auto& holds) {
    for (int64_t i = 0; i < n; ++i) out[i] = holds(a[i], b[i]) ? 1.0f : 0.0f;
  };
  switch (fn) {
    case ElementwiseFn::lt:
      return map([](int32_t x, int32_t y) { return x < y; });
    case ElementwiseFn::le:
      return map([](int32_t x, int32_t y) { return x <= y; });
    case ElementwiseFn::gt:
      return map([](int32_t x, int32_t y) { return x > y; });
    case ElementwiseFn::ge:
      return map([](int32_t x, int32_t y) { return x >= y; });
    case ElementwiseFn::eq:
      return map([](int32_t x, int32_t y) { return x == y; });
    default:
      return map([](int32_t x, int32_t y) { return x != y; });
  }
}

// The operands' strides and the result's, merged. A missing operand, or the number, is a broadcast of
// `number`.
Walk<4> elementwise_walk(const ElementwiseArgs& a, const View (&in)[3]) {
  Walk<4> w;
  for (int d = 0; d < kMaxRank; ++d) {
    w.shape[d] = a.shape[d];
    for (int i = 0; i < 3; ++i) w.stride[i][d] = in[i].stride[d];
    w.stride[3][d] = a.out.stride[d];
  }
  merge_dimensions(&w, false);
  return w;
}

template <class T, class Out>
void elementwise_as(const ElementwiseArgs& a, Workers& pool) {
  T number = static_cast<T>(a.scalar);
  View in[3] = {a.in[0], a.in[1], a.in[2]};
  const int operands = operands_of(a.fn);
  if (operands == 2 && a.has_scalar) {
    in[1] = View{&number, {}};
    if (a.scalar_first) {
      in[1] = in[0];
      in[0] = View{&number, {}};
    }
  }
  for (int i = operands; i < 3; ++i) in[i] = View{&number, {}};

  const Walk<4> w = elementwise_walk(a, in);
  for_pieces(pool, w, kPiece, 4, [&](const int64_t (&offset)[4], int64_t n) {
    T buffers[3][kPiece];
    Out result[kPiece];
    const T* operand[3];
    for (int i = 0; i < 3; ++i) {
      operand[i] = i < operands ? contiguous(static_cast<const T*>(in[i].data) + offset[i], w.stride[i][3], n,
                                             buffers[i])
                                : operand[0];
    }
    Out* out = static_cast<Out*>(a.out.data) + offset[3];
    Out* to = w.stride[3][3] == 1 ? out : result;
    compute(a.fn, n, to, operand[0], operand[1], operand[2]);
    if (to == out) return;
    for (int64_t i = 0; i < n; ++i) out[i * w.stride[3][3]] = to[i];
  });
}

void elementwise(const ElementwiseArgs& a, Workers& pool) {
  if (a.fn != ElementwiseFn::cast) {
    if (!a.integer) return elementwise_as<float, float>(a, pool);
    return compares(a.fn) ? elementwise_as<int32_t, float>(a, pool)
                          : elementwise_as<int32_t, int32_t>(a, pool);
  }
  const Walk<4> w = elementwise_walk(a, {a.in[0], a.in[0], a.in[0]});
  for_pieces(pool, w, kPiece, 1, [&](const int64_t (&offset)[4], int64_t n) {
    const int32_t* from = static_cast<const int32_t*>(a.in[0].data) + offset[0];
    float* out = static_cast<float*>(a.out.data) + offset[3];
    for (int64_t i = 0; i < n; ++i) out[i * w.stride[3][3]] = static_cast<float>(from[i * w.stride[0][3]]);
  });
}

}  // namespace
}  // namespace ew
