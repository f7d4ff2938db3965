// Mixtures of experts: a token's k places are sorted by expert, each expert's linears run over the rows that
// it got, and a token's results come together in its router's order.
//
//   ids    t0: 2 0   t1: 0 1   t2: 2 0          [T, k]
//   order  1 2 5 | 3 | 0 4                      places t * k + j by expert, ascending within one
//   rows   0 1 2 | 1 | 0 2                      their tokens, which take_rows gathers
//   starts 0       3   4     6                  [E + 1]
//
// A row meets the same weights in the same order as in the plain linear, so company changes no bit.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "linear_bf16.h"
#include "linear_int8.h"
#include "parallel.h"
#include "simd.h"

namespace ew {
namespace {

// A counting sort. It is too short to share out: some nanoseconds a place.
inline void route_experts(const RouteExpertsArgs& a, ThreadPool&) {
  for (int64_t e = 0; e <= a.experts; ++e) a.starts[e] = 0;
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t j = 0; j < a.choices; ++j) ++a.starts[a.ids[t * a.ids_stride + j] + 1];
  }
  for (int64_t e = 0; e < a.experts; ++e) a.starts[e + 1] += a.starts[e];
  // starts[e] moves on to the end of e's places, the beginning of the next expert's, ...
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t j = 0; j < a.choices; ++j) {
      const int32_t at = a.starts[a.ids[t * a.ids_stride + j]]++;
      a.order[at] = static_cast<int32_t>(t * a.choices + j);
      a.rows[at] = static_cast<int32_t>(t);
    }
  }
  for (int64_t e = a.experts; e > 0; --e) a.starts[e] = a.starts[e - 1];  // ... and comes back
  a.starts[0] = 0;
}

inline void combine_experts(const CombineExpertsArgs& a, ThreadPool& pool) {
  run_rows(pool, a.tokens, a.choices * a.size, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* weights = a.weights + t * a.weights_stride;
      const int32_t* places = a.places + t * a.choices;
      float* out = a.out + t * a.out_stride;
      for (int64_t c = 0; c < a.size; c += 16) {
        const int64_t n = a.size - c;
        F16 sum = splat(0.0f);
        for (int64_t j = 0; j < a.choices; ++j) {
          const float* y = a.y + places[j] * a.y_stride + c;
          sum = fma(splat(weights[j]), n >= 16 ? load(y) : load_n(y, n), sum);
        }
        if (n >= 16) {
          store(out + c, sum);
        } else {
          store_n(out + c, sum, n);
        }
      }
    }
  });
}

// The part of a grouped linear that an expert does: its rows, its weight.
inline LinearArgs of_expert(const Grouped<LinearArgs>& g, int64_t e) {
  LinearArgs a = g.all;
  a.m = g.starts[e + 1] - g.starts[e];
  a.x += g.starts[e] * a.x_stride;
  a.y += g.starts[e] * a.y_stride;
  a.weight += e * g.weight_stride;
  if (a.bias != nullptr) a.bias += e * g.bias_stride;
  return a;
}
inline LinearBf16Args of_expert(const Grouped<LinearBf16Args>& g, int64_t e) {
  LinearBf16Args a = g.all;
  a.m = g.starts[e + 1] - g.starts[e];
  a.x += g.starts[e] * a.x_stride;
  a.y += g.starts[e] * a.y_stride;
  a.weight += e * g.weight_stride;
  if (a.bias != nullptr) a.bias += e * g.bias_stride;
  return a;
}
inline LinearInt8Args of_expert(const Grouped<LinearInt8Args>& g, int64_t e) {
  LinearInt8Args a = g.all;
  a.m = g.starts[e + 1] - g.starts[e];
  a.values += g.starts[e] * a.values_stride;
  a.scales += g.starts[e] * a.scales_stride;
  a.sums += g.starts[e] * a.sums_stride;
  a.y += g.starts[e] * a.y_stride;
  a.weight += e * g.weight_stride;
  a.weight_scales += e * g.scales_stride;
  if (a.bias != nullptr) a.bias += e * g.bias_stride;
  return a;
}

template <class Linear, void (*Run)(const Linear&, ThreadPool&)>
void grouped_linear(const Grouped<Linear>& g, ThreadPool& pool) {
  for (int64_t e = 0; e < g.experts; ++e) {
    if (g.starts[e + 1] > g.starts[e]) Run(of_expert(g, e), pool);
  }
}

}  // namespace
}  // namespace ew
