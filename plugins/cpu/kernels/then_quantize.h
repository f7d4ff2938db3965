// Norms and gated activations whose result is quantized at once: a row is made in memory of the worker's
// own, which stays in its first-level cache, and leaves it as 8-bit integers.
//
//   x ---- norm or activation ----> row [K] ---- quantize ----> values | scales | sums
//
// Both halves are the code of the kernels that do them one after the other, so the bits are theirs.
#pragma once

#include "gated_activation.h"
#include "kernels.h"
#include "norm.h"
#include "parallel.h"
#include "quantize.h"

namespace ew {
namespace {

// make(row, to): the row as floats.
template <class First, class F>
void rows_then_quantize(const ThenQuantize<First>& a, int64_t row_work, ThreadPool& pool, const F& make) {
  const int64_t width = (a.then.k + 15) / 16 * 16;
  float* rows = static_cast<float*>(
      a.workspace->reserve(pool_size(pool) * width * static_cast<int64_t>(sizeof(float))));
  run_rows(pool, a.then.m, row_work, [&](int64_t begin, int64_t end, int worker) {
    float* row = rows + worker * width;
    for (int64_t m = begin; m < end; ++m) {
      make(m, row);
      quantize_row(a.then, m, row);
    }
  });
}

template <bool Layer, bool Add>
void norm_quantize(const ThenQuantize<NormArgs>& a, ThreadPool& pool) {
  rows_then_quantize(a, 2 * a.first.size, pool,
                     [&](int64_t m, float* row) { norm_row<Layer, Add>(a.first, m, row); });
}

void gated_activation_quantize(const ThenQuantize<GatedActivationArgs>& a, ThreadPool& pool) {
  rows_then_quantize(a, 5 * a.first.size, pool, [&](int64_t m, float* row) { gate_row(a.first, m, row); });
}

}  // namespace
}  // namespace ew
