// gated_activation: the middle of a gated MLP.
//
//   x    | gate 0 .. I-1 | up 0 .. I-1 |     out  | act(gate) * up |
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "vector_math.h"

namespace ew {
namespace {

template <class F>
EW_INLINE void gate_rows(const GatedActivationArgs& a, int64_t begin, int64_t end, const F& activation) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t i = row / a.inner, j = row % a.inner;
    const float* x = a.x.data + i * a.x.stride0 + j * a.x.stride1;
    float* out = a.out.data + i * a.out.stride0 + j * a.out.stride1;
    for (int64_t c = 0; c < a.size; c += 16) {
      const int64_t n = a.size - c;
      store_some(out + c, activation(load_some(x + c, n)) * load_some(x + a.size + c, n), n);
    }
  }
}

void gated_activation(const GatedActivationArgs& a, ThreadPool& pool) {
  run_rows(pool, a.outer * a.inner, a.size * 4, [&](int64_t begin, int64_t end) {
    switch (a.kind) {
      case Activation::silu:
        return gate_rows(a, begin, end, [](F16 v) { return silu(v); });
      case Activation::gelu:
        return gate_rows(a, begin, end, [](F16 v) { return gelu(v); });
      case Activation::gelu_tanh:
        return gate_rows(a, begin, end, [](F16 v) { return gelu_tanh(v); });
      case Activation::relu:
        return gate_rows(a, begin, end, [](F16 v) { return relu(v); });
      case Activation::sigmoid:
        return gate_rows(a, begin, end, [](F16 v) { return sigmoid(v); });
    }
  });
}

}  // namespace
}  // namespace ew
