// Norms whose result is quantized at once: a row is made in memory of the worker's own, which stays in its
// first-level cache, and leaves it as 8-bit integers.
//
//   x ---- norm ----> row [K] ---- quantize ----> values | scales | sums
//
// Both halves are the code of the kernels that do them one after the other, so the bits are theirs.
#pragma once

#include "kernels.h"
#include "norm.h"
#include "parallel.h"
#include "quantize.h"

namespace ew {
namespace {

template <bool Layer, bool Add>
void norm_quantize(const NormQuantizeArgs& a, Workers& pool) {
  const int64_t width = (a.then.k + 15) / 16 * 16;
  float* rows =
      static_cast<float*>(a.workspace->reserve(pool.size() * width * static_cast<int64_t>(sizeof(float))));
  run_rows(pool, a.then.m, 2 * a.first.size, [&](int64_t begin, int64_t end, int worker) {
    float* row = rows + worker * width;
    for (int64_t m = begin; m < end; ++m) {
      norm_row<Layer, Add>(a.first, m, row);
      quantize_row(a.then, m, row);
    }
  });
}

}  // namespace
}  // namespace ew
