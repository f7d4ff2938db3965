// The layouts of weights [N, K] that the linear kernels read: panels of 32 rows, so that one load takes 32
// outputs'.
//
//   rows                                panel32: k by k
//     w[0,0] w[0,1] .. w[0,K-1]           w[0,0]  w[1,0]  .. w[31,0]
//     w[1,0] w[1,1] .. w[1,K-1]           w[0,1]  w[1,1]  .. w[31,1]
//     ..                                  ..
//                                         w[32,0] w[33,0] .. w[63,0]   the next panel; rows past N are zero
//
// panel32x2 and panel32x4 take 2 and 4 k at a time, so that a 32-bit lane has what one instruction multiplies
// and adds up; k past K are zero:
//
//   panel32x2                                    panel32x4
//     w[0,0] w[0,1]  w[1,0] w[1,1]  ..             w[0,0] w[0,1] w[0,2] w[0,3]  w[1,0] ..
//     w[0,2] w[0,3]  w[1,2] w[1,3]  ..             w[0,4] w[0,5] w[0,6] w[0,7]  w[1,4] ..
//
// A panel32x4 holds an int8 v as the byte v + 128, which is what the products of bytes with and without sign
// want; so its padding is 128.
#pragma once

#include <cstdint>

namespace ew {

class ThreadPool;

// A stack of matrices by rows: element (e, n, k) is data[e * stride0 + n * stride1 + k].
template <class T>
struct Matrices {
  const T* data = nullptr;
  int64_t count = 1, n = 0, k = 0;
  int64_t stride0 = 0, stride1 = 0;
};

// Bytes are moved as they are: T is float, or uint16_t for bf16 and f16.
template <class T>
void pack_panel32(const Matrices<T>& rows, T* panels, ThreadPool& pool);  // [E][ceil(N/32)][K][32]
void pack_panel32x2(const Matrices<uint16_t>& rows, uint16_t* panels,
                    ThreadPool& pool);  // [E][ceil(N/32)][ceil(K/2)][32][2]
void pack_panel32x4(const Matrices<int8_t>& rows, uint8_t* panels,
                    ThreadPool& pool);  // [E][ceil(N/32)][ceil(K/4)][32][4]

// The reverse for one matrix; rows: contiguous [N, K].
template <class T>
void unpack_panel32(const T* panels, int64_t n, int64_t k, T* rows);
void unpack_panel32x2(const uint16_t* panels, int64_t n, int64_t k, uint16_t* rows);
void unpack_panel32x4(const uint8_t* panels, int64_t n, int64_t k, int8_t* rows);

}  // namespace ew
