// The formats of the cache: what kv_write stores, and that what a query may not see doesn't reach it.
#include <array>

#include "../../native/kv_cache.h"
#include "attention_scene.h"

using namespace ew;
using namespace ew::testing;

namespace {

// Every byte, for rows with what a format finds hard: zeros, a NaN, an infinity, subnormal numbers, ties.
void kv_write_is_exact() {
  const int64_t tokens = 50, heads = 3, blocks = 4;
  std::vector<int32_t> slots(static_cast<size_t>(tokens));
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i * 37 % (blocks * kBlock));
  for (const auto& [key, value] :
       {std::array<int64_t, 2>{20, 12}, {1, 3}, {33, 64}, {128, 80}, {200, 17}, {256, 24}}) {
    const int64_t k_row = heads * (key + 1) + 5, v_row = heads * (value + 1) + 1;
    auto k = random_floats(tokens * k_row, 1), v = random_floats(tokens * v_row, 2);
    for (int64_t i = 0; i < k_row; ++i) k[static_cast<size_t>(3 * k_row + i)] = 0;
    for (int64_t i = 0; i < k_row; ++i) k[static_cast<size_t>(4 * k_row + i)] *= 1e-41f;
    for (int64_t i = 0; i < v_row; ++i)
      v[static_cast<size_t>(5 * v_row + i)] = std::round(v[static_cast<size_t>(5 * v_row + i)] * 8);
    for (int64_t i = 0; i < v_row; ++i) v[static_cast<size_t>(6 * v_row + i)] *= i % 3 == 0 ? 448 : 0.01f;
    k[static_cast<size_t>(7 * k_row)] = kNaN;
    v[static_cast<size_t>(8 * v_row)] = -kInf;
    for (const KvFormatEntry& entry : kKvFormats) {
      const KvFormat format = entry.value;
      if (!takes_head(format, Side::keys, key) || !takes_head(format, Side::values, value)) continue;
      const KvShape shape{heads, key, value, format};
      const size_t key_bytes = static_cast<size_t>(shape.pieces(blocks) * shape.key_bytes());
      const size_t value_bytes = static_cast<size_t>(shape.pieces(blocks) * shape.value_bytes());
      const auto written = [&](const auto& write) {
        std::vector<char> keys(key_bytes, 7), values(value_bytes, 7);
        write(KvWriteArgs{tokens,
                          {k.data(), k_row, key + 1},
                          {v.data(), v_row, value + 1},
                          slots.data(),
                          {{heads, key, value, format}, keys.data(), values.data()}});
        return std::pair(keys, values);
      };
      const auto expected = written([](const KvWriteArgs& a) { reference::kv_write(a); });
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        CHECK(written([&](const KvWriteArgs& a) { kernels.kv_write(a, pool); }) == expected)
            << what << " " << entry.name << " " << key;
      });
      // read_cache gives what the reference reads, and that is near what was written.
      auto [keys, values] = expected;
      const KvCache cache{{heads, key, value, format}, keys.data(), values.data()};
      std::vector<float> all_k(static_cast<size_t>(blocks * heads * key * kBlock));
      std::vector<float> all_v(static_cast<size_t>(blocks * heads * value * kBlock));
      read_cache(cache, blocks, all_k.data(), all_v.data());
      // A rotation keeps the sum of squares: each of n rotated numbers is off by half a step of the largest,
      // which is at most sqrt(n) most, so that a number is off by sqrt(n) times that if all errors add up.
      const double run = static_cast<double>(key & -key);
      // Of 4 bits the widest step is that from 96 to 127.
      const int bits = bits_of(format, Side::keys);
      const double step = has_few_bits(format)      ? run * (bits == 4 ? 15.5 / 127 : 1.0 / ((1 << bits) - 1))
                          : format == KvFormat::f32 ? 0
                          : format == KvFormat::i8  ? 0.5 / 127
                          : format == KvFormat::bf16 ? 1.0 / 256
                                                     : 1.0 / 16;
      for (int64_t t = 10; t < tokens; ++t) {
        const int64_t block = slots[static_cast<size_t>(t)] / kBlock,
                      slot = slots[static_cast<size_t>(t)] % kBlock;
        for (int64_t h = 0; h < heads; ++h) {
          float most = 0;
          for (int64_t d = 0; d < key; ++d)
            most = std::max(most, std::fabs(k[static_cast<size_t>(t * k_row + h * (key + 1) + d)]));
          for (int64_t d = 0; d < key; ++d) {
            const double read = reference::cached(cache, true, block, h, slot, d);
            const float array = all_k[static_cast<size_t>(((block * heads + h) * key + d) * kBlock + slot)];
            CHECK(array == static_cast<float>(read));
            CHECK(std::fabs(read - k[static_cast<size_t>(t * k_row + h * (key + 1) + d)]) <=
                  1.001 * step * most);
          }
          for (int64_t d = 0; d < value; ++d) {
            const double read = reference::cached(cache, false, block, h, slot, d);
            CHECK(all_v[static_cast<size_t>(((block * heads + h) * kBlock + slot) * value + d)] ==
                  static_cast<float>(read));
          }
        }
      }
    }
  }
}

// A NaN in a later token's value reaches no earlier token, though they share a tile.
void later_values_do_not_leak() {
  for (const KvFormatEntry& entry : kKvFormats) {
    const KvFormat format = entry.value;
    for (const int64_t window : {0, 9}) {
      Scene scene({.heads = 3, .kv_heads = 1, .window = window, .format = format}, {0}, {20});
      const auto saved = scene.memory();
      for (const int64_t at : {10, 11}) {
        std::vector<float> value(64);
        for (int64_t d = 0; d < 64; ++d)
          value[static_cast<size_t>(d)] = static_cast<float>(scene.value(0, at, 0, d));
        value[5] = kNaN;
        for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
          const auto attend = [&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); };
          const auto clean = scene.run(attend);
          scene.overwrite(0, at, value);
          const auto out = scene.run(attend);
          scene.put_back(saved);
          for (int64_t t = 0; t < 20; ++t) {
            const bool sees = t >= at && (window == 0 || t < at + window);
            for (int64_t i = t * 3 * 64; i < (t + 1) * 3 * 64; ++i) {
              const float x = out[static_cast<size_t>(i)], y = clean[static_cast<size_t>(i)];
              if (!sees) {
                CHECK(std::memcmp(&x, &y, sizeof x) == 0) << what << " token " << t << " channel " << i % 64;
              } else if (i % 64 == 5) {
                CHECK(std::isnan(x)) << what << " token " << t;
              }
            }
          }
        });
      }
    }
  }
}

}  // namespace

int main() {
  RUN(kv_write_is_exact);
  RUN(later_values_do_not_leak);
  return check::result();
}
