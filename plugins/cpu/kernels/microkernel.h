// The register block that linear and attention share: rows of x times columns of w, sequential in k.
//
//          k ->                 w: k rows of columns, 16 to a vector
//   x  [ . . . . ]                 [ vvvv vvvv ]
//      [ . . . . ]  R rows         [ vvvv vvvv ]  C vectors, in P panels (each at its own address)
//
// Every column of every row is one chain acc = fma(x[r][k], w[k][c], acc) with k ascending, whatever R, P and
// C are: that is the canonical order of a dot product, and why the block sizes can be tuned freely.
#pragma once

#include "simd.h"

namespace ew {
namespace {

// The chains of R rows and P panels of C vectors, on from acc. With registers to spare a weight is loaded
// once; without, it is a memory operand of each fma. What lies `ahead` elements behind each weight is
// prefetched, into the first-level cache or, from further away, into the second.
enum class Fetch { none, near, far };
template <int R, int P, int C, Fetch Prefetch>
EW_INLINE void chain(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t panel_stride,
                     int64_t count, [[maybe_unused]] int64_t ahead, F16 (&acc)[R][P * C]) {
  constexpr bool kKeep = R > 1 && (R + 1) * P * C < kRegisters;
  for (int64_t k = 0; k < count; ++k) {
    F16 column[P * C];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const float* at = w + p * panel_stride + c * 16;
        if constexpr (Prefetch == Fetch::near) __builtin_prefetch(at + ahead);
        if constexpr (Prefetch == Fetch::far) __builtin_prefetch(at + ahead, 0, 2);
        column[p * C + c] = load(at);
        if constexpr (kKeep) keep(column[p * C + c]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F16 value = splat(x[r * x_stride + k]);
#pragma GCC unroll 8
      for (int c = 0; c < P * C; ++c) acc[r][c] = fma(value, column[c], acc[r][c]);
    }
    w += w_stride;
  }
}

// out[r][0 : columns] = the chains begun at out (or at 0 if `fresh`), for R rows; any number of columns.
template <int R, Fetch Prefetch>
void accumulate_block(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t count,
                      int64_t ahead, float* out, int64_t out_stride, int64_t columns, bool fresh) {
  int64_t c = 0;
  for (; c + 32 <= columns; c += 32) {
    F16 acc[R][2];
    for (int r = 0; r < R; ++r) {
      acc[r][0] = fresh ? splat(0.0f) : load(out + r * out_stride + c);
      acc[r][1] = fresh ? splat(0.0f) : load(out + r * out_stride + c + 16);
    }
    chain<R, 1, 2, Prefetch>(x, x_stride, w + c, w_stride, 0, count, ahead, acc);
    for (int r = 0; r < R; ++r) {
      store(out + r * out_stride + c, acc[r][0]);
      store(out + r * out_stride + c + 16, acc[r][1]);
    }
  }
  for (; c + 16 <= columns; c += 16) {
    F16 acc[R][1];
    for (int r = 0; r < R; ++r) acc[r][0] = fresh ? splat(0.0f) : load(out + r * out_stride + c);
    chain<R, 1, 1, Prefetch>(x, x_stride, w + c, w_stride, 0, count, ahead, acc);
    for (int r = 0; r < R; ++r) store(out + r * out_stride + c, acc[r][0]);
  }
  if (c == columns) return;
  const int64_t n = columns - c;
  for (int r = 0; r < R; ++r) {
    F16 acc = fresh ? splat(0.0f) : load_n(out + r * out_stride + c, n);
    for (int64_t k = 0; k < count; ++k) {
      acc = fma(splat(x[r * x_stride + k]), load_n(w + k * w_stride + c, n), acc);
    }
    store_n(out + r * out_stride + c, acc, n);
  }
}

// Calls fn.template operator()<R>() for R = rows, 1 .. kMaxRows.
template <int R = kMaxRows, class F>
EW_INLINE void with_rows(int64_t rows, const F& fn) {
  if constexpr (R == 1) {
    fn.template operator()<1>();
  } else if (rows == R) {
    fn.template operator()<R>();
  } else {
    with_rows<R - 1>(rows, fn);
  }
}

// Splits `rows` into near-equal blocks of at most kMaxRows and calls fn.template operator()<R>(first) for
// each.
template <class F>
EW_INLINE void for_row_blocks(int64_t rows, const F& fn) {
  const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = rows * i / blocks, end = rows * (i + 1) / blocks;
    with_rows(end - begin, [&]<int R>() { fn.template operator()<R>(begin); });
  }
}

// out[r][0 : columns] for any number of rows, as accumulate_block. Few rows wait for w, so what lies `ahead`
// of it is prefetched; many compute for longer than the processor's own prefetching takes.
inline void accumulate(int64_t rows, const float* x, int64_t x_stride, const float* w, int64_t w_stride,
                       int64_t count, int64_t ahead, float* out, int64_t out_stride, int64_t columns,
                       bool fresh) {
  if (rows <= kMaxRows) {
    with_rows(rows, [&]<int R>() {
      accumulate_block<R, Fetch::near>(x, x_stride, w, w_stride, count, ahead, out, out_stride, columns,
                                       fresh);
    });
    return;
  }
  for_row_blocks(rows, [&]<int R>(int64_t r) {
    accumulate_block<R, Fetch::none>(x + r * x_stride, x_stride, w, w_stride, count, 0, out + r * out_stride,
                                     out_stride, columns, fresh);
  });
}

}  // namespace
}  // namespace ew
