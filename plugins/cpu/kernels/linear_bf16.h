#pragma once

#include "kernels.h"
#include "parallel.h"
#include "quantize.h"
#include "simd.h"

namespace ew {
namespace {

void linear_bf16(const LinearBf16Args& a, ThreadPool& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  const int64_t panels = (a.n + kPanel - 1) / kPanel, pairs = (a.k + 1) / 2;
  run_tasks(pool, panels, a.m * panels * kPanel * a.k, [&](int64_t panel, int) {
    for (int64_t m = 0; m < a.m; ++m) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t n = panel * kPanel + half * 16;
        if (n >= a.n) break;
        F16 acc = splat(0.0f);
        for (int64_t k = 0; k < a.k; ++k) {
          float w[16];
          for (int64_t i = 0; i < 16; ++i) {
            w[i] = bf16_to_float(a.weight[((panel * pairs + k / 2) * kPanel + half * 16 + i) * 2 + k % 2]);
          }
          acc = fma(splat(bf16_to_float(a.x[m * a.x_stride + k])), load(w), acc);
        }
        const int64_t left = a.n - n < 16 ? a.n - n : 16;
        if (a.bias != nullptr) acc = acc + load_n(a.bias + n, left);
        store_n(a.y + m * a.y_stride + n, acc, left);
      }
    }
  });
}

}  // namespace
}  // namespace ew
