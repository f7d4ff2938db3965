// Mixtures of experts: a token's k places are sorted by expert, each expert's linears run over the rows that
// it got, and a token's results come together in its router's order.
//
//   ids    t0: 2 0   t1: 0 1   t2: 2 0          [T, k]
//   order  1 2 5 | 3 | 0 4                      places t * k + j by expert, ascending within one
//   rows   0 1 2 | 1 | 0 2                      their tokens, which take_rows gathers
//   starts 0       3   4     6                  [E + 1]
//
// A row meets the same weights in the same order as in the plain linear, so the batch changes no bit. Linears
// of some of the experts, neighbours, take their part of `starts`; the other experts' rows stay as they are.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "linear_bf16.h"
#include "linear_fp8.h"
#include "linear_int4.h"
#include "linear_int8.h"
#include "linear_tasks.h"
#include "parallel.h"
#include "simd.h"

namespace ew {
namespace {

// A counting sort. It is too short to share out: some nanoseconds a place.
inline void route_experts(const RouteExpertsArgs& a, Workers&) {
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

inline void combine_experts(const CombineExpertsArgs& a, Workers& pool) {
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

// Rows and panels (of 32 columns) of a grouped linear that have one expert's weight: a linear of its own.
struct Part {
  int64_t expert = 0, row = 0, row_end = 0, panel = 0, panel_end = 0;
};

template <class Linear>
Linear part_of_all(const Grouped<Linear>& g, const Part& p) {
  const int64_t panels = (g.all.n + kPanel - 1) / kPanel;
  Linear a = g.all;
  a.m = p.row_end - p.row;
  a.n = (p.panel_end < panels ? p.panel_end * kPanel : a.n) - p.panel * kPanel;
  a.weight += p.expert * g.weight_stride + p.panel * (g.weight_stride / panels);
  if (a.bias != nullptr) a.bias += p.expert * g.bias_stride + p.panel * kPanel;
  a.y += p.row * a.y_stride + p.panel * kPanel;
  if constexpr (requires { a.weight_scales; }) {
    a.weight_scales += p.expert * g.scales_stride + p.panel * (g.scales_stride / panels);
  }
  if constexpr (requires { a.values; }) {
    a.values += p.row * a.values_stride;
    a.scales += p.row * a.scales_stride;
    a.sums += p.row * a.sums_stride;
    if constexpr (requires { a.weight_offsets; }) {
      if (a.weight_offsets != nullptr)
        a.weight_offsets += p.expert * g.scales_stride + p.panel * (g.scales_stride / panels);
    }
  } else {
    a.x += p.row * a.x_stride;
  }
  return a;
}

// The linear shares its rows and panels out by itself, but not so few: a call with at most these is one task,
// which runs where it is called.
constexpr int64_t kPartRows = kRowBlock < kTaskRows ? kRowBlock : kTaskRows;
constexpr int64_t kPartBytes = int64_t{1} << 17;  // of weights: parts share a list, so they need not be even

// One list of tasks for all experts, so that a token's few experts keep all threads busy and make them meet
// once.
template <class Linear, void (*Run)(const Linear&, Workers&)>
void grouped_linear(const Grouped<Linear>& g, Workers& pool) {
  const int64_t panels = (g.all.n + kPanel - 1) / kPanel;
  if constexpr (requires { g.all.activation_group; }) {
    if (g.all.weight_group > 0 && g.all.activation_group == 0) {  // it needs the workspace for itself
      for (int64_t e = 0; e < g.experts; ++e) {
        if (g.starts[e + 1] > g.starts[e])
          Run(part_of_all(g, {e, g.starts[e], g.starts[e + 1], 0, panels}), pool);
      }
      return;
    }
  }
  const auto blocks_of = [&](int64_t e) {
    return (g.starts[e + 1] - g.starts[e] + kPartRows - 1) / kPartRows;
  };
  int64_t blocks = 0;
  for (int64_t e = 0; e < g.experts; ++e) blocks += blocks_of(e);
  const int64_t panel_bytes = g.weight_stride / panels * static_cast<int64_t>(sizeof(*g.all.weight));
  const int64_t part_bytes = tuned(pool.tuning().task_bytes, kPartBytes);
  const int64_t group = 1 + part_bytes / (panel_bytes + 1), groups = (panels + group - 1) / group;
  const int64_t work = (g.starts[g.experts] - g.starts[0]) * panels * kPanel * g.all.k;
  run_tasks(pool, blocks * groups, work, [&](int64_t task, int) {
    int64_t e = 0, block = task / groups;
    for (; block >= blocks_of(e); ++e) block -= blocks_of(e);
    const int64_t rows = g.starts[e + 1] - g.starts[e], count = blocks_of(e);
    Part part{e, g.starts[e] + rows * block / count, g.starts[e] + rows * (block + 1) / count, 0, 0};
    const int64_t first = task % groups * group, last = first + group < panels ? first + group : panels;
    for (part.panel = first; part.panel < last; ++part.panel) {
      part.panel_end = part.panel + 1;
      Linear own = part_of_all(g, part);
      if constexpr (requires { own.workspace; }) own.workspace = nullptr;  // the tasks would share it
      Run(own, pool);
    }
  });
}

}  // namespace
}  // namespace ew
