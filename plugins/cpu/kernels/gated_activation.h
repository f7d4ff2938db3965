// gated_activation: the middle of a gated MLP.
//
//   x    | gate 0 .. I-1 | up 0 .. I-1 |     out  | act(gate) * up |
//
// Of a wider x the halves may be parts: channels lo .. hi-1 are columns lo .. hi-1 and I + lo .. I + hi-1.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "vector_math.h"

namespace ew {
namespace {

template <class F>
EW_INLINE void gate(const float* x, const float* up, int64_t size, float* out, const F& activation) {
  for (int64_t c = 0; c < size; c += 16) {
    const int64_t n = size - c;
    store_some(out + c, activation(load_some(x + c, n)) * load_some(up + c, n), n);
  }
}

// Row `row` of all, the result to out.
inline void gate_row(const GatedActivationArgs& a, int64_t row, float* out) {
  const int64_t i = row / a.inner, j = row % a.inner;
  const float* x = a.gate.data + i * a.gate.stride0 + j * a.gate.stride1;
  const float* up = a.up.data + i * a.up.stride0 + j * a.up.stride1;
  switch (a.kind) {
    case Activation::silu:
      return gate(x, up, a.size, out, [](F16 v) { return silu(v); });
    case Activation::gelu:
      return gate(x, up, a.size, out, [](F16 v) { return gelu(v); });
    case Activation::gelu_tanh:
      return gate(x, up, a.size, out, [](F16 v) { return gelu_tanh(v); });
    case Activation::relu:
      return gate(x, up, a.size, out, [](F16 v) { return relu(v); });
    case Activation::sigmoid:
      return gate(x, up, a.size, out, [](F16 v) { return sigmoid(v); });
  }
}

void gated_activation(const GatedActivationArgs& a, Workers& pool) {
  run_rows(pool, a.outer * a.inner, a.size * 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      gate_row(a, row, a.out.data + row / a.inner * a.out.stride0 + row % a.inner * a.out.stride1);
    }
  });
}

}  // namespace
}  // namespace ew
