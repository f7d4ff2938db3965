// Random tensors, weights in panels, and how results are compared: what all tests of kernels share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace ew::testing {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kEps = std::numeric_limits<float>::epsilon();

// `count` normal numbers; the same for the same seed.
inline std::vector<float> random_floats(int64_t count, unsigned seed, float spread = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = normal(engine);
  return values;
}

inline std::vector<float> filled(int64_t count, float value) {
  return std::vector<float>(static_cast<size_t>(count), value);
}

inline std::vector<int32_t> random_ints(int64_t count, int32_t below, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_int_distribution<int32_t> uniform(0, below - 1);
  std::vector<int32_t> values(static_cast<size_t>(count));
  for (int32_t& v : values) v = uniform(engine);
  return values;
}

// [N, K] row-major to layout panel32.
inline std::vector<float> to_panels(const std::vector<float>& rows, int64_t n, int64_t k) {
  std::vector<float> panels(static_cast<size_t>((n + 31) / 32 * 32 * k));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      panels[static_cast<size_t>((i / 32 * k + j) * 32 + i % 32)] = rows[static_cast<size_t>(i * k + j)];
    }
  }
  return panels;
}

// `count` values of -128 .. 127.
inline std::vector<int8_t> random_bytes(int64_t count, unsigned seed) {
  const auto ints = random_ints(count, 256, seed);
  std::vector<int8_t> bytes(ints.size());
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<int8_t>(ints[i] - 128);
  return bytes;
}

// `count` values of -127 .. 127, as activations are rounded to.
inline std::vector<int8_t> random_activations(int64_t count, unsigned seed) {
  const auto ints = random_ints(count, 255, seed);
  std::vector<int8_t> values(ints.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int8_t>(ints[i] - 127);
  return values;
}

// [N, K] row-major to `each` neighbours in K side by side: 2 of bf16 in panel32x2, 4 bytes in panel32x4.
// Places past N and K get `padding`.
template <class T>
std::vector<T> to_packed_panels(const std::vector<T>& rows, int64_t n, int64_t k, int64_t each, T padding) {
  const int64_t depth = (k + each - 1) / each;
  std::vector<T> panels(static_cast<size_t>((n + 31) / 32 * depth * 32 * each), padding);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      panels[static_cast<size_t>(((i / 32 * depth + j / each) * 32 + i % 32) * each + j % each)] =
          rows[static_cast<size_t>(i * k + j)];
    }
  }
  return panels;
}

// int8 [N, K] to panel32x4: bytes of value + 128.
inline std::vector<uint8_t> to_panels_int8(const std::vector<int8_t>& rows, int64_t n, int64_t k) {
  std::vector<uint8_t> bytes(rows.size());
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(rows[i] + 128);
  return to_packed_panels<uint8_t>(bytes, n, k, 4, 128);
}

// 0 .. 15 [N, K], K a multiple of 8, to panel32x8: of 8 neighbours the first four in the low halves of bytes.
inline std::vector<uint8_t> to_panels_int4(const std::vector<int32_t>& rows, int64_t n, int64_t k) {
  std::vector<uint8_t> panels(static_cast<size_t>((n + 31) / 32 * (k / 8) * 32 * 4), 0x88);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      uint8_t& byte = panels[static_cast<size_t>(((i / 32 * (k / 8) + j / 8) * 32 + i % 32) * 4 + j % 4)];
      const int value = rows[static_cast<size_t>(i * k + j)];
      byte = static_cast<uint8_t>(j % 8 < 4 ? (byte & 0xf0) | value : (byte & 0x0f) | value << 4);
    }
  }
  return panels;
}

// 2 or 3 bits [N, K] to planes32, as linear_int4.h draws it.
inline std::vector<uint8_t> to_quarters(const std::vector<int32_t>& rows, int64_t n, int64_t k,
                                        int64_t bits) {
  const int64_t deep = bits == 2 ? 8 : 16, piece_bytes = bits == 2 ? 64 : 192;
  std::vector<uint8_t> panels(static_cast<size_t>((n + 31) / 32 * (k / deep) * piece_bytes), 0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      uint8_t* piece = panels.data() + (i / 32 * (k / deep) + j / deep) * piece_bytes;
      const int value = rows[static_cast<size_t>(i * k + j)];
      const int64_t vector = j % deep / 4 * 2 + i % 32 / 16,
                    at = i % 16 * 4 + j % 4;  // 64 values: 16 columns of 4 k
      piece[vector / 4 * 64 + at] |= static_cast<uint8_t>(value % 4 << (vector % 4 * 2));
      if (bits == 3) piece[128 + at] |= static_cast<uint8_t>(value / 4 << vector);
    }
  }
  return panels;
}

// 0 .. 2^bits - 1 [N, K], K a multiple of 16, to planes32, as linear_int4.h draws it; to panel32x8 of 4 bits.
inline std::vector<uint8_t> to_planes(const std::vector<int32_t>& rows, int64_t n, int64_t k, int64_t bits) {
  if (bits == 4) return to_panels_int4(rows, n, k);
  if (bits < 4) return to_quarters(rows, n, k, bits);
  const int64_t deep = bits == 5 ? 16 : 8, piece_bytes = deep * 32 * bits / 8;
  std::vector<uint8_t> panels(static_cast<size_t>((n + 31) / 32 * (k / deep) * piece_bytes), 0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      uint8_t* piece = panels.data() + (i / 32 * (k / deep) + j / deep) * piece_bytes;
      const int value = rows[static_cast<size_t>(i * k + j)], low = value % 16, above = value / 16;
      piece[(j % deep / 8 * 32 + i % 32) * 4 + j % 4] |= static_cast<uint8_t>(j % 8 < 4 ? low : low << 4);
      const int64_t vector = j % deep / 4 * 2 + i % 32 / 16;  // 64 values: 16 columns of 4 k
      piece[deep * 16 + i % 16 * 4 + j % 4] |= static_cast<uint8_t>(above << (vector * (bits - 4)));
    }
  }
  return panels;
}

// f16 numbers of 2^-10 to 1 for [N, G] in panel32; zeros past N.
inline std::vector<uint16_t> random_half_panels(int64_t n, int64_t groups, unsigned seed = 4) {
  const auto bits = random_ints((n + 31) / 32 * 32 * groups, 10 << 10, seed);
  std::vector<uint16_t> panels(bits.size());
  for (size_t i = 0; i < panels.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / (32 * groups) * 32 + static_cast<int64_t>(i % 32);
    panels[i] = row < n ? static_cast<uint16_t>((5 << 10) + bits[i]) : uint16_t{0};
  }
  return panels;
}

// The same in blocks of `block` groups: an f16, which bytes of both signs multiply.
inline std::vector<uint16_t> random_scales(int64_t n, int64_t groups, int64_t block, unsigned seed = 4) {
  if (block == 0) return random_half_panels(n, groups, seed);
  std::vector<uint16_t> panels;
  const auto halves = random_half_panels(n, groups / block, seed);
  for (size_t at = 0; at < halves.size(); at += 32) {
    panels.insert(panels.end(), halves.begin() + static_cast<std::ptrdiff_t>(at),
                  halves.begin() + static_cast<std::ptrdiff_t>(at + 32));
    for (const int32_t bits : random_ints(block * 16, 1 << 16, seed + static_cast<unsigned>(at)))
      panels.push_back(static_cast<uint16_t>(bits));
  }
  return panels;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// The largest |a - b| / (absolute + relative |b|): at most 1 if every element is within the tolerance. NaN
// and infinity must be the same on both sides, else infinity is returned.
inline double worst(const std::vector<float>& a, const std::vector<float>& b, double absolute,
                    double relative) {
  double most = a.size() == b.size() ? 0 : kInf;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (a[i] == b[i]) continue;
    const double error =
        std::fabs(static_cast<double>(a[i]) - b[i]) / (absolute + relative * std::fabs(b[i]));
    most = std::max(most, std::isnan(error) ? kInf : error);
  }
  return most;
}

}  // namespace ew::testing
