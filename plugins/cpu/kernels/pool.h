// pool: one row of each request's rows.
//
// Each column by itself, over the request's tokens in ascending order: sums are one chain, of fma for
// weights, from 0. Tasks take some columns of some requests.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "vector_math.h"

namespace ew {
namespace {

// Columns first .. past-1 of `tokens` rows, at least one, to `out`.
inline void pool_columns(PoolKind kind, const float* x, int64_t stride, int64_t tokens, int64_t first,
                         int64_t past, float* out) {
  const float count = static_cast<float>(tokens);
  const float weights = 0.5f * count * (count + 1.0f);
  for (int64_t c = first; c < past; c += 16) {
    const int64_t n = past - c;
    const auto row = [&](int64_t i) { return load_some(x + i * stride + c, n); };
    F16 result = row(kind == PoolKind::last ? tokens - 1 : 0);
    switch (kind) {
      case PoolKind::cls:
      case PoolKind::last:
        break;
      case PoolKind::mean:
        for (int64_t i = 1; i < tokens; ++i) result = result + row(i);
        result = result / splat(count);
        break;
      case PoolKind::weighted:
        for (int64_t i = 1; i < tokens; ++i) result = fma(splat(static_cast<float>(i + 1)), row(i), result);
        result = result / splat(weights);
        break;
      case PoolKind::max:
        for (int64_t i = 1; i < tokens; ++i) result = nan_or(result, row(i), max(result, row(i)));
        break;
    }
    store_some(out + c, result, n);
  }
}

inline void pool_rows(const PoolArgs& a, Workers& pool) {
  constexpr int64_t kColumns = 64;  // of a task, which keeps the loads of a row in a line of the cache or two
  const int64_t pieces = (a.size + kColumns - 1) / kColumns;
  const int64_t tokens = a.spans.requests > 0 ? a.spans.total() : 0;
  const int64_t row_work = a.spans.requests > 0 ? tokens * kColumns / a.spans.requests + 1 : 0;
  run_rows(pool, a.spans.requests * pieces, row_work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / pieces, first = i % pieces * kColumns;
      const int64_t past = a.size < first + kColumns ? a.size : first + kColumns;
      const int64_t from = a.spans.begin(b), own = a.spans.tokens(b);
      float* out = a.out.data + b * a.out.stride0;
      if (own > 0) {
        pool_columns(a.kind, a.x.data + from * a.x.stride0, a.x.stride0, own, first, past, out);
      } else {
        __builtin_memset(out + first, 0, static_cast<size_t>(past - first) * sizeof(float));
      }
    }
  });
}

}  // namespace
}  // namespace ew
