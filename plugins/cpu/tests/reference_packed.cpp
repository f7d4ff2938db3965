// References of the packed formats: bf16, int8 and int4.
#include <cmath>
#include <cstring>
#include <limits>

#include "reference.h"

namespace ew::reference {
namespace {

float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// By the definition of the format: a sign, 5 bits of exponent, 10 of mantissa.
float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : static_cast<float>(sign * std::numeric_limits<double>::infinity());
  }
  const double value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return static_cast<float>(sign * value);
}

uint16_t bf16_weight(const uint16_t* weight, int64_t size, int64_t n, int64_t k) {
  return weight[((n / kPanel * ((size + 1) / 2) + k / 2) * kPanel + n % kPanel) * 2 + k % 2];
}

int32_t int4_weight(const uint8_t* weight, int64_t bits, int64_t size, int64_t n, int64_t k);

int32_t int8_weight(const uint8_t* weight, int64_t size, int64_t n, int64_t k,
                    const uint8_t* codes = nullptr) {
  if (codes != nullptr) return codes[int4_weight(weight, 4, size, n, k)] - 128;
  return weight[((n / kPanel * ((size + 3) / 4) + k / 4) * kPanel + n % kPanel) * 4 + k % 4] - 128;
}

// The value without sign: 0 .. 15, or of 2, 3, 5 or 6 bits.
int32_t int4_weight(const uint8_t* weight, int64_t bits, int64_t size, int64_t n, int64_t k) {
  if (bits == 4) {
    const uint8_t byte = weight[((n / kPanel * (size / 8) + k / 8) * kPanel + n % kPanel) * 4 + k % 4];
    return k % 8 < 4 ? byte % 16 : byte / 16;
  }
  const int64_t in_octet = n % 16 * 4 + k % 4, quarter = k % 8 / 4 * 2 + n % kPanel / 16;
  // planes32: of 2 bits 64 bytes for 8 k, of 3 bits two of these, then 64 bytes with the third.
  if (bits == 2) return weight[(n / kPanel * (size / 8) + k / 8) * 64 + in_octet] >> (2 * quarter) & 3;
  if (bits == 3) {
    const uint8_t* piece = weight + (n / kPanel * (size / 16) + k / 16) * 192;
    const int32_t two = piece[k % 16 / 8 * 64 + in_octet] >> (2 * quarter) & 3;
    return two + 4 * (piece[128 + in_octet] >> (k % 16 / 8 * 4 + quarter) & 1);
  }
  // Pieces of 16 k (5 bits) or 8 (6 bits), low halves first, then 64 bytes with the bits above.
  const int64_t deep = bits == 5 ? 16 : 8, piece_bytes = deep * kPanel * bits / 8;
  const uint8_t* piece = weight + (n / kPanel * (size / deep) + k / deep) * piece_bytes;
  const uint8_t low = piece[(k % deep / 8 * kPanel + n % kPanel) * 4 + k % 4];
  const uint8_t plane = piece[deep * kPanel / 2 + n % 16 * 4 + k % 4];
  const int64_t vector = k % deep / 4 * 2 + n % kPanel / 16;
  const int32_t above = bits == 5 ? plane >> vector & 1 : plane >> (2 * vector) & 3;
  return (k % 8 < 4 ? low % 16 : low / 16) + 16 * above;
}

// By the definition of e4m3fn: a sign, 4 bits of exponent, 3 of mantissa, no infinity.
float from_fp8(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double value = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return static_cast<float>(code >= 128 ? -value : value);
}

int64_t groups_of(int64_t size, int64_t group) { return group > 0 ? (size + group - 1) / group : 1; }

float weight_scale(const uint16_t* scales, int64_t groups, int64_t n, int64_t g, int64_t block = 0) {
  if (block == 0) return from_half(scales[(n / kPanel * groups + g) * kPanel + n % kPanel]);
  // Of each panel and block: 32 f16, then 32 signed bytes of each group.
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(scales) +
                         (n / kPanel * (groups / block) + g / block) * (block + 2) * kPanel;
  uint16_t half = 0;
  std::memcpy(&half, bytes + n % kPanel * 2, sizeof half);
  return from_half(half) *
         static_cast<float>(static_cast<int8_t>(bytes[(2 + g % block) * kPanel + n % kPanel]));
}

}  // namespace

uint16_t to_bf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  const uint32_t half = bits & 0xffff;
  const bool up = half > 0x8000 || (half == 0x8000 && (bits >> 16 & 1) != 0);
  return static_cast<uint16_t>((bits >> 16) + (up ? 1 : 0));
}

// Exact.
void embedding_bf16(const EmbeddingBf16Args& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t i = 0; i < a.hidden; ++i) {
      const int64_t id = a.ids[t];
      a.out[t * a.out_stride + i] =
          from_bf16(a.layout == WeightLayout::rows ? a.weight[id * a.hidden + i]
                                                   : bf16_weight(a.weight, a.hidden, id, i));
    }
  }
}

// Exact.
void embedding_int8(const EmbeddingInt8Args& a) {
  const int64_t groups = groups_of(a.hidden, a.group_size);
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t i = 0; i < a.hidden; ++i) {
      const int64_t id = a.ids[t], group = a.group_size > 0 ? i / a.group_size : 0;
      a.out[t * a.out_stride + i] = static_cast<float>(int8_weight(a.weight, a.hidden, id, i, a.codes)) *
                                    weight_scale(a.scales, groups, id, group, a.scale_block);
    }
  }
}

// Exact.
void embedding_int4(const EmbeddingInt4Args& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t i = 0; i < a.hidden; ++i) {
      const int64_t id = a.ids[t], group = i / a.group_size, groups = a.hidden / a.group_size;
      const float scale = weight_scale(a.scales, groups, id, group, a.scale_block);
      const int32_t value = int4_weight(a.weight, a.bits, a.hidden, id, i);
      a.out[t * a.out_stride + i] =
          a.offsets == nullptr
              ? static_cast<float>(value - (1 << (a.bits - 1))) * scale
              : static_cast<float>(value) * scale + weight_scale(a.offsets, groups, id, group, a.scale_block);
    }
  }
}

// Exact.
void cast_bf16(const CastBf16Args& a) {
  for (int64_t m = 0; m < a.m; ++m) {
    for (int64_t k = 0; k < a.k; ++k) a.out[m * a.out_stride + k] = to_bf16(a.x[m * a.x_stride + k]);
    if (a.k % 2 != 0) a.out[m * a.out_stride + a.k] = 0;
  }
}

void linear_bf16(const LinearBf16Args& a, bool fused) {
  for (int64_t m = 0; m < a.m; ++m) {
    for (int64_t n = 0; n < a.n; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < a.k; ++k) {
        const float x = from_bf16(a.x[m * a.x_stride + k]), w = from_bf16(bf16_weight(a.weight, a.k, n, k));
        sum = fused ? std::fma(x, w, sum) : x * w + sum;
      }
      a.y[m * a.y_stride + n] = end_of(a.epilogue, m, n, a.bias != nullptr ? sum + a.bias[n] : sum);
    }
  }
}

// Exact.
void embedding_fp8(const EmbeddingFp8Args& a) {
  const int64_t groups = groups_of(a.hidden, a.group_size), size = a.group_size > 0 ? a.group_size : a.hidden;
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t i = 0; i < a.hidden; ++i) {
      const int64_t id = a.ids[t];
      const float value = from_fp8(a.weight[(id / kPanel * a.hidden + i) * kPanel + id % kPanel]);
      a.out[t * a.out_stride + i] = value * weight_scale(a.scales, groups, id, i / size);
    }
  }
}

void linear_fp8(const LinearFp8Args& a, bool fused) {
  const int64_t groups = groups_of(a.k, a.group), size = a.group > 0 ? a.group : a.k;
  for (int64_t m = 0; m < a.m; ++m) {
    for (int64_t n = 0; n < a.n; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < a.k; ++k) {
        const float value = from_fp8(a.weight[(n / kPanel * a.k + k) * kPanel + n % kPanel]);
        const float x = a.x[m * a.x_stride + k],
                    w = value * weight_scale(a.weight_scales, groups, n, k / size);
        sum = fused ? std::fma(x, w, sum) : x * w + sum;
      }
      a.y[m * a.y_stride + n] = end_of(a.epilogue, m, n, a.bias != nullptr ? sum + a.bias[n] : sum);
    }
  }
}

// Exact.
void quantize_activation(const QuantizeActivationArgs& a) {
  const int64_t groups = groups_of(a.k, a.group_size), size = a.group_size > 0 ? a.group_size : a.k;
  for (int64_t m = 0; m < a.m; ++m) {
    int8_t* values = a.values + m * a.values_stride;
    for (int64_t g = 0; g < groups; ++g) {
      float most = 0;
      bool finite = true;
      for (int64_t k = g * size; k < a.k && k < (g + 1) * size; ++k) {
        const float x = a.x[m * a.x_stride + k];
        finite = finite && std::isfinite(x);
        most = std::fmax(most, std::fabs(x));
      }
      const float factor = 127.0f / most;
      const bool usable = finite && std::isfinite(factor);
      int32_t sum = 0;
      for (int64_t k = g * size; k < a.k && k < (g + 1) * size; ++k) {
        const float x = a.x[m * a.x_stride + k];
        values[k] = usable ? static_cast<int8_t>(std::nearbyint(x * factor)) : int8_t{0};
        sum += values[k];
      }
      a.sums[m * a.sums_stride + g] = sum;
      a.scales[m * a.scales_stride + g] = !finite  ? std::numeric_limits<float>::quiet_NaN()
                                          : usable ? most / 127.0f
                                                   : 0.0f;
    }
    for (int64_t k = a.k; k % 4 != 0; ++k) values[k] = 0;
  }
}

void linear_int8(const LinearInt8Args& a, bool fused) {
  const int64_t weight_groups = groups_of(a.k, a.weight_group), size = a.weight_group > 0 ? a.weight_group
                                                                       : a.activation_group > 0
                                                                           ? a.activation_group
                                                                           : a.k;
  const int64_t groups = a.k > 0 ? groups_of(a.k, size) : 0;
  for (int64_t m = 0; m < a.m; ++m) {
    const float* scales = a.scales + m * a.scales_stride;
    for (int64_t n = 0; n < a.n; ++n) {
      const auto weight_scale_of = [&](int64_t g) {
        return weight_scale(a.weight_scales, weight_groups, n, g, a.scale_block);
      };
      float acc = 0;
      for (int64_t g = 0; g < groups; ++g) {
        int32_t sum = 0;
        for (int64_t k = g * size; k < a.k && k < (g + 1) * size; ++k) {
          sum += a.values[m * a.values_stride + k] * int8_weight(a.weight, a.k, n, k, a.codes);
        }
        float factor = 1;
        if (a.weight_group > 0 || a.activation_group == 0) factor = weight_scale_of(g);
        if (a.activation_group > 0 || a.weight_group == 0) factor *= scales[g];
        acc = fused ? std::fma(static_cast<float>(sum), factor, acc) : static_cast<float>(sum) * factor + acc;
      }
      if (a.weight_group > 0 && a.activation_group == 0) acc *= scales[0];
      if (a.weight_group == 0 && a.activation_group > 0) acc *= weight_scale_of(0);
      a.y[m * a.y_stride + n] = end_of(a.epilogue, m, n, a.bias != nullptr ? acc + a.bias[n] : acc);
    }
  }
}

void linear_int4(const LinearInt4Args& a, bool fused) {
  const int64_t groups = a.k / a.group;
  const auto add = [fused](float x, float y, float z) { return fused ? std::fma(x, y, z) : x * y + z; };
  for (int64_t m = 0; m < a.m; ++m) {
    for (int64_t n = 0; n < a.n; ++n) {
      float acc = 0;
      for (int64_t g = 0; g < groups; ++g) {
        const float scale = a.scales[m * a.scales_stride + g];
        int32_t sum = 0;
        for (int64_t k = g * a.group; k < (g + 1) * a.group; ++k) {
          const int32_t weight = int4_weight(a.weight, a.bits, a.k, n, k) -
                                 (a.weight_offsets == nullptr ? 1 << (a.bits - 1) : 0);
          sum += a.values[m * a.values_stride + k] * weight;
        }
        acc = add(static_cast<float>(sum), weight_scale(a.weight_scales, groups, n, g, a.scale_block) * scale,
                  acc);
        if (a.weight_offsets != nullptr) {
          const float of_row = static_cast<float>(a.sums[m * a.sums_stride + g]) * scale;
          acc = add(of_row, weight_scale(a.weight_offsets, groups, n, g, a.scale_block), acc);
        }
      }
      a.y[m * a.y_stride + n] = end_of(a.epilogue, m, n, a.bias != nullptr ? acc + a.bias[n] : acc);
    }
  }
}

}  // namespace ew::reference
