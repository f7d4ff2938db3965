// Rows of floats to bf16 and to int8 in groups, and embeddings of tables that are kept in those or in int4.
#pragma once

#include "dot.h"
#include "fp8.h"
#include "group_scales.h"
#include "kernels.h"
#include "parallel.h"
#include "vector_math.h"

namespace ew {
namespace {

EW_INLINE float bf16_to_float(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }

// To the nearest, ties to even; a NaN stays one. Without a branch, so that a loop of it becomes vector code.
EW_INLINE uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
  return static_cast<uint16_t>(magnitude > 0x7f800000u ? quiet : nearest);
}

inline void cast_bf16(const CastBf16Args& a, Workers& pool) {
  run_rows(pool, a.m, a.k, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      uint16_t* out = a.out + m * a.out_stride;
      for (int64_t k = 0; k < a.k; ++k) out[k] = float_to_bf16(a.x[m * a.x_stride + k]);
      if (a.k % 2 != 0) out[a.k] = 0;
    }
  });
}

// The group x[0 .. size-1]: two passes, one for the largest magnitude, one for the values.
EW_INLINE void quantize_group(const float* x, int64_t size, int8_t* values, float* scale, int32_t* sum) {
  F16 largest = zero(), special = zero();
  for (int64_t k = 0; k < size; k += 16) {
    const F16 v = load_some(x + k, size - k);
    largest = max(abs(v), largest);
    special = fma(v, zero(), special);  // NaN once v is NaN or infinite, which max may pass over
  }
  const float most = max_lanes(largest), nan = sum_lanes(special);
  const float factor = 127.0f / most;
  if (nan != nan || !(factor < __builtin_inff())) {
    __builtin_memset(values, 0, static_cast<size_t>(size));
    *scale = nan != nan ? __builtin_nanf("") : 0.0f;
    *sum = 0;
    return;
  }
  I16 total = splat_int(0);
  const F16 by = splat(factor);
  for (int64_t k = 0; k < size; k += 16) {
    const I16 v = nearest_int(load_some(x + k, size - k) * by);  // lanes past the end are 0
    total = total + v;
    store_bytes(values + k, v, size - k < 16 ? size - k : 16);
  }
  *scale = most / 127.0f;
  *sum = sum_lanes(total);
}

// As quantize_group, for up to 16 groups of a multiple of 16 values, whose lanes are reduced together; false
// if one of them is all zero or has a NaN or an infinity, and then nothing is written.
EW_INLINE bool quantize_groups(const float* x, int64_t size, int64_t count, int8_t* values, float* scales,
                               int32_t* sums) {
  F16 largest[16], special = zero();
  for (int64_t g = 0; g < 16; ++g) largest[g] = splat(1.0f);
  for (int64_t g = 0; g < count; ++g) {
    F16 most = zero();
    for (int64_t k = 0; k < size; k += 16) {
      const F16 v = load(x + g * size + k);
      most = max(abs(v), most);
      special = fma(v, zero(), special);
    }
    largest[g] = most;
  }
  const F16 most = max_lanes(largest), factor = splat(127.0f) / most;
  const float nan = sum_lanes(special);
  if (nan != nan || !(max_lanes(factor) < __builtin_inff())) return false;
  float factors[16];
  store(factors, factor);
  I16 totals[16];
  for (int64_t g = 0; g < 16; ++g) totals[g] = splat_int(0);
  for (int64_t g = 0; g < count; ++g) {
    const F16 by = splat(factors[g]);
    I16 total = splat_int(0);
    for (int64_t k = 0; k < size; k += 16) {
      const I16 v = nearest_int(load(x + g * size + k) * by);
      total = total + v;
      store_bytes(values + g * size + k, v, 16);
    }
    totals[g] = total;
  }
  int32_t total[16];
  sum_lanes(totals, total);
  store_some(scales, most / splat(127.0f), count);
  __builtin_memcpy(sums, total, static_cast<size_t>(count) * sizeof(int32_t));
  return true;
}

// x [K] as row m.
EW_INLINE void quantize_row(const QuantizeActivationArgs& a, int64_t m, const float* x) {
  const int64_t size = a.group_size > 0 ? a.group_size : a.k;
  int8_t* values = a.values + m * a.values_stride;
  float* scales = a.scales + m * a.scales_stride;
  int32_t* sums = a.sums + m * a.sums_stride;
  const int64_t groups = size > 0 ? (a.k + size - 1) / size : 0;
  const int64_t together = size % 16 == 0 && size <= 128 && a.k % size == 0 ? 16 : 1;
  for (int64_t g = 0; g < groups; g += together) {
    const int64_t past = g + together < groups ? g + together : groups, k = g * size;
    if (past - g > 1 && quantize_groups(x + k, size, past - g, values + k, scales + g, sums + g)) continue;
    for (int64_t i = g; i < past; ++i) {
      const int64_t at = i * size, count = a.k - at < size ? a.k - at : size;
      quantize_group(x + at, count, values + at, scales + i, sums + i);
    }
  }
  for (int64_t k = a.k; k % 4 != 0; ++k) values[k] = 0;
}

inline void quantize_activation(const QuantizeActivationArgs& a, Workers& pool) {
  run_rows(pool, a.m, 4 * a.k, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) quantize_row(a, m, a.x + m * a.x_stride);
  });
}

inline void embedding_bf16(const EmbeddingBf16Args& a, Workers& pool) {
  run_rows(pool, a.tokens, a.hidden, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t id = a.ids[t], pairs = (a.hidden + 1) / 2;
      const uint16_t* row = a.weight + id * a.hidden;
      const uint16_t* column = a.weight + (id / kPanel * pairs * kPanel + id % kPanel) * 2;
      float* out = a.out + t * a.out_stride;
      for (int64_t i = 0; i < a.hidden; ++i) {
        out[i] = bf16_to_float(a.layout == WeightLayout::rows ? row[i] : column[i / 2 * kPanel * 2 + i % 2]);
      }
    }
  });
}

// Value k of a column of a panel: without sign, of 4 bits in panel32x8, or of 2, 3, 5 or 6 in planes32.
EW_INLINE int few_bits_at(const uint8_t* panel, int64_t bits, int64_t column, int64_t k) {
  const int64_t octets = bits % 2 == 1 ? 2 : 1, first = bits < 4 ? 2 : 4, more = bits - first;
  const uint8_t* piece = panel + k / (8 * octets) * (octets * 8 * bits * kPanel / 8);
  const int64_t octet = k / 8 % octets, at = column * 4 + k % 4, half = k % 8 / 4;
  const int64_t vector = octet * 4 + half * 2 + column / 16;
  const uint8_t* of_octet = piece + octet * kPanel * first;
  const int low = bits < 4 ? of_octet[at % 64] >> (vector % 4 * 2) & 3 : of_octet[at] >> (half * 4) & 15;
  if (more == 0) return low;
  const int high = piece[octets * kPanel * first + at % 64] >> (vector * more) & ((1 << more) - 1);
  return high << first | low;
}

inline void embedding_int8(const EmbeddingInt8Args& a, Workers& pool) {
  const int64_t size = a.group_size > 0 ? a.group_size : a.hidden, quads = (a.hidden + 3) / 4;
  const int64_t groups = size > 0 ? (a.hidden + size - 1) / size : 0;
  const auto column_of = [&](int64_t id) {
    return a.weight + (id / kPanel * quads * kPanel + id % kPanel) * 4;
  };
  run_rows(pool, a.tokens, 16 * a.hidden, [&](int64_t begin, int64_t end) {  // most of it waits for memory
    for (int64_t t = begin; t < end; ++t) {
      const int64_t id = a.ids[t];
      const uint8_t* column = column_of(id);
      if (a.codes == nullptr && t + 1 < end) {  // each four values are in another line of the cache
        const uint8_t* next = column_of(a.ids[t + 1]);
        for (int64_t q = 0; q < quads; ++q) __builtin_prefetch(next + q * kPanel * 4);
      }
      const uint8_t* halves = a.weight + id / kPanel * (a.hidden / 2 * kPanel);  // with codes
      const RowScales scales(a.scales, groups, a.scale_block, id);
      float* out = a.out + t * a.out_stride;
      for (int64_t g = 0; g < groups; ++g) {
        const float scale = scales[g];
        const int64_t past = (g + 1) * size < a.hidden ? (g + 1) * size : a.hidden;
        int64_t i = g * size;
        for (; a.codes == nullptr && size % 4 == 0 && i + 4 <= past; i += 4) {
          const uint8_t* four = column + i * kPanel;
          for (int j = 0; j < 4; ++j) out[i + j] = static_cast<float>(four[j] - 128) * scale;
        }
        for (; i < past; ++i) {
          const int byte = a.codes == nullptr ? column[i / 4 * kPanel * 4 + i % 4]
                                              : a.codes[few_bits_at(halves, 4, id % kPanel, i)];
          out[i] = static_cast<float>(byte - 128) * scale;
        }
      }
    }
  });
}

inline void embedding_int4(const EmbeddingInt4Args& a, Workers& pool) {
  const int64_t groups = a.hidden > 0 ? a.hidden / a.group_size : 0;
  run_rows(pool, a.tokens, 2 * a.hidden, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t id = a.ids[t];
      const uint8_t* panel = a.weight + id / kPanel * (a.hidden * a.bits / 8 * kPanel);
      const RowScales scales(a.scales, groups, a.scale_block, id);
      const RowScales offsets(a.offsets == nullptr ? a.scales : a.offsets, groups, a.scale_block, id);
      float* out = a.out + t * a.out_stride;
      for (int64_t g = 0; g < groups; ++g) {
        const float scale = scales[g];
        // Without offsets -0, which leaves the sign of a zero as it is.
        const float offset = a.offsets == nullptr ? -0.0f : offsets[g];
        const int least = a.offsets == nullptr ? -(1 << (a.bits - 1)) : 0;
        for (int64_t i = g * a.group_size; i < (g + 1) * a.group_size; ++i) {
          const int value = few_bits_at(panel, a.bits, id % kPanel, i);
          out[i] = static_cast<float>(value + least) * scale + offset;
        }
      }
    }
  });
}

inline void embedding_fp8(const EmbeddingFp8Args& a, Workers& pool) {
  const int64_t size = a.group_size > 0 ? a.group_size : a.hidden;
  const int64_t groups = size > 0 ? (a.hidden + size - 1) / size : 0;
  run_rows(pool, a.tokens, 2 * a.hidden, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t id = a.ids[t];
      const uint8_t* column = a.weight + id / kPanel * kPanel * a.hidden + id % kPanel;
      const uint16_t* scales = a.scales + id / kPanel * groups * kPanel + id % kPanel;
      float* out = a.out + t * a.out_stride;
      for (int64_t i = 0; i < a.hidden; ++i) {
        const float scale = half_to_float(scales[i / size * kPanel]) * kFp8OfHalf;
        out[i] = half_to_float(fp8_as_half(column[i * kPanel])) * scale;
      }
    }
  });
}

}  // namespace
}  // namespace ew
