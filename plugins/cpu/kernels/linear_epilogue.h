// The epilogue of every linear: y = activation(sum + bias) + residual, while the sums are in registers.
//
// The residual may be y itself: an element is read where it is stored next, by the same thread.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace ew {
namespace {

// Not inlined, and by way of memory: in the code of every block size the polynomials would be most of it.
__attribute__((noinline)) inline void activate(LinearActivation kind, float* values, int64_t count) {
  const auto map = [&](const auto& fn) {
    for (int64_t i = 0; i < count; i += 16) store(values + i, fn(load(values + i)));
  };
  switch (kind) {
    case LinearActivation::none:
      return;
    case LinearActivation::silu:
      return map([](F16 v) { return silu(v); });
    case LinearActivation::gelu:
      return map([](F16 v) { return gelu(v); });
    case LinearActivation::gelu_tanh:
      return map([](F16 v) { return gelu_tanh(v); });
    case LinearActivation::relu:
      return map([](F16 v) { return relu(v); });
    case LinearActivation::relu2:
      return map([](F16 v) { return relu(v) * relu(v); });
    case LinearActivation::sigmoid:
      return map([](F16 v) { return sigmoid(v); });
    case LinearActivation::tanh:
      return map([](F16 v) { return tanh(v); });
  }
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

// As store_block, for `rows` rows of sums that were kept in memory, `stride` apart (a multiple of 16), and
// the columns column .. column+columns-1. What a block of registers has of a row is two lines of y, each of
// which may be in another core's cache; of several panels at once they are adjacent, and are fetched ahead.
template <class Linear>
__attribute__((noinline)) void store_rows(const Linear& a, int64_t row, int64_t rows, int64_t column,
                                          int64_t columns, float* sums, int64_t stride) {
  const Epilogue& end = a.epilogue;
  const int64_t count = a.n - column < columns ? a.n - column : columns;
  for (int64_t r = 0; r < rows; ++r, sums += stride) {
    if (a.bias != nullptr) {
      for (int64_t c = 0; c < count; c += 16) {
        store(sums + c, load(sums + c) + load_some(a.bias + column + c, count - c));
      }
    }
    activate(end.activation, sums, count);
    float* y = a.y + (row + r) * a.y_stride + column;
    if (end.residual == nullptr) {
      for (int64_t c = 0; c < count; c += 16) store_some(y + c, load(sums + c), count - c);
      continue;
    }
    const float* residual = end.residual + (row + r) * end.residual_stride + column;
    for (int64_t c = 0; c < count; c += 16) {
      store_some(y + c, load(sums + c) + load_some(residual + c, count - c), count - c);
    }
  }
}

}  // namespace
}  // namespace ew
