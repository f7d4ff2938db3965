// Arguments of the kernels that route tokens to experts. Conventions as in kernels.h.
#pragma once

#include "operands.h"

namespace ew {

// The places t * k + j of ids[t, j] sorted by expert, those of one expert ascending:
//   order[i] = the place,  rows[i] = t,  starts[e] .. starts[e + 1] - 1 = the i of expert e
struct RouteExpertsArgs {
  int64_t tokens = 0, choices = 0, experts = 0;  // T, k, E
  const int32_t* ids = nullptr;                  // [T, k], each in 0 .. E-1
  int64_t ids_stride = 0;
  int32_t* order = nullptr;   // [T * k]
  int32_t* rows = nullptr;    // [T * k]
  int32_t* starts = nullptr;  // [E + 1]
};

// out[t, :] = sum over j ascending, from 0, of weights[t, j] * y[places[t * k + j], :]
struct CombineExpertsArgs {
  int64_t tokens = 0, choices = 0, size = 0;
  const float* y = nullptr;  // [T * k, H]
  int64_t y_stride = 0;
  const int32_t* places = nullptr;  // [T * k], the inverse of route_experts' order
  const float* weights = nullptr;   // [T, k]
  int64_t weights_stride = 0;
  float* out = nullptr;  // [T, H]
  int64_t out_stride = 0;
};

// A linear whose rows starts[e] .. starts[e + 1] - 1 meet the weight, scales, offsets and bias of expert e:
// those of `all` are expert 0's, and the strides lead from one expert to the next (scales_stride also for
// offsets). Bits are those of the linear alone. Rows before starts[0] and from starts[E] on aren't written:
// they are of experts that others have.
template <class Linear>
struct Grouped {
  Linear all;
  int64_t experts = 0;
  const int32_t* starts = nullptr;  // [E + 1], each in 0 .. M, never less than the one before
  int64_t weight_stride = 0, scales_stride = 0, bias_stride = 0;
};

// The k greatest of each row, greatest first; of equal values the one with the lower index, and NaN before
// all.
struct TopKArgs {
  int64_t outer = 0, inner = 1, size = 0, k = 0;
  Rows<const float> x;    // [outer, inner, size]
  Rows<float> values;     // [outer, inner, k]
  Rows<int32_t> indices;  // [outer, inner, k]
};

// out[.., i] = x[.., indices[.., i]], elements of 4 bytes
struct GatherArgs {
  int64_t outer = 0, inner = 1, count = 0;
  Rows<const int32_t> x;
  Rows<const int32_t> indices;  // [outer, inner, count]
  Rows<int32_t> out;
};

// out = x, but for out[.., indices[.., i]] = value
struct ScatterArgs {
  int64_t outer = 0, inner = 1, size = 0, count = 0;
  Rows<const float> x;          // [outer, inner, size]
  Rows<const int32_t> indices;  // [outer, inner, count]
  float value = 0;
  Rows<float> out;
};

}  // namespace ew
