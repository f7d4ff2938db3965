// Weight layout panel32, which the linear kernels read:
//
//   a weight [N, K], row-major          panels of 32 rows, k by k, so that one load takes 32 outputs'
//   weights:
//     w[0,0] w[0,1] .. w[0,K-1]            w[0,0]  w[1,0]  .. w[31,0]
//     w[1,0] w[1,1] .. w[1,K-1]            w[0,1]  w[1,1]  .. w[31,1]
//     ..                                   ..
//                                          w[32,0] w[33,0] .. w[63,0]   the next panel; rows past N are zero
#pragma once

#include <cstdint>

namespace ew {

class ThreadPool;

// rows: [N, K] with unit inner stride and `stride` elements from row to row; panels: [ceil(N/32)][K][32].
void pack_panel32(const float* rows, int64_t stride, int64_t n, int64_t k, float* panels, ThreadPool& pool);
void unpack_panel32(const float* panels, int64_t n, int64_t k, float* rows);  // rows: contiguous

}  // namespace ew
