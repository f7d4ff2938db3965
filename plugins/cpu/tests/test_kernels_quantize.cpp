#include "test_kernels.h"

using namespace ew;
using namespace ew::testing;

namespace {

// Rows in buffers with gaps, and the results in others, which must stay as they are.
struct Quantize {
  int64_t m, k, group, groups, gap;
  std::vector<float> x;
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;

  Quantize(int64_t m_, int64_t k_, int64_t group_, int64_t gap_)
      : m(m_), k(k_), group(group_), groups(group > 0 ? (k + group - 1) / group : 1), gap(gap_) {
    x = random_floats(m * (k + gap), 1, 3);
  }
  template <class F>
  void run(const F& fn) {
    QuantizeActivationArgs a;
    const int64_t stride = (k + 3) / 4 * 4 + 4 * gap;
    values.assign(static_cast<size_t>(m * stride), 99);
    scales = filled(m * (groups + gap), -7);
    sums.assign(static_cast<size_t>(m * (groups + gap)), -7);
    a.m = m, a.k = k, a.group_size = group;
    a.x = x.data(), a.x_stride = k + gap;
    a.values = values.data(), a.values_stride = stride;
    a.scales = scales.data(), a.scales_stride = groups + gap;
    a.sums = sums.data(), a.sums_stride = groups + gap;
    fn(a);
  }
};

void check(Quantize& q) {
  q.run([](const QuantizeActivationArgs& a) { reference::quantize_activation(a); });
  const Quantize expected = q;
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    q.run([&](const QuantizeActivationArgs& a) { kernels.quantize_activation(a, pool); });
    const std::string shape = what + " m=" + std::to_string(q.m) + " k=" + std::to_string(q.k) + " group " +
                              std::to_string(q.group);
    CHECK(q.values == expected.values) << shape;
    CHECK(worst(q.scales, expected.scales, 0, 0) == 0) << shape;  // equal, NaN as NaN
    CHECK(q.sums == expected.sums) << shape;
  });
}

void equals_reference() {
  for (const int64_t m : {1, 3, 70}) {
    for (const int64_t k : {1, 4, 31, 66, 576, 1000}) {
      for (const int64_t group : {0, 4, 20, 32, 64, 2000}) {
        Quantize q(m, k, group, (m + k) % 2);
        check(q);
      }
    }
  }
}

// Halves go to the even integer: 127 is the largest, so that the factor is 1.
void ties_to_even() {
  Quantize q(1, 32, 32, 0);
  for (int64_t i = 0; i < 32; ++i) q.x[static_cast<size_t>(i)] = static_cast<float>(i - 16) + 0.5f;
  q.x[31] = -127;
  check(q);
  CHECK(q.values[16] == 0 && q.values[17] == 2 && q.values[18] == 2 && q.values[15] == 0 &&
        q.values[31] == -127);
  CHECK(q.scales[0] == 1);
}

// Zeros; numbers whose 127 / max is infinite; NaN and infinity, in each place of a group; the neighbours'
// groups as if nothing were there.
void special_groups() {
  for (const float special : {kNaN, -kNaN, kInf, -kInf}) {
    for (const int64_t group : {32, 36}) {  // lanes of several groups are reduced together, or not
      for (int64_t place = 0; place < group; ++place) {
        Quantize q(2, 3 * group, group, 0);
        q.x[static_cast<size_t>(group + place)] = special;
        check(q);
        CHECK(std::isnan(q.scales[1]) && q.sums[1] == 0);
        CHECK(q.values[static_cast<size_t>(group)] == 0 && q.values[static_cast<size_t>(2 * group - 1)] == 0);
        CHECK(q.scales[0] > 0 && q.scales[2] > 0 && q.scales[4] > 0);
      }
    }
  }
  for (const float tiny : {0.0f, -0.0f, 1e-40f, 1e-38f, 3e-37f}) {
    Quantize q(1, 96, 32, 0);
    std::fill(q.x.begin() + 32, q.x.begin() + 64, tiny);
    check(q);
    CHECK(q.scales[1] == 0 && q.sums[1] == 0 && q.values[40] == 0 && q.scales[0] > 0);
  }
  for (const float size : {4e-37f, 1e-30f, 1e30f, 3e38f}) {  // the ends of what has a scale
    Quantize q(1, 40, 0, 0);
    for (float& v : q.x) v *= size / 20;
    q.x[7] = size;
    check(q);
    CHECK(q.values[7] == 127 && q.scales[0] > 0);
  }
}

void cast_is_the_nearest() {
  std::vector<float> x = random_floats(65536, 1);
  for (size_t i = 0; i < x.size(); ++i) {  // every exponent and sign, ties among them
    const uint32_t bits =
        static_cast<uint32_t>(i) << 16 | (i % 3 == 0 ? 0x8000u : static_cast<uint32_t>(i * 40503));
    std::memcpy(&x[i], &bits, sizeof bits);
  }
  for (const int64_t k : {1, 2, 31, 577, 65536}) {
    const int64_t m = 65536 / k < 5 ? 65536 / k : 5, stride = (k + 1) / 2 * 2 + 2;
    std::vector<uint16_t> expected(static_cast<size_t>(m * stride), 77);
    CastBf16Args a;
    a.m = m, a.k = k, a.x = x.data(), a.x_stride = k, a.out = expected.data(), a.out_stride = stride;
    reference::cast_bf16(a);
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      std::vector<uint16_t> out(expected.size(), 77);
      a.out = out.data();
      kernels.cast_bf16(a, pool);
      CHECK(out == expected) << what << " k=" << k;
    });
  }
}

void embeddings_are_exact() {
  const int64_t vocabulary = 70, tokens = 33;
  const auto ids = random_ints(tokens, vocabulary, 3);
  for (const int64_t hidden : {1, 30, 33, 512, 576}) {
    const auto numbers = random_floats(vocabulary * hidden, 1);
    std::vector<uint16_t> rows(numbers.size());
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = reference::to_bf16(numbers[i]);
    const auto panels = to_packed_panels<uint16_t>(rows, vocabulary, hidden, 2, 0);
    const auto bytes = to_panels_int8(random_bytes(vocabulary * hidden, 2), vocabulary, hidden);
    std::vector<float> expected = filled(tokens * (hidden + 3), -7);
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      for (const WeightLayout layout : {WeightLayout::rows, WeightLayout::panel32x2}) {
        std::vector<float> out = filled(tokens * (hidden + 3), -7);
        EmbeddingBf16Args a;
        a.tokens = tokens, a.hidden = hidden, a.ids = ids.data(), a.layout = layout;
        a.weight = layout == WeightLayout::rows ? rows.data() : panels.data();
        a.out = expected.data(), a.out_stride = hidden + 3;
        reference::embedding_bf16(a);
        a.out = out.data();
        kernels.embedding_bf16(a, pool);
        CHECK(same_bits(out, expected)) << what << " bf16 hidden=" << hidden;
      }
      struct Few {
        int64_t bits, group, block;
      };
      for (const auto& [bits, group, block] :
           {Few{4, 32, 0}, Few{4, 64, 0}, Few{5, 32, 0}, Few{6, 16, 16}, Few{4, 32, 8}, Few{5, 32, 8},
            Few{3, 16, 16}, Few{3, 32, 0}, Few{2, 16, 16}, Few{2, 64, 0}}) {
        if (hidden % group != 0 || (block > 0 && hidden / group % block != 0)) continue;
        const auto few = to_planes(random_ints(vocabulary * hidden, 1 << bits, 2), vocabulary, hidden, bits);
        const auto offsets = random_scales(vocabulary, hidden / group, block);
        auto scales = random_scales(vocabulary, hidden / group, block, 5);
        // Of both signs, as bytes are: GGUF has negative ones.
        for (size_t i = 0; block == 0 && i < scales.size(); i += 3) scales[i] ^= 0x8000;
        for (const bool shifted : {false, true}) {
          std::vector<float> out = filled(tokens * (hidden + 3), -7);
          EmbeddingInt4Args a;
          a.tokens = tokens, a.hidden = hidden, a.group_size = group, a.ids = ids.data();
          a.bits = bits, a.scale_block = block;
          a.weight = few.data(), a.scales = scales.data();
          a.offsets = shifted ? offsets.data() : nullptr;
          a.out = expected.data(), a.out_stride = hidden + 3;
          reference::embedding_int4(a);
          a.out = out.data();
          kernels.embedding_int4(a, pool);
          CHECK(same_bits(out, expected))
              << what << " bits " << bits << " hidden=" << hidden << " group " << group;
        }
      }
      for (const int64_t group : {0, 4, 32, 64, -32}) {  // below 0: in blocks of 8 groups
        if (group < 0 && hidden % 256 != 0) continue;
        const auto scales =
            group < 0 ? random_scales(vocabulary, hidden / 32, 8)
                      : random_half_panels(vocabulary, group > 0 ? (hidden + group - 1) / group : 1);
        std::vector<float> out = filled(tokens * (hidden + 3), -7);
        EmbeddingInt8Args a;
        a.tokens = tokens, a.hidden = hidden, a.group_size = std::abs(group), a.ids = ids.data();
        a.scale_block = group < 0 ? 8 : 0;
        a.weight = bytes.data(), a.scales = scales.data();
        a.out = expected.data(), a.out_stride = hidden + 3;
        reference::embedding_int8(a);
        a.out = out.data();
        kernels.embedding_int8(a, pool);
        CHECK(same_bits(out, expected)) << what << " int8 hidden=" << hidden << " group " << group;
      }
    });
  }
}

void empty_sizes() {
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string&) {
    Quantize none(0, 8, 4, 0);
    none.run([&](const QuantizeActivationArgs& a) { kernels.quantize_activation(a, pool); });
    CHECK(none.values.empty());
    kernels.cast_bf16({}, pool);
    kernels.embedding_bf16({}, pool);
    kernels.embedding_int8({}, pool);
    kernels.embedding_int4({}, pool);
  });
}

}  // namespace

int main() {
  RUN(equals_reference);
  RUN(ties_to_even);
  RUN(special_groups);
  RUN(cast_is_the_nearest);
  RUN(embeddings_are_exact);
  RUN(empty_sizes);
  return check::result();
}
