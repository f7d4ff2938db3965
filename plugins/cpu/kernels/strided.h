// Walking views of rank 4, for elementwise, copy and reduce.
//
// Neighbouring dimensions that are contiguous in every operand are merged first, so that most calls become
// one long row. The innermost dimension is cut into pieces; (outer index, piece) are numbered in one sequence
// and shared out.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace ew {
namespace {

template <int N>
struct Walk {
  int64_t shape[kMaxRank];
  int64_t stride[N][kMaxRank];
};

// Moves sizes towards the last dimension where no operand has a gap, but not into it if keep_last.
template <int N>
void merge_dimensions(Walk<N>* w, bool keep_last) {
  int to = keep_last ? 2 : 3;
  for (int from = to - 1; from >= 0; --from) {
    bool joined = w->shape[from] == 1 || w->shape[to] == 1;
    if (!joined) {
      joined = true;
      for (int i = 0; i < N; ++i) joined = joined && w->stride[i][from] == w->stride[i][to] * w->shape[to];
    }
    if (joined) {
      if (w->shape[to] == 1) {
        for (int i = 0; i < N; ++i) w->stride[i][to] = w->stride[i][from];
      }
      w->shape[to] *= w->shape[from];
    } else {
      --to;
      w->shape[to] = w->shape[from];
      for (int i = 0; i < N; ++i) w->stride[i][to] = w->stride[i][from];
    }
  }
  while (--to >= 0) {
    w->shape[to] = 1;
    for (int i = 0; i < N; ++i) w->stride[i][to] = 0;
  }
}

// fn(offsets[N] of the piece's first element, its length) for all pieces of at most `piece` along the last
// dimension.
template <int N, class F>
void for_pieces(Workers& pool, const Walk<N>& w, int64_t piece, int64_t element_work, const F& fn) {
  const int64_t rows = w.shape[0] * w.shape[1] * w.shape[2], length = w.shape[3];
  if (rows <= 0 || length <= 0) return;
  const int64_t pieces = (length + piece - 1) / piece;
  const int64_t typical = length < piece ? length : piece;
  run_rows(pool, rows * pieces, typical * element_work, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / pieces, first = unit % pieces * piece;
      const int64_t index[3] = {row / (w.shape[1] * w.shape[2]), row / w.shape[2] % w.shape[1],
                                row % w.shape[2]};
      int64_t offset[N];
      for (int i = 0; i < N; ++i) {
        offset[i] = index[0] * w.stride[i][0] + index[1] * w.stride[i][1] + index[2] * w.stride[i][2] +
                    first * w.stride[i][3];
      }
      fn(offset, length - first < piece ? length - first : piece);
    }
  });
}

}  // namespace
}  // namespace ew
