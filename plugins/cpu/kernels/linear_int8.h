#pragma once

#include "kernels.h"
#include "parallel.h"
#include "quantize.h"
#include "simd.h"

namespace ew {
namespace {

void linear_int8(const LinearInt8Args& a, ThreadPool& pool) {
  if (a.m <= 0 || a.n <= 0) return;
  const int64_t panels = (a.n + kPanel - 1) / kPanel;
  const int64_t size = a.weight_group > 0       ? a.weight_group
                       : a.activation_group > 0 ? a.activation_group
                                                : a.k;
  const int64_t groups = size > 0 ? (a.k + size - 1) / size : 0,
                weight_groups = a.weight_group > 0 ? groups : 1;
  run_tasks(pool, panels, a.m * panels * kPanel * a.k, [&](int64_t panel, int) {
    for (int64_t m = 0; m < a.m; ++m) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t n = panel * kPanel + half * 16;
        if (n >= a.n) break;
        const float* scales = a.scales + m * a.scales_stride;
        const auto weight_scale = [&](int64_t g) {
          float lanes[16];
          for (int64_t i = 0; i < 16; ++i)
            lanes[i] = half_to_float(a.weight_scales[(panel * weight_groups + g) * kPanel + half * 16 + i]);
          return load(lanes);
        };
        F16 acc = splat(0.0f);
        for (int64_t g = 0; g < groups; ++g) {
          float sums[16];
          for (int64_t i = 0; i < 16; ++i) {
            int32_t sum = 0;
            for (int64_t k = g * size; k < a.k && k < (g + 1) * size; ++k) {
              const uint8_t w =
                  a.weight[(panel * ((a.k + 3) / 4) + k / 4) * kPanel * 4 + (half * 16 + i) * 4 + k % 4];
              sum += (static_cast<int32_t>(w) - 128) * a.values[m * a.values_stride + k];
            }
            sums[i] = static_cast<float>(sum);
          }
          const F16 isum = load(sums);
          if (a.weight_group > 0 && a.activation_group > 0) {
            acc = fma(isum, weight_scale(g) * splat(scales[g]), acc);
          } else if (a.weight_group > 0) {
            acc = fma(isum, weight_scale(g), acc);
          } else if (a.activation_group > 0) {
            acc = fma(isum, splat(scales[g]), acc);
          } else {
            acc = isum * (weight_scale(0) * splat(scales[0]));
          }
        }
        if (a.weight_group > 0 && a.activation_group == 0) acc = acc * splat(scales[0]);
        if (a.weight_group == 0 && a.activation_group > 0) acc = acc * weight_scale(0);
        const int64_t left = a.n - n < 16 ? a.n - n : 16;
        if (a.bias != nullptr) acc = acc + load_n(a.bias + n, left);
        store_n(a.y + m * a.y_stride + n, acc, left);
      }
    }
  });
}

}  // namespace
}  // namespace ew
