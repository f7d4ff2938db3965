// embedding, take_rows, gather and scatter: kernels that move values and compute nothing.
//
// An embedding in layout panel32 (see linear.h; a tied lm_head shares it) is read with a stride of 32:
// row n is weight[(n / 32)][0 .. H-1][n % 32].
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace ew {
namespace {

EW_INLINE void copy_row(float* to, const float* from, int64_t count) {
  __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}

void embedding(const EmbeddingArgs& a, Workers& pool) {
  run_rows(pool, a.tokens, a.hidden, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t id = a.ids[t];
      float* out = a.out + t * a.out_stride;
      if (a.layout == WeightLayout::rows) {
        copy_row(out, a.weight + id * a.hidden, a.hidden);
        continue;
      }
      const float* column = a.weight + id / kPanel * kPanel * a.hidden + id % kPanel;
      for (int64_t i = 0; i < a.hidden; ++i) out[i] = column[i * kPanel];
    }
  });
}

void take_rows(const TakeRowsArgs& a, Workers& pool) {
  run_rows(pool, a.count, a.inner * a.size, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t j = 0; j < a.inner; ++j) {
        copy_row(a.out.data + r * a.out.stride0 + j * a.out.stride1,
                 a.x.data + a.rows[r] * a.x.stride0 + j * a.x.stride1, a.size);
      }
    }
  });
}

inline void gather(const GatherArgs& a, Workers& pool) {
  run_rows(pool, a.outer * a.inner, a.count, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t i = row / a.inner, j = row % a.inner;
      const int32_t* x = a.x.data + i * a.x.stride0 + j * a.x.stride1;
      const int32_t* indices = a.indices.data + i * a.indices.stride0 + j * a.indices.stride1;
      int32_t* out = a.out.data + i * a.out.stride0 + j * a.out.stride1;
      for (int64_t c = 0; c < a.count; ++c) __builtin_memcpy(out + c, x + indices[c], sizeof(int32_t));
    }
  });
}

inline void scatter(const ScatterArgs& a, Workers& pool) {
  run_rows(pool, a.outer * a.inner, a.size + a.count, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t i = row / a.inner, j = row % a.inner;
      const int32_t* indices = a.indices.data + i * a.indices.stride0 + j * a.indices.stride1;
      float* out = a.out.data + i * a.out.stride0 + j * a.out.stride1;
      copy_row(out, a.x.data + i * a.x.stride0 + j * a.x.stride1, a.size);
      for (int64_t c = 0; c < a.count; ++c) out[indices[c]] = a.value;
    }
  });
}

}  // namespace
}  // namespace ew
