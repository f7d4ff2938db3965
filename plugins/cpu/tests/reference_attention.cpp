// The cache, written and read one element at a time, and attention over it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "reference.h"

namespace ew::reference {
namespace {

float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Number `code` of the positive e4m3fn numbers, 0 .. 126; 127, which stands for NaN, as if it were one of
// them.
double e4m3_value(int code) {
  static const std::vector<double> values = [] {
    std::vector<double> all;
    for (int c = 0; c <= 127; ++c)
      all.push_back(c < 8 ? std::ldexp(c, -9) : std::ldexp(8 + c % 8, c / 8 - 10));
    return all;
  }();
  return values[static_cast<size_t>(code)];
}

uint8_t to_e4m3(float x) {
  int best = 0;
  for (int code = 1; code <= 126; ++code) {
    const double here = std::fabs(std::fabs(double{x}) - e4m3_value(code));
    const double there = std::fabs(std::fabs(double{x}) - e4m3_value(best));
    if (here < there || (here == there && code % 2 == 0)) best = code;
    if (here > there) break;  // the numbers rise
  }
  return static_cast<uint8_t>(best + (std::signbit(x) ? 128 : 0));
}

char* piece_of(const KvCache& c, bool key, int64_t block, int64_t head) {
  const int64_t bytes = key ? c.key_bytes() : c.value_bytes();
  return static_cast<char*>(key ? c.k : c.v) + c.at(block, head) * bytes;
}

// Which element of the piece is element i of a slot.
int64_t place(const KvCache& c, bool key, int64_t slot, int64_t i) {
  const int64_t size = key ? c.key_size : c.value_size;
  if (c.format == KvFormat::f32) return key ? i * kBlock + slot : slot * size + i;
  if (!key) return (slot / 2 * size + i) * 2 + slot % 2;
  return i == size - 1 && size % 2 == 1 ? i * kBlock + slot : i / 2 * 2 * kBlock + slot * 2 + i % 2;
}

// The largest power of two that divides `size`, and its logarithm.
int log2_of_run(int64_t size) {
  int log = 0;
  while (size % (int64_t{2} << log) == 0) ++log;
  return log;
}

// x[begin ..] times the Hadamard matrix of `count` rows, by halves.
template <class Number>
void turn_run(std::vector<Number>& x, size_t begin, size_t count) {
  if (count == 1) return;
  for (size_t i = begin; i < begin + count / 2; ++i) {
    const Number a = x[i], b = x[i + count / 2];
    x[i] = a + b;
    x[i + count / 2] = a - b;
  }
  turn_run(x, begin, count / 2);
  turn_run(x, begin + count / 2, count / 2);
}
template <class Number>
std::vector<Number> turned(std::vector<Number> x) {
  const size_t run = size_t{1} << log2_of_run(static_cast<int64_t>(x.size()));
  for (size_t begin = 0; begin < x.size(); begin += run) turn_run(x, begin, run);
  return x;
}

constexpr float kNormalValues[16] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};

Side side_of(bool key) { return key ? Side::keys : Side::values; }

// The bits of a code of few bits: bit `bit` of element i of a slot, as a byte of the piece and a bit of it.
std::pair<int64_t, int> place_of_bit(const KvCache& c, bool key, int64_t slot, int64_t i, int bit) {
  const int64_t size = key ? c.key_size : c.value_size, rows = key ? 1 : kBlock / 2,
                codes = kBlock * size / rows;
  const int64_t row = key ? 0 : slot / 2;
  const int64_t at = key ? i / 2 * 2 * kBlock + slot * 2 + i % 2 : 2 * i + slot % 2;
  if (bit < 4 && bits_of(c.format, side_of(key)) < 8)
    return {row * codes / 2 + at % (codes / 2), static_cast<int>(at / (codes / 2)) * 4 + bit};
  const int high = bits_of(c.format, side_of(key)) - 4;
  if (high == 4) return {row * codes + at, bit};
  const int64_t part = codes * high / 8;
  return {kBlock * size / 2 + row * part + at % part, static_cast<int>(at / part) * high + bit - 4};
}

uint16_t to_half(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

void write_few_bits(const KvCache& c, bool key, char* piece, int64_t slot, const float* x) {
  const int64_t size = key ? c.key_size : c.value_size;
  const int bits = bits_of(c.format, side_of(key));
  const float limit = bits == 8 || bits == 4 ? 127 : static_cast<float>((1 << bits) - 1);
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> y(x, x + size);
  for (float& v : y) v *= std::ldexp(1.0f, -(log2_of_run(size) / 2));
  y = turned(y);
  float most = 0, scale = 0;
  for (const float v : y) most = std::isfinite(v) ? std::max(most, std::fabs(v)) : infinity;
  const bool finite = std::isfinite(most), some = finite && std::isfinite(limit / most);
  if (some) scale = most / limit;
  if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < size; ++i) {
    const float unit = some ? y[static_cast<size_t>(i)] * (limit / most) : 0.0f;
    int code = 0;
    if (bits == 8) {
      code = static_cast<int>(std::nearbyint(unit));
    } else if (bits > 4) {
      code = static_cast<int>(std::nearbyint(unit * 0.5f - 0.5f)) + (1 << (bits - 1));
    } else {  // the nearest, of two as near the lower one
      for (int other = 1; other < 16; ++other) {
        if (std::fabs(kNormalValues[other] - unit) < std::fabs(kNormalValues[code] - unit)) code = other;
      }
    }
    for (int bit = 0; bit < bits; ++bit) {
      const auto [byte, of_byte] = place_of_bit(c, key, slot, i, bit);
      piece[byte] = static_cast<char>((piece[byte] & ~(1 << of_byte)) | (code >> bit & 1) << of_byte);
    }
  }
  const uint16_t half = to_half(scale);
  std::memcpy(piece + kBlock * size * bits / 8 + slot * 2, &half, 2);
}

void write_piece(const KvCache& c, bool key, int64_t block, int64_t head, int64_t slot, const float* x) {
  const int64_t size = key ? c.key_size : c.value_size;
  char* piece = piece_of(c, key, block, head);
  if (has_few_bits(c.format)) return write_few_bits(c, key, piece, slot, x);
  const int64_t bytes = bits_of(c.format, side_of(key)) / 8;
  float most = 0, scale = 0, factor = 0;
  if (has_scales(c.format)) {
    for (int64_t i = 0; i < size; ++i)
      most = std::isfinite(x[i]) ? std::max(most, std::fabs(x[i])) : std::numeric_limits<float>::infinity();
    const float limit = largest_code(c.format);
    if (!std::isfinite(most)) {
      scale = std::numeric_limits<float>::quiet_NaN();
    } else if (std::isfinite(limit / most)) {
      scale = most / limit;
      factor = limit / most;
    }
    std::memcpy(piece + kBlock * size + slot * 4, &scale, 4);
  }
  for (int64_t i = 0; i < size; ++i) {
    const float scaled = factor == 0 ? 0.0f : x[i] * factor;
    char* to = piece + place(c, key, slot, i) * bytes;
    const uint16_t half = to_bf16(x[i]);
    if (c.format == KvFormat::f32) std::memcpy(to, x + i, 4);
    if (c.format == KvFormat::bf16) std::memcpy(to, &half, 2);
    if (c.format == KvFormat::i8) *to = static_cast<char>(std::nearbyint(scaled));
    if (c.format == KvFormat::fp8) *to = static_cast<char>(to_e4m3(scaled));
  }
}

}  // namespace

std::vector<double> cached_row(const KvCache& c, bool key, int64_t block, int64_t head, int64_t slot) {
  const int64_t size = key ? c.key_size : c.value_size;
  std::vector<double> values;
  if (!has_few_bits(c.format)) {
    for (int64_t i = 0; i < size; ++i) values.push_back(cached(c, key, block, head, slot, i));
    return values;
  }
  const char* piece = piece_of(c, key, block, head);
  const int bits = bits_of(c.format, side_of(key)), log = log2_of_run(size);
  for (int64_t i = 0; i < size; ++i) {
    int code = 0;
    for (int bit = 0; bit < bits; ++bit) {
      const auto [byte, of_byte] = place_of_bit(c, key, slot, i, bit);
      code |= (piece[byte] >> of_byte & 1) << bit;
    }
    values.push_back(bits == 8   ? (code > 127 ? code - 256 : code)
                     : bits == 4 ? kNormalValues[code]
                                 : 2 * code - (1 << bits) + 1);
  }
  values = turned(values);
  _Float16 scale;
  std::memcpy(&scale, piece + kBlock * size * bits / 8 + slot * 2, 2);
  for (double& v : values) v *= std::ldexp(static_cast<double>(scale), log / 2 - log);
  return values;
}

double cached(const KvCache& c, bool key, int64_t block, int64_t head, int64_t slot, int64_t i) {
  key = key || c.values_in_keys;
  if (has_few_bits(c.format)) return cached_row(c, key, block, head, slot)[static_cast<size_t>(i)];
  const char* piece = piece_of(c, key, block, head);
  const char* at = piece + place(c, key, slot, i) * bits_of(c.format, side_of(key)) / 8;
  float value, scale = 1;
  uint16_t half;
  switch (c.format) {
    case KvFormat::f32:
      std::memcpy(&value, at, 4);
      return value;
    case KvFormat::bf16:
      std::memcpy(&half, at, 2);
      return bf16_value(half);
    default:
      std::memcpy(&scale, piece + kBlock * (key ? c.key_size : c.value_size) + slot * 4, 4);
      if (c.format == KvFormat::i8) return double{scale} * static_cast<signed char>(*at);
      return double{scale} * e4m3_value(*at & 127) * (*at & 128 ? -1 : 1);
  }
}

// Exact.
void kv_write(const KvWriteArgs& a) {
  const KvCache& cache = a.cache;
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
      const int64_t block = a.slots[t] / kBlock, slot = a.slots[t] % kBlock;
      if (!a.owns(block)) continue;
      write_piece(cache, true, block, h, slot, row(a.k, t, h));
      if (!cache.values_in_keys) write_piece(cache, false, block, h, slot, row(a.v, t, h));
    }
  }
}

void summarize(const KvCache& c, int64_t block, int64_t head) {
  const int64_t channels = summary_channels(c.key_size);
  char* at = piece_of(c, true, block, head) + kv_piece_bytes(c.format, Side::keys, c.key_size);
  for (int64_t d = 0; d < channels; ++d) {
    float least = 0, greatest = 0, sum = 0;
    for (int64_t slot = 0; d < c.key_size && slot < kBlock; ++slot) {
      const float key = static_cast<float>(cached(c, true, block, head, slot, d));
      least = slot == 0 ? key : std::min(least, key);
      greatest = slot == 0 ? key : std::max(greatest, key);
      sum += key;
    }
    const float middle = (least + greatest) / 2;
    const uint16_t center = to_bf16((sum / kBlock + middle) / 2), spread = to_bf16((greatest - least) / 4);
    std::memcpy(at + 2 * d, &center, 2);
    std::memcpy(at + 2 * (channels + d), &spread, 2);
  }
}

std::vector<bool> seen_blocks(const PagedAttentionArgs& a, int64_t b, int64_t t, int64_t kv_head) {
  const BlockChoice& choice = a.choice;
  const int64_t position = a.kv_len[b] - a.spans.end(b) + t, whole = position / kBlock;
  const int64_t channels = summary_channels(a.cache.key_size), group = a.cache.query_group(a.query_heads);
  std::vector<bool> seen(static_cast<size_t>(whole) + 1, true);
  if (choice.best == 0 || position < choice.from) return seen;
  std::vector<std::pair<float, int64_t>> others;  // the best first
  std::vector<std::vector<float>> estimates(static_cast<size_t>(group));
  for (int64_t i = choice.first; i < whole - choice.last; ++i) {
    const int64_t block = a.block_table[b * a.block_table_stride + i];
    summarize(a.cache, block, kv_head);  // what the step fills has none yet
    const char* at = piece_of(a.cache, true, block, kv_head) +
                     kv_piece_bytes(a.cache.format, Side::keys, a.cache.key_size);
    for (int64_t h = 0; h < group;
         ++h) {  // in the order of numerics.md: blocks may be as good but for rounding
      float lanes[16] = {};
      for (int64_t d = 0; d < a.cache.key_size; ++d) {
        const float q = row(a.q, t, kv_head * group + h)[d];
        uint16_t center, spread;
        std::memcpy(&center, at + 2 * d, 2);
        std::memcpy(&spread, at + 2 * (channels + d), 2);
        lanes[d % 16] = std::fma(q, bf16_value(center), lanes[d % 16]);
        lanes[d % 16] = std::fma(std::abs(q), bf16_value(spread), lanes[d % 16]);
      }
      for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
      }
      const float sum = lanes[0];
      estimates[static_cast<size_t>(h)].push_back(sum);
    }
    others.emplace_back(std::numeric_limits<float>::infinity(), i);
    seen[static_cast<size_t>(i)] = false;
  }
  for (const std::vector<float>& own : estimates) {
    for (size_t i = 0; i < others.size(); ++i)
      others[i].first = std::min(others[i].first, *std::max_element(own.begin(), own.end()) - own[i]);
  }
  std::sort(others.begin(), others.end());
  const size_t best = std::min(static_cast<size_t>(choice.best), others.size());
  for (size_t i = 0; i < best; ++i) seen[static_cast<size_t>(others[i].second)] = true;
  return seen;
}

// A query as a cache's product takes it: rounded to bf16, where keys are rotated in their basis.
std::vector<double> rounded_query(const KvCache& c, const float* x) {
  std::vector<float> q(x, x + c.key_size);
  const int log = log2_of_run(c.key_size);
  if (has_few_bits(c.format)) {
    for (float& v : q) v *= std::ldexp(1.0f, log / 2 - log);
    q = turned(q);
  }
  if (c.format != KvFormat::f32) {
    for (float& v : q) v = bf16_value(to_bf16(v));
  }
  std::vector<double> wide(q.begin(), q.end());
  if (has_few_bits(c.format)) {
    wide = turned(wide);
    for (double& v : wide) v *= std::ldexp(1.0, -(log / 2));
  }
  return wide;
}

// In double, the plain formula; q rounded as the cache asks.
void paged_attention(const PagedAttentionArgs& a) {
  const KvCache& cache = a.cache;
  const int64_t group = a.group > 0 ? a.group : cache.query_group(a.query_heads);
  for (int64_t b = 0; b < a.spans.requests; ++b) {
    // A row is decoded once for all queries that read it.
    const int64_t length = a.kv_len[b], heads = cache.kv_heads;
    std::vector<std::vector<double>> rows(static_cast<size_t>(4 * heads * length));
    const auto decoded = [&](bool of_ends, bool of_keys, int64_t head,
                             int64_t key) -> const std::vector<double>& {
      std::vector<double>& values =
          rows[static_cast<size_t>(((2 * of_ends + of_keys) * heads + head) * length + key)];
      if (values.empty()) {
        const int32_t* table =
            of_ends ? a.ends_table + b * a.ends_table_stride : a.block_table + b * a.block_table_stride;
        values = cached_row(of_ends ? a.ends : cache, of_keys, table[key / kBlock], head, key % kBlock);
      }
      return values;
    };
    for (int64_t t = a.spans.begin(b); t < a.spans.end(b); ++t) {
      const int64_t position = a.kv_len[b] - a.spans.end(b) + t;
      const int64_t from = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
      for (int64_t h = 0; h < a.query_heads; ++h) {
        const int64_t kv_head = (h + a.first_head) / group;
        // The row of the cache, or of that of ends.
        const auto kept = [&](bool of_keys, int64_t key) -> const std::vector<double>& {
          const int64_t run = 128, own = position / run;
          return decoded(a.ends.k != nullptr && (key < run || key / run + 1 >= own), of_keys, kv_head, key);
        };
        const bool chooses = a.choice.best > 0;
        const std::vector<bool> seen = chooses ? seen_blocks(a, b, t, kv_head) : std::vector<bool>();
        const auto sees = [&](int64_t key) { return !chooses || seen[static_cast<size_t>(key / kBlock)]; };
        std::vector<double> scores;
        const std::vector<double> q = rounded_query(cache, row(a.q, t, h));
        double best = a.sinks != nullptr ? a.sinks[h] : -std::numeric_limits<double>::infinity();
        for (int64_t key = from; key <= position; ++key) {
          double s = 0;
          const std::vector<double>& k = kept(true, key);
          for (size_t d = 0; d < k.size(); ++d) s += q[d] * k[d];
          s *= a.scale;
          if (a.softcap > 0) s = a.softcap * std::tanh(s / a.softcap);
          if (a.slopes != nullptr)
            s += static_cast<double>(a.slopes[h]) * static_cast<double>(key - position);
          scores.push_back(s);
          if (sees(key)) best = std::max(best, s);
        }
        double total = a.sinks != nullptr ? std::exp(a.sinks[h] - best) : 0;
        std::vector<double> out(static_cast<size_t>(cache.value_size));
        for (int64_t key = from; key <= position; ++key) {
          if (!sees(key)) continue;
          const double p = std::exp(scores[static_cast<size_t>(key - from)] - best);
          total += p;
          const std::vector<double>& v = kept(false, key);
          for (size_t d = 0; d < out.size(); ++d) out[d] += p * v[d];
        }
        for (size_t d = 0; d < out.size(); ++d) row(a.out, t, h)[d] = static_cast<float>(out[d] / total);
      }
    }
  }
}

}  // namespace ew::reference
