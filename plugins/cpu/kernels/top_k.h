// top_k: the k greatest of each row, sorted.
//
// The results of a row are kept sorted while its values are met in ascending order of index, so that of equal
// values the first stays first. k is small (a router's choices): most values are rejected by one
// comparison with the last that is kept.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace ew {
namespace {

EW_INLINE bool comes_before(float a, float b) { return a > b || (a != a && b == b); }  // NaN first, as torch

inline void top_k_row(const float* x, int64_t size, int64_t k, float* values, int32_t* indices) {
  int64_t kept = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (kept == k && !comes_before(x[i], values[k - 1])) continue;
    int64_t place = kept < k ? kept++ : k - 1;
    for (; place > 0 && comes_before(x[i], values[place - 1]); --place) {
      values[place] = values[place - 1];
      indices[place] = indices[place - 1];
    }
    values[place] = x[i];
    indices[place] = static_cast<int32_t>(i);
  }
}

inline void top_k(const TopKArgs& a, Workers& pool) {
  run_rows(pool, a.outer * a.inner, 2 * a.size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t i = row / a.inner, j = row % a.inner;
      top_k_row(a.x.data + i * a.x.stride0 + j * a.x.stride1, a.size, a.k,
                a.values.data + i * a.values.stride0 + j * a.values.stride1,
                a.indices.data + i * a.indices.stride0 + j * a.indices.stride1);
    }
  });
}

}  // namespace
}  // namespace ew
