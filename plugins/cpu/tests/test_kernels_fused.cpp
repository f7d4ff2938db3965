// Kernels that do what two did before: the bits are those of the two, one after the other.
#include <array>
#include <tuple>

#include "test_kernels.h"

using namespace ew;
using namespace ew::testing;

namespace {

// Quantized rows in memory with gaps, which must stay as they are.
struct Quantized {
  int64_t m, k, groups, stride;
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  Quantized(int64_t rows, int64_t columns, int64_t group)
      : m(rows),
        k(columns),
        groups(group > 0 ? (columns + group - 1) / group : 1),
        stride((k + 3) / 4 * 4 + 8) {
    values.assign(static_cast<size_t>(m * stride), 99);
    scales = filled(m * (groups + 2), -7);
    sums.assign(static_cast<size_t>(m * (groups + 1)), -7);
  }
  QuantizeActivationArgs args(int64_t group) {
    QuantizeActivationArgs a;
    a.m = m, a.k = k, a.group_size = group;
    a.values = values.data(), a.values_stride = stride;
    a.scales = scales.data(), a.scales_stride = groups + 2;
    a.sums = sums.data(), a.sums_stride = groups + 1;
    return a;
  }
  bool operator==(const Quantized& other) const {
    return values == other.values && same_bits(scales, other.scales) && sums == other.sums;
  }
};

constexpr int64_t kSizes[][3] = {{1, 64, 32}, {3, 18, 8}, {5, 100, 0}, {70, 576, 32}, {130, 1000, 0}};

// Rows [m, k] at a stride, of rank 2 or, where m is even, 3.
Rows<float> rows_of(std::vector<float>& x, int64_t m, int64_t stride) {
  return m % 2 == 0 ? Rows<float>{x.data(), 2 * stride, stride} : Rows<float>{x.data(), stride, 0};
}
Rows<const float> as_const(const Rows<float>& rows) { return {rows.data, rows.stride0, rows.stride1}; }

void norms_then_quantize() {
  for (const auto& [m, k, group] : kSizes) {
    auto x = random_floats(m * (k + 3), 1), residual = random_floats(m * (k + 3), 2);
    x[static_cast<size_t>((m - 1) * (k + 3) + 5)] = m == 3 ? kNaN : 1e-30f;
    const auto weight = random_floats(k, 3), bias = random_floats(k, 4);
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const auto compare = [&](auto* norm, auto* fused, bool add, bool layer) {
        std::vector<float> normed(static_cast<size_t>(m * k)), sum = filled(m * (k + 1), -7), total = sum;
        NormArgs a{.outer = m, .size = k, .x = {}, .residual = {}, .normed = {}, .sum = {}};
        if (m % 2 == 0) a.outer = m / 2, a.inner = 2;
        a.x = as_const(rows_of(x, m, k + 3)), a.weight = weight.data(), a.eps = 1e-5f;
        a.bias = layer ? bias.data() : nullptr;
        if (add) a.residual = as_const(rows_of(residual, m, k + 3)), a.sum = rows_of(sum, m, k + 1);
        a.normed = rows_of(normed, m, k);
        Quantized expected(m, k, group), actual(m, k, group);
        norm(a, pool);
        QuantizeActivationArgs then = expected.args(group);
        then.x = normed.data(), then.x_stride = k;
        kernels.quantize_activation(then, pool);
        a.normed = {};
        if (add) a.sum = rows_of(total, m, k + 1);
        Workspace workspace;
        fused({.first = a, .then = actual.args(group), .workspace = &workspace}, pool);
        CHECK(actual == expected && same_bits(total, sum)) << what << " m=" << m << " k=" << k;

        Quantized plain(m, k, group);
        then = plain.args(group);
        then.x = normed.data(), then.x_stride = k;
        reference::quantize_activation(then);  // of the norm that this instruction set gives: exact
        CHECK(actual == plain) << what << " reference m=" << m << " k=" << k;
      };
      compare(kernels.rms_norm, kernels.rms_norm_quantize, false, false);
      compare(kernels.layer_norm, kernels.layer_norm_quantize, false, true);
      compare(kernels.add_rms_norm, kernels.add_rms_norm_quantize, true, false);
      compare(kernels.add_layer_norm, kernels.add_layer_norm_quantize, true, true);
    });
  }
}

// q, k and v side by side in one buffer, as a fused linear makes them; slots in no order.
void rope_then_kv_write() {
  for (const auto& [tokens, heads, kv_heads, size, value_size, freqs] :
       {std::array<int64_t, 6>{1, 4, 2, 16, 16, 8}, {37, 6, 3, 20, 12, 6}, {200, 2, 1, 64, 80, 32}}) {
    const int64_t width = heads * size + kv_heads * (size + value_size), blocks = (tokens + 31) / 32 + 1;
    auto qkv = random_floats(tokens * width, 1), table = random_floats(tokens * 2 * freqs, 2);
    std::vector<int32_t> slots(static_cast<size_t>(tokens));
    for (int64_t t = 0; t < tokens; ++t)
      slots[static_cast<size_t>(t)] = static_cast<int32_t>(blocks * 32 - 1 - t);
    for (const auto& [interleaved, format] : {std::pair{false, KvFormat::f32},
                                              {true, KvFormat::f32},
                                              {false, KvFormat::bf16},
                                              {true, KvFormat::i8},
                                              {false, KvFormat::k6v4}}) {
      if (!takes_head(format, Side::keys, size) || !takes_head(format, Side::values, value_size)) continue;
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        const int64_t pieces = blocks * kv_heads;
        std::vector<char> k(static_cast<size_t>(pieces * kv_piece_bytes(format, Side::keys, size)), -7);
        std::vector<char> v(static_cast<size_t>(pieces * kv_piece_bytes(format, Side::values, value_size)),
                            -7);
        std::vector<float> rotated(static_cast<size_t>(tokens * kv_heads * size));
        std::vector<float> q(static_cast<size_t>(tokens * heads * size)), expected = q;
        float* keys = qkv.data() + heads * size;
        float* values = keys + kv_heads * size;
        RopeArgs query{.tokens = tokens,
                       .heads = heads,
                       .size = size,
                       .freqs = freqs,
                       .x = {qkv.data(), width, size},
                       .table = table.data(),
                       .table_stride = 2 * freqs,
                       .interleaved = interleaved,
                       .out = {expected.data(), heads * size, size}};
        RopeArgs key = query;
        key.heads = kv_heads, key.x = {keys, width, size}, key.out = {rotated.data(), kv_heads * size, size};
        KvWriteArgs write{.tokens = tokens,
                          .k = {rotated.data(), kv_heads * size, size},
                          .v = {values, width, value_size},
                          .slots = slots.data(),
                          .cache = {{kv_heads, size, value_size, format}, k.data(), v.data()}};
        kernels.rope(query, pool);
        kernels.rope(key, pool);
        kernels.kv_write(write, pool);
        const auto k_expected = k, v_expected = v;
        k.assign(k.size(), -7), v.assign(v.size(), -7);
        query.out.data = q.data(), key.out = {}, write.k = {};
        kernels.rope_kv_write({query, key, write}, pool);
        CHECK(same_bits(q, expected) && k == k_expected && v == v_expected) << what << " tokens=" << tokens;
      });
    }
  }
}

// The memory of a cache, and its bytes.
struct CacheMemory {
  KvShape shape;
  std::vector<char> k, v;

  CacheMemory(const KvShape& of, int64_t blocks)
      : shape(of),
        k(static_cast<size_t>(of.pieces(blocks) * of.key_bytes()), -7),
        v(static_cast<size_t>(of.pieces(blocks) * of.value_bytes()), -7) {}
  KvCache cache() { return {shape, k.data(), v.data()}; }
  bool operator==(const CacheMemory& other) const { return k == other.k && v == other.v; }
};

// Both caches have the bytes of two ropes and two writes, which are the reference's. Slots of each cache are
// in an order of its own. Some rows are zeros, and some have an infinity.
void rope_then_kv_write_to_two_caches() {
  constexpr int64_t kHeads = 4;
  for (const int64_t tokens : {1, 3, 17, 64}) {
    for (const int64_t kv_heads : {1, 2, 4}) {
      for (const auto& [size, value_size, format] :
           {std::tuple<int64_t, int64_t, KvFormat>{64, 64, KvFormat::k4v4},
            {128, 128, KvFormat::k4v4},
            {256, 256, KvFormat::k4v4},
            {48, 20, KvFormat::k4v4},
            {64, 64, KvFormat::k6v4}}) {
        const int64_t blocks = (tokens + kBlock - 1) / kBlock + 1, width = (kHeads + kv_heads) * size;
        auto qk = random_floats(tokens * width, 1), v = random_floats(tokens * kv_heads * value_size, 2);
        const auto table = random_floats(tokens * size, 3);
        for (int64_t t = 5; t < tokens; t += 7) {
          std::fill_n(qk.begin() + t * width + kHeads * size, size, 0.0f);
          v[static_cast<size_t>(t * kv_heads * value_size)] = kInf;
        }
        std::vector<int32_t> slots, ends_slots;
        for (int64_t t = 0; t < tokens; ++t) {
          slots.push_back(static_cast<int32_t>(blocks * kBlock - 1 - t));
          ends_slots.push_back(static_cast<int32_t>(t + 3));
        }
        for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
          const CacheMemory none({kv_heads, size, value_size, format}, blocks);
          const CacheMemory no_ends({kv_heads, size, value_size, KvFormat::k8v8}, blocks);
          std::vector<float> rotated(static_cast<size_t>(tokens * kv_heads * size));
          std::vector<float> q(static_cast<size_t>(tokens * kHeads * size)), expected = q;
          RopeArgs query{.tokens = tokens,
                         .heads = kHeads,
                         .size = size,
                         .freqs = size / 2,
                         .x = {qk.data(), width, size},
                         .table = table.data(),
                         .table_stride = size,
                         .out = {expected.data(), kHeads * size, size}};
          RopeArgs key = query;
          key.heads = kv_heads, key.x.data += kHeads * size,
          key.out = {rotated.data(), kv_heads * size, size};
          kernels.rope(query, pool);
          kernels.rope(key, pool);
          KvWriteArgs write{.tokens = tokens,
                            .k = {rotated.data(), kv_heads * size, size},
                            .v = {v.data(), kv_heads * value_size, value_size},
                            .slots = nullptr,
                            .cache = {}};
          CacheMemory cache = none, ends = no_ends;
          const auto two_writes = [&](const auto& kv_write) {
            cache = none, ends = no_ends;
            for (auto [memory, of] : {std::pair{&cache, &slots}, {&ends, &ends_slots}}) {
              KvWriteArgs one = write;
              one.slots = of->data(), one.cache = memory->cache();
              kv_write(one);
            }
          };
          two_writes([](const KvWriteArgs& a) { reference::kv_write(a); });
          const CacheMemory want = cache, want_of_ends = ends;
          const auto expect = [&](const char* form) {
            CHECK(cache == want && ends == want_of_ends) << what << ": " << form << ", tokens=" << tokens
                                                         << " kv_heads=" << kv_heads << " size=" << size;
          };
          two_writes([&](const KvWriteArgs& a) { kernels.kv_write(a, pool); });
          expect("two writes");
          const auto to_both = [&] {
            cache = none, ends = no_ends;
            write.slots = slots.data(), write.cache = cache.cache();
            write.ends = ends.cache(), write.ends_slots = ends_slots.data();
          };
          to_both();
          kernels.kv_write(write, pool);
          expect("one write");
          to_both();
          query.out.data = q.data(), key.out = {}, write.k = {};
          kernels.rope_kv_write({query, key, write}, pool);
          expect("one write that rotates");
          CHECK(same_bits(q, expected)) << what << " tokens=" << tokens << " kv_heads=" << kv_heads;
        });
      }
    }
  }
}

}  // namespace

int main() {
  RUN(norms_then_quantize);
  RUN(rope_then_kv_write);
  RUN(rope_then_kv_write_to_two_caches);
  return check::result();
}
