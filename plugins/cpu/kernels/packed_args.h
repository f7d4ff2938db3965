// Arguments of the kernels of bf16 and int8. Conventions as in kernels.h.
#pragma once

#include "operands.h"

namespace ew {

// bf16 and f16 values are held as their 16 bits.

// out[t, :] = weight[ids[t], :] as f32
struct EmbeddingBf16Args {
  int64_t tokens = 0, hidden = 0;
  const int32_t* ids = nullptr;      // [T]
  const uint16_t* weight = nullptr;  // bf16 [V, H] in `layout`: rows or panel32x2
  WeightLayout layout = WeightLayout::rows;
  float* out = nullptr;  // [T, H]
  int64_t out_stride = 0;
};

// out[t, :] = weight[ids[t], :] * its scales. group_size 0: one scale a row.
struct EmbeddingInt8Args {
  int64_t tokens = 0, hidden = 0, group_size = 0;
  int64_t scale_block = 0;           // as in LinearInt4Args
  const uint8_t* codes = nullptr;    // as in LinearInt8Args
  const int32_t* ids = nullptr;      // [T]
  const uint8_t* weight = nullptr;   // [V, H] in panel32x4, or panel32x8 with codes
  const uint16_t* scales = nullptr;  // f16 [V, ceil(H/G)] in panel32
  float* out = nullptr;              // [T, H]
  int64_t out_stride = 0;
};

// out[t, :] = weight[ids[t], :] * its scales + its offsets. group_size divides hidden.
struct EmbeddingInt4Args {
  int64_t tokens = 0, hidden = 0, group_size = 0;
  int64_t bits = 4, scale_block = 0;  // as in LinearInt4Args
  const int32_t* ids = nullptr;       // [T]
  const uint8_t* weight = nullptr;    // [V, H] in panel32x8, or planes32
  const uint16_t* scales = nullptr;   // of [V, H/G] groups
  const uint16_t* offsets = nullptr;  // as scales, or null: then 2^(bits - 1) is taken off each value first
  float* out = nullptr;               // [T, H]
  int64_t out_stride = 0;
};

// out[t, :] = weight[ids[t], :] * its scales. group_size 0: one scale a row.
struct EmbeddingFp8Args {
  int64_t tokens = 0, hidden = 0, group_size = 0;
  const int32_t* ids = nullptr;      // [T]
  const uint8_t* weight = nullptr;   // e4m3fn [V, H] in panel32
  const uint16_t* scales = nullptr;  // f16 [V, ceil(H/G)] in panel32
  float* out = nullptr;              // [T, H]
  int64_t out_stride = 0;
};

// out[m, k] = x[m, k] to the nearest bf16, ties to even; a row's place after an odd K is zero
struct CastBf16Args {
  int64_t m = 0, k = 0;
  const float* x = nullptr;  // [M, K]
  int64_t x_stride = 0;
  uint16_t* out = nullptr;  // [M, K]
  int64_t out_stride = 0;   // even, at least K
};

// y[m, n] = sum_k x[m, k] * (weight[n, k] * its scale) + bias[n] in f32
struct LinearFp8Args {
  int64_t m = 0, n = 0, k = 0;
  int64_t group = 0;         // values along K of a scale; 0: all
  const float* x = nullptr;  // [M, K]
  int64_t x_stride = 0;
  const uint8_t* weight = nullptr;          // e4m3fn in panel32
  const uint16_t* weight_scales = nullptr;  // f16 [N, ceil(K/group)] in panel32
  const float* bias = nullptr;              // [N] or null
  float* y = nullptr;                       // [M, N]
  int64_t y_stride = 0;
  Epilogue epilogue = {};
};

// y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], with bf16 factors and f32 sums
struct LinearBf16Args {
  int64_t m = 0, n = 0, k = 0;
  const uint16_t* x = nullptr;       // [M, K], zero behind an odd K
  int64_t x_stride = 0;              // even
  const uint16_t* weight = nullptr;  // panel32x2, or sparse32
  const float* bias = nullptr;       // [N] or null
  float* y = nullptr;                // [M, N]
  int64_t y_stride = 0;
  Epilogue epilogue = {};
  bool sparse = false;  // the weight is in sparse32, and K a multiple of 4
};

// A row's groups of `group_size` values (the last may be shorter; 0: the row is one group) to int8:
//   scales[m, g] = max |x| / 127,  values = x * (127 / max |x|) to the nearest integer, ties to even,
//   sums[m, g] = the group's sum of values
// A group of zeros, or of numbers so small that 127 / max |x| is infinite, has scale 0 and values 0. A group
// with a NaN or infinity has scale NaN, so that it can't go unnoticed, and values 0.
struct QuantizeActivationArgs {
  int64_t m = 0, k = 0, group_size = 0;
  const float* x = nullptr;  // [M, K]
  int64_t x_stride = 0;
  int8_t* values = nullptr;   // [M, K], -127 .. 127; places up to the next multiple of 4 are zero
  int64_t values_stride = 0;  // a multiple of 4, at least K
  float* scales = nullptr;    // [M, ceil(K/G)]
  int64_t scales_stride = 0;
  int32_t* sums = nullptr;  // [M, ceil(K/G)]
  int64_t sums_stride = 0;
};

// y[m, n] = sum over groups of (sum_k values[m, k] * weight[n, k]) * scales[m, g] * weight_scales[n, g] +
// bias[n]. Group sizes: 0 is one group over K; where both are not 0 they are equal, and they are multiples
// of 4.
struct LinearInt8Args {
  int64_t m = 0, n = 0, k = 0;
  int64_t weight_group = 0, activation_group = 0;
  int64_t scale_block = 0;         // as in LinearInt4Args
  const int8_t* values = nullptr;  // [M, K], above -128, zero up to the next multiple of 4
  int64_t values_stride = 0;
  const float* scales = nullptr;  // [M, ceil(K/activation_group)]
  int64_t scales_stride = 0;
  const int32_t* sums = nullptr;  // as scales: sums of values
  int64_t sums_stride = 0;
  const uint8_t* weight = nullptr;          // panel32x4, or sparse32
  const uint8_t* codes = nullptr;           // or panel32x8: of places in this table of 16 values + 128
  const uint16_t* weight_scales = nullptr;  // of [N, ceil(K/weight_group)] groups
  const float* bias = nullptr;              // [N] or null
  float* y = nullptr;                       // [M, N]
  int64_t y_stride = 0;
  Epilogue epilogue = {};
  bool sparse = false;  // the weight is in sparse32, and K a multiple of 4
  // Never null where weights alone are in groups, or sparse. Tasks of experts have none.
  Workspace* workspace = nullptr;
};

// y[m, n] = sum over groups of (sum_k values[m, k] * weight[n, k]) * scales[m, g] * weight_scales[n, g] +
// sums[m, g] * scales[m, g] * weight_offsets[n, g], + bias[n]. The size of all groups divides K, and is a
// multiple of 8, or of 16 where a weight hasn't 4 bits.
struct LinearInt4Args {
  int64_t m = 0, n = 0, k = 0;
  int64_t group = 0;
  int64_t bits = 4;                // of a weight's value: 2 .. 6
  int64_t scale_block = 0;         // groups that share an f16, 8 or 16: group_scales.h; 0: each has one
  const int8_t* values = nullptr;  // [M, K], above -128
  int64_t values_stride = 0;
  const float* scales = nullptr;  // [M, K/group]
  int64_t scales_stride = 0;
  const int32_t* sums = nullptr;  // as scales: sums of values
  int64_t sums_stride = 0;
  const uint8_t* weight = nullptr;          // panel32x8, planes32 of other bits than 4, or sparse32
  const uint16_t* weight_scales = nullptr;  // of [N, K/group] groups
  const uint16_t* weight_offsets =
      nullptr;                  // as weight_scales, or null: 2^(bits - 1) is taken off each weight
  const float* bias = nullptr;  // [N] or null
  float* y = nullptr;           // [M, N]
  int64_t y_stride = 0;
  Epilogue epilogue = {};
  bool sparse = false;  // the weight is in sparse32, has 4 bits, and no offsets or blocks of scales
  Workspace* workspace = nullptr;  // never null if it is; null: no panel is unpacked for many rows
};

}  // namespace ew
