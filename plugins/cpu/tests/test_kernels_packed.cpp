// Attention without a cache, and pooling: ops that read all tokens of a request at once.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <tuple>

#include "test_kernels.h"

namespace ew::reference {
namespace {

// In double, the plain formula.
void attention(const AttentionArgs& a) {
  for (int64_t b = 0; b < a.spans.requests; ++b) {
    const int64_t begin = a.spans.begin(b), end = a.spans.end(b);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < a.query_heads; ++h) {
        const int64_t kv_head = h / (a.query_heads / a.kv_heads);
        std::vector<double> scores, out(static_cast<size_t>(a.value_size));
        std::vector<int64_t> keys;
        double best = a.sinks != nullptr ? a.sinks[h] : -std::numeric_limits<double>::infinity();
        for (int64_t key = begin; key < end; ++key) {
          const int64_t distance = key - t;
          if ((a.causal && distance > 0) || (a.window > 0 && std::abs(distance) >= a.window)) continue;
          double s = 0;
          for (int64_t d = 0; d < a.key_size; ++d) s += double{row(a.q, t, h)[d]} * row(a.k, key, kv_head)[d];
          s *= a.scale;
          if (a.softcap > 0) s = a.softcap * std::tanh(s / a.softcap);
          if (a.slopes != nullptr) s -= double{a.slopes[h]} * static_cast<double>(std::abs(distance));
          if (a.biases.data != nullptr) {
            const int64_t reach = a.biases.reach;
            s += a.biases.data[h * a.biases.stride + reach + std::clamp(distance, -reach, reach)];
          }
          scores.push_back(s);
          keys.push_back(key);
          best = std::max(best, s);
        }
        double total = a.sinks != nullptr ? std::exp(a.sinks[h] - best) : 0;
        for (size_t i = 0; i < keys.size(); ++i) {
          const double p = std::exp(scores[i] - best);
          total += p;
          for (size_t d = 0; d < out.size(); ++d) out[d] += p * row(a.v, keys[i], kv_head)[d];
        }
        for (size_t d = 0; d < out.size(); ++d) row(a.out, t, h)[d] = static_cast<float>(out[d] / total);
      }
    }
  }
}

}  // namespace
}  // namespace ew::reference

using namespace ew;
using namespace ew::testing;

namespace {

struct Options {
  int64_t heads = 2, kv_heads = 2, key_size = 32, value_size = 32, window = 0;
  bool causal = false;
  float softcap = 0;
  bool sinks = false, slopes = false;
  int64_t reach = -1;  // of biases; -1: none
  KvFormat format = KvFormat::f32;
};

std::string describe(const Options& o) {
  return " heads " + std::to_string(o.heads) + "/" + std::to_string(o.kv_heads) + " D " +
         std::to_string(o.key_size) + "/" + std::to_string(o.value_size) + " window " +
         std::to_string(o.window) + (o.causal ? " causal" : "") + " reach " + std::to_string(o.reach) + " " +
         kKvFormats[static_cast<size_t>(o.format)].name;
}

const std::vector<Options> kFloats = {
    {},
    {.heads = 12, .kv_heads = 12},
    {.heads = 9, .kv_heads = 3, .key_size = 64, .value_size = 64, .causal = true},
    {.heads = 4, .kv_heads = 1, .key_size = 8, .value_size = 8, .sinks = true},
    {.heads = 3, .kv_heads = 1, .key_size = 80, .value_size = 80, .window = 20},
    {.heads = 2, .kv_heads = 1, .key_size = 20, .value_size = 36, .softcap = 3},
    {.heads = 4,
     .kv_heads = 4,
     .key_size = 96,
     .value_size = 128,
     .window = 140,
     .softcap = 20,
     .sinks = true},
    {.heads = 4, .kv_heads = 2, .key_size = 16, .value_size = 16, .slopes = true},
    {.heads = 3,
     .kv_heads = 3,
     .key_size = 40,
     .value_size = 24,
     .window = 50,
     .causal = true,
     .slopes = true},
    {.heads = 40, .kv_heads = 1, .key_size = 16, .value_size = 16},  // more heads than a tile has rows
    {.heads = 1, .kv_heads = 1, .key_size = 256, .value_size = 256, .window = 1},
    {.heads = 6,
     .kv_heads = 2,
     .key_size = 33,
     .value_size = 17,
     .softcap = 5,
     .sinks = true,
     .slopes = true,
     .reach = 40},
    {.heads = 12, .kv_heads = 12, .key_size = 64, .value_size = 64, .reach = 127},
    {.heads = 1, .kv_heads = 1, .key_size = 1, .value_size = 1, .reach = 0},
};

// Each with keys and values as floats, and as bf16.
const std::vector<Options> kOptions = [] {
  std::vector<Options> all = kFloats;
  for (Options o : kFloats) {
    o.format = KvFormat::bf16;
    all.push_back(o);
  }
  return all;
}();

// The same numbers for a token of a request, whatever else is in the step.
class Scene {
 public:
  // `requests` are the requests' numbers, `tokens` how many each of them has.
  Scene(const Options& o, const std::vector<int>& requests, const std::vector<int64_t>& tokens) : o_(o) {
    const int64_t q_row = o.heads * o.key_size, k_row = o.kv_heads * o.key_size,
                  v_row = o.kv_heads * o.value_size;
    q_start_.push_back(0);
    for (const int number : requests) {
      const int64_t count = tokens[static_cast<size_t>(number)];
      const unsigned seed = static_cast<unsigned>(3 * number);
      for (const auto& [to, row, at] : {std::tuple{&q_, q_row, 1u}, {&k_, k_row, 2u}, {&v_, v_row, 3u}}) {
        const auto floats = random_floats(count * row, seed + at, at == 2 ? 2 : 1);
        to->insert(to->end(), floats.begin(), floats.end());
      }
      q_start_.push_back(q_start_.back() + static_cast<int32_t>(count));
    }
    sinks_ = random_floats(o.heads, 17);
    for (int64_t h = 0; h < o.heads; ++h) slopes_.push_back(std::exp2(-static_cast<float>(1 + h % 8)));
    if (o.reach >= 0) biases_ = random_floats(o.heads * (2 * o.reach + 1), 19);
  }

  AttentionArgs args() {
    AttentionArgs a;
    a.spans = {static_cast<int64_t>(q_start_.size()) - 1, q_start_.data()};
    a.query_heads = o_.heads, a.kv_heads = o_.kv_heads;
    a.key_size = o_.key_size, a.value_size = o_.value_size;
    a.q = {q_.data(), o_.heads * o_.key_size, o_.key_size};
    a.k = {k_.data(), o_.kv_heads * o_.key_size, o_.key_size};
    a.v = {v_.data(), o_.kv_heads * o_.value_size, o_.value_size};
    a.sinks = o_.sinks ? sinks_.data() : nullptr;
    a.slopes = o_.slopes ? slopes_.data() : nullptr;
    if (o_.reach >= 0) a.biases = {biases_.data(), 2 * o_.reach + 1, o_.reach};
    a.scale = 1 / std::sqrt(static_cast<float>(o_.key_size));
    a.window = o_.window;
    a.softcap = o_.softcap;
    a.causal = o_.causal;
    a.format = o_.format;
    a.workspace = &workspace_;
    return a;
  }

  template <class F>
  std::vector<float> run(const F& fn) {
    std::vector<float> out = filled(q_start_.back() * o_.heads * o_.value_size, kNaN);
    AttentionArgs a = args();
    a.out = {out.data(), o_.heads * o_.value_size, o_.value_size};
    fn(a);
    return out;
  }

  std::vector<float>& values() { return v_; }
  std::vector<float>& keys() { return k_; }
  const std::vector<int32_t>& q_start() const { return q_start_; }
  int64_t row() const { return o_.heads * o_.value_size; }

 private:
  Options o_;
  std::vector<int32_t> q_start_;
  std::vector<float> q_, k_, v_, sinks_, slopes_, biases_;
  Workspace workspace_;
};

const std::vector<int64_t> kTokens = {1, 16, 128, 33, 0, 600, 48, 5};

// As in test_kernels_attention.cpp: a few tens of eps; and 2^-8 of the largest value, where keys too are
// rounded.
double tolerance(KvFormat format) { return format == KvFormat::f32 ? 4e-6 : 10.0 / 256; }

void equals_reference() {
  for (const Options& o : kOptions) {
    if (left_out()) continue;
    Scene scene(o, {0, 1, 2, 3, 4, 5, 6, 7}, kTokens);
    const auto expected = scene.run([](const AttentionArgs& a) { reference::attention(a); });
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const auto out = scene.run([&](const AttentionArgs& a) { kernels.attention(a, pool); });
      CHECK(worst(out, expected, tolerance(o.format), 0) <= 1)
          << what << describe(o) << ": " << worst(out, expected, tolerance(o.format), 0)
          << " of the tolerance";
    });
  }
}

// Alone, in a batch of any order, with any threads: the same bits.
void same_bits_in_any_company() {
  for (const Options& o : kOptions) {
    if (left_out()) continue;
    for (const std::string& isa : available_isas()) {
      const KernelTable& kernels = *kernels_for(isa.c_str());
      std::vector<std::vector<float>> alone;
      for (const int threads : {1, 2, 4}) {
        if (kOneIn > 1 && threads == 2) continue;
        ThreadPool pool(threads);
        const auto attend = [&](const AttentionArgs& a) { kernels.attention(a, pool); };
        for (int number = 0; number < static_cast<int>(kTokens.size()); ++number) {
          const auto out = Scene(o, {number}, kTokens).run(attend);
          if (threads == 1) alone.push_back(out);
          CHECK(same_bits(out, alone[static_cast<size_t>(number)]))
              << isa << describe(o) << " threads " << threads;
        }
        for (const std::vector<int>& order :
             {std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}, {7, 5, 1, 6, 2}, {2, 0, 3}}) {
          Scene scene(o, order, kTokens);
          const auto out = scene.run(attend);
          for (size_t i = 0; i < order.size(); ++i) {
            const auto& expected = alone[static_cast<size_t>(order[i])];
            const std::vector<float> own(out.begin() + scene.q_start()[i] * scene.row(),
                                         out.begin() + scene.q_start()[i + 1] * scene.row());
            CHECK(same_bits(own, expected))
                << isa << describe(o) << " threads " << threads << " request " << order[i];
          }
        }
      }
    }
  }
}

// Keys and values as a cache of floats has them: a causal result has the bits of paged_attention.
void causal_has_the_bits_of_a_cache() {
  for (Options o : kOptions) {
    if (o.reach >= 0 || left_out()) continue;
    o.causal = true;
    Scene scene(o, {1, 5, 2}, kTokens);
    const AttentionArgs args = scene.args();
    std::vector<int32_t> table, slots, lengths;
    int32_t blocks = 0;
    for (size_t b = 0; b < 3; ++b) {
      const int32_t tokens = scene.q_start()[b + 1] - scene.q_start()[b];
      lengths.push_back(tokens);
      for (int32_t i = 0; i < 32; ++i) table.push_back(blocks + i);
      for (int32_t t = 0; t < tokens; ++t) slots.push_back(blocks * static_cast<int32_t>(kBlock) + t);
      blocks += 32;
    }
    const KvShape shape{o.kv_heads, o.key_size, o.value_size, o.format};
    std::vector<char> k(static_cast<size_t>(shape.pieces(blocks) * shape.key_bytes()), 0);
    std::vector<char> v(static_cast<size_t>(shape.pieces(blocks) * shape.value_bytes()), 0);
    const KvCache cache = {shape, k.data(), v.data()};
    reference::kv_write({scene.q_start().back(), args.k, args.v, slots.data(), cache});
    Workspace workspace;
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      if (std::string(kernels.isa) == "avx512_amx" && o.format != KvFormat::f32)
        return;  // whose cache has tiles
      const auto packed = scene.run([&](const AttentionArgs& a) { kernels.attention(a, pool); });
      const auto paged = scene.run([&](const AttentionArgs& a) {
        PagedAttentionArgs p;
        p.spans = a.spans, p.query_heads = o.heads;
        p.q = a.q, p.out = a.out, p.cache = cache;
        p.block_table = table.data(), p.block_table_stride = 32;
        p.kv_len = lengths.data();
        p.sinks = a.sinks, p.slopes = a.slopes;
        p.scale = a.scale, p.window = a.window, p.softcap = a.softcap;
        p.workspace = &workspace;
        kernels.paged_attention(p, pool);
      });
      CHECK(same_bits(packed, paged)) << what << describe(o);
    });
  }
}

// Queries, keys, values and results as slices of wider buffers, as a fused q/k/v gives.
void strides() {
  const Options o{.heads = 4, .kv_heads = 2, .key_size = 16, .value_size = 16, .window = 9};
  Scene scene(o, {3, 0, 1}, kTokens);
  const int64_t tokens = scene.q_start().back();
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto plain = scene.run([&](const AttentionArgs& a) { kernels.attention(a, pool); });
    AttentionArgs a = scene.args();
    std::vector<float> wide = filled(tokens * 160, kNaN), out = filled(tokens * 90, -7);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < 4; ++h)
        std::copy_n(a.q.data + t * 64 + h * 16, 16, wide.data() + t * 160 + h * 20);
      for (int64_t h = 0; h < 2; ++h) {
        std::copy_n(a.k.data + t * 32 + h * 16, 16, wide.data() + t * 160 + 80 + h * 18);
        std::copy_n(a.v.data + t * 32 + h * 16, 16, wide.data() + t * 160 + 120 + h * 17);
      }
    }
    a.q = {wide.data(), 160, 20};
    a.k = {wide.data() + 80, 160, 18};
    a.v = {wide.data() + 120, 160, 17};
    a.out = {out.data(), 90, 17};
    kernels.attention(a, pool);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        CHECK(std::memcmp(out.data() + t * 90 + h * 17, plain.data() + t * 64 + h * 16, 64) == 0) << what;
        CHECK(out[static_cast<size_t>(t * 90 + h * 17 + 16)] == -7) << what;
      }
    }
  });
}

// NaN and infinity reach neither other requests nor queries that don't see them.
void special_values_stay_where_they_are() {
  const Options o{.heads = 2, .kv_heads = 2, .window = 10};
  Scene clean(o, {1, 3, 2}, kTokens), spoiled(o, {1, 3, 2}, kTokens);
  const int64_t bad = 16 + 20, row = 64;  // token 20 of the request in the middle
  std::fill_n(spoiled.values().begin() + bad * row, row, kNaN);
  std::fill_n(spoiled.keys().begin() + bad * row, row, std::numeric_limits<float>::infinity());
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto attend = [&](const AttentionArgs& a) { kernels.attention(a, pool); };
    const auto expected = clean.run(attend), out = spoiled.run(attend);
    for (int64_t t = 0; t < clean.q_start().back(); ++t) {
      const bool sees = std::abs(t - bad) < 10;
      const auto at = static_cast<size_t>(t * row);
      if (sees) {
        CHECK(std::isnan(out[at])) << what << " token " << t;
      } else {
        CHECK(std::memcmp(&out[at], &expected[at], row * 4) == 0) << what << " token " << t;
      }
    }
  });
}

constexpr PoolKind kKinds[] = {PoolKind::mean, PoolKind::cls, PoolKind::last, PoolKind::max,
                               PoolKind::weighted};

double pooled(PoolKind kind, const std::vector<float>& x, int64_t size, int64_t begin, int64_t end,
              int64_t c) {
  const auto at = [&](int64_t t) { return double{x[static_cast<size_t>(t * size + c)]}; };
  if (begin == end) return 0;
  if (kind == PoolKind::cls) return at(begin);
  if (kind == PoolKind::last) return at(end - 1);
  double sum = 0, weights = 0, most = at(begin);
  for (int64_t t = begin; t < end; ++t) {
    const double weight = kind == PoolKind::weighted ? static_cast<double>(t - begin + 1) : 1;
    sum += weight * at(t), weights += weight, most = std::max(most, at(t));
  }
  return kind == PoolKind::max ? most : sum / weights;
}

void pools() {
  for (const int64_t size : {1, 17, 384, 1000}) {
    std::vector<int32_t> q_start = {0};
    for (const int64_t tokens : kTokens) q_start.push_back(q_start.back() + static_cast<int32_t>(tokens));
    const int64_t requests = static_cast<int64_t>(kTokens.size()), stride = size + 3;
    const auto x = random_floats(q_start.back() * size, 5);
    for (const PoolKind kind : kKinds) {
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        std::vector<float> out = filled(requests * stride, -7);
        kernels.pool({{requests, q_start.data()}, size, {x.data(), size, 0}, kind, {out.data(), stride, 0}},
                     pool);
        for (int64_t b = 0; b < requests; ++b) {
          const int64_t begin = q_start[static_cast<size_t>(b)], end = q_start[static_cast<size_t>(b) + 1];
          for (int64_t c = 0; c < size; ++c) {
            // Sums of up to 600 numbers of size 1.
            CHECK(std::fabs(out[static_cast<size_t>(b * stride + c)] - pooled(kind, x, size, begin, end, c)) <
                  2e-6)
                << what << " kind " << static_cast<int>(kind) << " request " << b << " column " << c;
          }
          for (int64_t c = size; c < stride; ++c)
            CHECK(out[static_cast<size_t>(b * stride + c)] == -7) << what;
          if (begin == end) continue;
          const int32_t own[2] = {0, static_cast<int32_t>(end - begin)};
          std::vector<float> alone(static_cast<size_t>(size));
          kernels.pool({{1, own}, size, {x.data() + begin * size, size, 0}, kind, {alone.data(), size, 0}},
                       pool);
          CHECK(std::memcmp(alone.data(), out.data() + b * stride, static_cast<size_t>(size) * 4) == 0)
              << what;
        }
      });
    }
  }
}

void a_largest_keeps_nan() {
  const int32_t q_start[2] = {0, 3};
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    for (size_t bad = 0; bad < 3; ++bad) {
      std::vector<float> x = {1, 2, 3}, out(1);
      x[bad] = kNaN;
      kernels.pool({{1, q_start}, 1, {x.data(), 1, 0}, PoolKind::max, {out.data(), 1, 0}}, pool);
      CHECK(std::isnan(out[0])) << what;
    }
  });
}

}  // namespace

int main() {
  RUN(equals_reference);
  RUN(same_bits_in_any_company);
  RUN(causal_has_the_bits_of_a_cache);
  RUN(strides);
  RUN(special_values_stay_where_they_are);
  RUN(pools);
  RUN(a_largest_keeps_nan);
  return check::result();
}
