// rms_norm, layer_norm and the two with an addition before them, over the last dimension.
//
// Per row, in the canonical order: 16 lanes, lane j taking the elements j, j + 16, j + 32, ... in order, then
// the fixed tree of sum_lanes. Missing elements of the last vector count as 0. Everything else is element by
// element.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "vector_math.h"

namespace ew {
namespace {

// y = x * rsqrt(mean(x^2) + eps) * weight
EW_INLINE void rms_row(const NormArgs& a, const float* x, float* y) {
  F16 squares = zero();
  for (int64_t i = 0; i < a.size; i += 16) {
    const F16 v = load_some(x + i, a.size - i);
    squares = fma(v, v, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(a.size);
  const F16 factor = splat(1.0f / __builtin_sqrtf(mean + a.eps));
  for (int64_t i = 0; i < a.size; i += 16) {
    const int64_t n = a.size - i;
    F16 v = load_some(x + i, n) * factor;
    if (a.weight != nullptr) v = v * load_some(a.weight + i, n);
    store_some(y + i, v, n);
  }
}

// y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, in two passes over x
EW_INLINE void layer_row(const NormArgs& a, const float* x, float* y) {
  const float count = static_cast<float>(a.size);
  F16 sum = zero();
  for (int64_t i = 0; i < a.size; i += 16) sum = sum + load_some(x + i, a.size - i);
  const F16 mean = splat(sum_lanes(sum) / count);
  F16 squares = zero();
  for (int64_t i = 0; i < a.size; i += 16) {
    const int64_t n = a.size - i;
    F16 v = load_some(x + i, n) - mean;
    if (n < 16) v = select(lanes_between(0, n), v, zero());
    squares = fma(v, v, squares);
  }
  const F16 factor = splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / count + a.eps));
  for (int64_t i = 0; i < a.size; i += 16) {
    const int64_t n = a.size - i;
    F16 v = (load_some(x + i, n) - mean) * factor;
    if (a.weight != nullptr) v = v * load_some(a.weight + i, n);
    if (a.bias != nullptr) v = v + load_some(a.bias + i, n);
    store_some(y + i, v, n);
  }
}

// Row `row` of all, the result to y.
template <bool Layer, bool Add>
EW_INLINE void norm_row(const NormArgs& a, int64_t row, float* y) {
  const int64_t i = row / a.inner, j = row % a.inner;
  const float* x = a.x.data + i * a.x.stride0 + j * a.x.stride1;
  if constexpr (Add) {
    const float* residual = a.residual.data + i * a.residual.stride0 + j * a.residual.stride1;
    float* sum = a.sum.data + i * a.sum.stride0 + j * a.sum.stride1;
    for (int64_t c = 0; c < a.size; c += 16) {
      const int64_t n = a.size - c;
      store_some(sum + c, load_some(x + c, n) + load_some(residual + c, n), n);
    }
    x = sum;
  }
  if constexpr (Layer) {
    layer_row(a, x, y);
  } else {
    rms_row(a, x, y);
  }
}

template <bool Layer, bool Add>
void norm(const NormArgs& a, Workers& pool) {
  run_rows(pool, a.outer * a.inner, a.size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t i = row / a.inner, j = row % a.inner;
      norm_row<Layer, Add>(a, row, a.normed.data + i * a.normed.stride0 + j * a.normed.stride1);
    }
  });
}

}  // namespace
}  // namespace ew
