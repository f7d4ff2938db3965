// copy and reduce, on views of any strides.
#pragma once

#include "kernels.h"
#include "strided.h"
#include "vector_math.h"

namespace ew {
namespace {

// Elements of 4 bytes, f32 or i32, moved as bytes.
void copy(const CopyArgs& a, Workers& pool) {
  Walk<2> w;
  for (int d = 0; d < kMaxRank; ++d) {
    w.shape[d] = a.shape[d];
    w.stride[0][d] = a.in.stride[d];
    w.stride[1][d] = a.out.stride[d];
  }
  merge_dimensions(&w, false);
  for_pieces(pool, w, 4096, 1, [&](const int64_t (&offset)[2], int64_t n) {
    const char* from = static_cast<const char*>(a.in.data) + offset[0] * 4;
    char* to = static_cast<char*>(a.out.data) + offset[1] * 4;
    if (from == to) return;
    if (w.stride[0][3] == 1 && w.stride[1][3] == 1) {
      __builtin_memcpy(to, from, static_cast<size_t>(n) * 4);
      return;
    }
    for (int64_t i = 0; i < n; ++i)
      __builtin_memcpy(to + i * w.stride[1][3] * 4, from + i * w.stride[0][3] * 4, 4);
  });
}

// In the canonical order of norm.h: 16 lanes, then the tree. A NaN anywhere gives NaN.
float reduce_row(ReduceKind kind, const float* x, int64_t count) {
  if (kind != ReduceKind::max) {
    F16 sum = zero();
    for (int64_t i = 0; i < count; i += 16) sum = sum + load_some(x + i, count - i);
    const float total = sum_lanes(sum);
    return kind == ReduceKind::mean ? total / static_cast<float>(count) : total;
  }
  const F16 lowest = splat(-__builtin_inff());
  F16 best = lowest;
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = count - i;
    const F16 v = n >= 16 ? load(x + i) : select(lanes_between(0, n), load_n(x + i, n), lowest);
    best = nan_or(best, v, max(best, v));
  }
  float lane[16];
  store(lane, best);
  for (int i = 1; i < 16; ++i) lane[0] = lane[0] > lane[i] || lane[0] != lane[0] ? lane[0] : lane[i];
  return lane[0];
}

void reduce(const ReduceArgs& a, Workers& pool) {
  Walk<2> w;
  for (int d = 0; d < kMaxRank; ++d) {
    w.shape[d] = a.shape[d];
    w.stride[0][d] = a.in.stride[d];
    w.stride[1][d] = d == 3 ? 0 : a.out.stride[d];
  }
  merge_dimensions(&w, true);
  for_pieces(pool, w, w.shape[3], 1, [&](const int64_t (&offset)[2], int64_t n) {
    static_cast<float*>(a.out.data)[offset[1]] =
        reduce_row(a.kind, static_cast<const float*>(a.in.data) + offset[0], n);
  });
}

}  // namespace
}  // namespace ew
