// The epilogue of every linear: y = activation(sum + bias) + residual, while the sums are in registers.
//
// The residual may be y itself: an element is read where it is stored next, by the same thread.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace ew {
namespace {

// Calls fn with the activation as a function of a vector.
template <class F>
EW_INLINE void with_activation(LinearActivation kind, const F& fn) {
  switch (kind) {
    case LinearActivation::none:
      return fn([](F16 v) { return v; });
    case LinearActivation::silu:
      return fn([](F16 v) { return silu(v); });
    case LinearActivation::gelu:
      return fn([](F16 v) { return gelu(v); });
    case LinearActivation::gelu_tanh:
      return fn([](F16 v) { return gelu_tanh(v); });
    case LinearActivation::relu:
      return fn([](F16 v) { return relu(v); });
    case LinearActivation::relu2:
      return fn([](F16 v) { return relu(v) * relu(v); });
    case LinearActivation::sigmoid:
      return fn([](F16 v) { return sigmoid(v); });
    case LinearActivation::tanh:
      return fn([](F16 v) { return tanh(v); });
  }
}

// Not inlined, and by way of memory: in the code of every block size the polynomials would be most of it.
__attribute__((noinline)) inline void activate(LinearActivation kind, float* values, int64_t count) {
  if (kind == LinearActivation::none) return;
  with_activation(kind, [&](const auto& fn) {
    for (int64_t i = 0; i < count; i += 16) store(values + i, fn(load(values + i)));
  });
}

// Rows row .. row+R-1 and the C vectors from `column` on; columns past N are not stored.
template <int R, int C, class Linear>
EW_INLINE void store_block(F16 (&acc)[R][C], const Linear& a, int64_t row, int64_t column) {
  const Epilogue& end = a.epilogue;
  const auto left = [&](int c) { return a.n - column - c * 16 < 0 ? 0 : a.n - column - c * 16; };
  if (a.bias != nullptr) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const F16 bias = load_some(a.bias + column + c * 16, left(c));
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) acc[r][c] = acc[r][c] + bias;
    }
  }
  if (end.activation != LinearActivation::none) {
    float values[R * C * 16];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) store(values + (r * C + c) * 16, acc[r][c]);
    }
    activate(end.activation, values, R * C * 16);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = load(values + (r * C + c) * 16);
    }
  }
  float* y = a.y + row * a.y_stride + column;
  if (end.residual == nullptr) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) store_some(y + r * a.y_stride + c * 16, acc[r][c], left(c));
    }
    return;
  }
  const float* residual = end.residual + row * end.residual_stride + column;
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const F16 add = load_some(residual + r * end.residual_stride + c * 16, left(c));
      store_some(y + r * a.y_stride + c * 16, acc[r][c] + add, left(c));
    }
  }
}

// Sums of rows that were kept in memory, `stride` apart (a multiple of 16), and where they go.
struct KeptRows {
  const float* sums;
  int64_t stride, rows, columns;
  const float* bias;      // of the first column, or null
  const float* residual;  // of the first row and column, or null
  int64_t residual_stride;
  float* y;
  int64_t y_stride;
};

// `kept` by value: what is stored might be part of an object that others see, and be loaded again each time.
template <class F>
EW_INLINE void store_kept(const KeptRows kept, const F& activation) {
  const int64_t whole = kept.columns / 16 * 16, left = kept.columns - whole;
  const float *sums = kept.sums, *bias = kept.bias, *residual = kept.residual;
  float* y = kept.y;
  for (int64_t r = 0; r < kept.rows; ++r) {
    for (int64_t c = 0; c < whole; c += 16) {
      F16 v = load(sums + c);
      if (bias != nullptr) v = v + load(bias + c);
      v = activation(v);
      if (residual != nullptr) v = v + load(residual + c);
      store(y + c, v);
    }
    if (left > 0) {
      F16 v = load(sums + whole);
      if (bias != nullptr) v = v + load_n(bias + whole, left);
      v = activation(v);
      if (residual != nullptr) v = v + load_n(residual + whole, left);
      store_n(y + whole, v, left);
    }
    sums += kept.stride;
    y += kept.y_stride;
    if (residual != nullptr) residual += kept.residual_stride;
  }
}

// Each activation with its own loop, so that nothing but y is written. Once for all linears: the polynomials
// are much code.
__attribute__((noinline)) inline void store_kept_rows(const KeptRows& a, LinearActivation kind) {
  with_activation(kind, [&](const auto& fn) { store_kept(a, fn); });
}

// As store_block, for `rows` rows of kept sums and the columns column .. column+columns-1. What a block of
// registers has of a row is two lines of y, each of which may be in another core's cache; of several panels
// at once they are adjacent, and are fetched ahead.
template <class Linear>
EW_INLINE void store_rows(const Linear& a, int64_t row, int64_t rows, int64_t column, int64_t columns,
                          const float* sums, int64_t stride) {
  const Epilogue& end = a.epilogue;
  const KeptRows kept = {
      sums,
      stride,
      rows,
      a.n - column < columns ? a.n - column : columns,
      a.bias == nullptr ? nullptr : a.bias + column,
      end.residual == nullptr ? nullptr : end.residual + row * end.residual_stride + column,
      end.residual_stride,
      a.y + row * a.y_stride + column,
      a.y_stride};
  store_kept_rows(kept, end.activation);
}

}  // namespace
}  // namespace ew
