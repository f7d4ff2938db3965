// top_k, gather, scatter, route_experts, combine_experts and the linears of experts.
#include <numeric>

#include "test_kernels.h"

using namespace ew;
using namespace ew::testing;

namespace {

void top_k() {
  for (const int64_t size : {1, 5, 16, 33, 300}) {
    for (const int64_t k : {1, 2, 5, 33}) {
      if (k > size) continue;
      for (const bool ties : {false, true}) {
        const int64_t outer = 40, inner = 2, gap = 3;
        auto x = random_floats(outer * inner * (size + gap), 1);
        if (ties) {
          for (float& v : x) v = std::round(v);  // many equal values, zeros of both signs
          x[0] = kNaN, x[static_cast<size_t>(size - 1)] = kInf;
        }
        TopKArgs a;
        a.outer = outer, a.inner = inner, a.size = size, a.k = k;
        a.x = {x.data(), inner * (size + gap), size + gap};
        for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
          auto values = filled(outer * inner * (k + 1), -7);
          std::vector<int32_t> indices(values.size(), -7);
          a.values = {values.data(), inner * (k + 1), k + 1};
          a.indices = {indices.data(), inner * (k + 1), k + 1};
          kernels.top_k(a, pool);
          for (int64_t row = 0; row < outer * inner; ++row) {
            const float* from = x.data() + row * (size + gap);
            std::vector<int32_t> order(static_cast<size_t>(size));
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) {
              return (std::isnan(from[i]) && !std::isnan(from[j])) || from[i] > from[j];
            });
            const size_t to = static_cast<size_t>(row * (k + 1));
            for (size_t i = 0; i < static_cast<size_t>(k); ++i) {
              CHECK(indices[to + i] == order[i]) << what << " size " << size << " k " << k << " row " << row;
              CHECK(std::memcmp(&values[to + i], from + order[i], 4) == 0) << what << " row " << row;
            }
            CHECK(indices[to + static_cast<size_t>(k)] == -7) << what;
          }
        });
      }
    }
  }
}

void gather_and_scatter() {
  for (const int64_t size : {1, 7, 40}) {
    for (const int64_t count : {1, 3, 17}) {
      const int64_t outer = 30, inner = 3;
      const auto x = random_floats(outer * inner * size, 1);
      const auto indices = random_ints(outer * inner * (count + 2), static_cast<int32_t>(size), 2);
      const Rows<const int32_t> places{indices.data(), inner * (count + 2), count + 2};
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        GatherArgs g;
        g.outer = outer, g.inner = inner, g.count = count, g.indices = places;
        g.x = {reinterpret_cast<const int32_t*>(x.data()), inner * size, size};
        auto taken = filled(outer * inner * count, -7), set = filled(outer * inner * size, -7);
        g.out = {reinterpret_cast<int32_t*>(taken.data()), inner * count, count};
        kernels.gather(g, pool);
        ScatterArgs s;
        s.outer = outer, s.inner = inner, s.size = size, s.count = count, s.indices = places, s.value = 9;
        s.x = {x.data(), inner * size, size};
        s.out = {set.data(), inner * size, size};
        kernels.scatter(s, pool);
        auto expected = x;
        for (int64_t row = 0; row < outer * inner; ++row) {
          for (int64_t i = 0; i < count; ++i) {
            const int64_t at = row * size + indices[static_cast<size_t>(row * (count + 2) + i)];
            CHECK(taken[static_cast<size_t>(row * count + i)] == x[static_cast<size_t>(at)]) << what;
            expected[static_cast<size_t>(at)] = 9;
          }
        }
        CHECK(same_bits(set, expected)) << what << " size " << size << " count " << count;
      });
    }
  }
}

struct Routed {
  std::vector<int32_t> order, rows, starts;
};

Routed route(const KernelTable& kernels, ThreadPool& pool, const std::vector<int32_t>& ids, int64_t tokens,
             int64_t choices, int64_t experts, int64_t stride) {
  Routed r;
  r.order.resize(static_cast<size_t>(tokens * choices));
  r.rows.resize(r.order.size());
  r.starts.assign(static_cast<size_t>(experts + 1), -7);
  RouteExpertsArgs a;
  a.tokens = tokens, a.choices = choices, a.experts = experts, a.ids = ids.data(), a.ids_stride = stride;
  a.order = r.order.data(), a.rows = r.rows.data(), a.starts = r.starts.data();
  kernels.route_experts(a, pool);
  return r;
}

void route_experts() {
  for (const int64_t tokens : {1, 9, 200}) {
    for (const int64_t choices : {1, 3}) {
      for (const int32_t experts : {1, 4, 64}) {
        const int64_t stride = choices + 1;
        const auto ids = random_ints(tokens * stride, experts, 3);
        const auto id = [&](int32_t place) {
          return ids[static_cast<size_t>(place / choices * stride + place % choices)];
        };
        std::vector<int32_t> expected(static_cast<size_t>(tokens * choices));
        std::iota(expected.begin(), expected.end(), 0);
        std::stable_sort(expected.begin(), expected.end(),
                         [&](int32_t i, int32_t j) { return id(i) < id(j); });
        for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
          const Routed r = route(kernels, pool, ids, tokens, choices, experts, stride);
          CHECK(r.order == expected) << what << " experts " << experts;
          CHECK(r.starts.front() == 0 && r.starts.back() == tokens * choices) << what;
          for (int32_t e = 0; e < experts; ++e) {
            for (int32_t i = r.starts[static_cast<size_t>(e)]; i < r.starts[static_cast<size_t>(e) + 1];
                 ++i) {
              const size_t at = static_cast<size_t>(i);
              CHECK(id(r.order[at]) == e && r.rows[at] == r.order[at] / choices) << what << " place " << i;
            }
          }
        });
      }
    }
  }
}

void combine_experts() {
  for (const int64_t tokens : {1, 50}) {
    for (const int64_t choices : {1, 4}) {
      for (const int64_t size : {1, 16, 70}) {
        const auto y = random_floats(tokens * choices * (size + 1), 1);
        const auto weights = random_floats(tokens * (choices + 2), 2);
        std::vector<int32_t> places(static_cast<size_t>(tokens * choices));
        std::iota(places.begin(), places.end(), 0);
        std::shuffle(places.begin(), places.end(), std::mt19937(3));
        CombineExpertsArgs a;
        a.tokens = tokens, a.choices = choices, a.size = size, a.y = y.data(), a.y_stride = size + 1;
        a.places = places.data(), a.weights = weights.data(), a.weights_stride = choices + 2;
        a.out_stride = size + 3;
        for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
          const bool fused = std::strcmp(kernels.isa, "portable") != 0;
          auto out = filled(tokens * (size + 3), -7), expected = out;
          a.out = out.data();
          kernels.combine_experts(a, pool);
          for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t c = 0; c < size; ++c) {
              float sum = 0;
              for (int64_t j = 0; j < choices; ++j) {
                const float w = weights[static_cast<size_t>(t * (choices + 2) + j)];
                const float v =
                    y[static_cast<size_t>(places[static_cast<size_t>(t * choices + j)] * (size + 1) + c)];
                sum = fused ? std::fma(w, v, sum) : w * v + sum;
              }
              expected[static_cast<size_t>(t * (size + 3) + c)] = sum;
            }
          }
          CHECK(same_bits(out, expected)) << what << " choices " << choices << " size " << size;
        });
      }
    }
  }
}

// Rows per expert: none, one, and enough for every block size.
const std::vector<int32_t> kStarts = {0, 0, 1, 1, 8, 40, 150};

// Experts first .. past-1 of all.
template <class Linear>
Grouped<Linear> some_of(Grouped<Linear> g, int64_t first, int64_t past) {
  g.experts = past - first;
  g.starts += first;
  g.all.weight += first * g.weight_stride;
  g.all.bias += first * g.bias_stride;
  if constexpr (requires { g.all.weight_scales; }) g.all.weight_scales += first * g.scales_stride;
  if constexpr (requires { g.all.weight_offsets; }) {
    if (g.all.weight_offsets != nullptr) g.all.weight_offsets += first * g.scales_stride;
  }
  return g;
}

// Each row's bits are those that it has in a plain linear with its expert's weight, alone. With some of the
// experts their rows are written, and no other.
template <class Linear, class Run, class Alone>
void check_grouped(const Grouped<Linear>& g, const Run& run, const Alone& alone, const std::string& what) {
  const int64_t n = g.all.n, rows = kStarts.back();
  auto y = filled(rows * (n + 1), -7), expected = y;
  Grouped<Linear> args = g;
  args.all.y = y.data(), args.all.y_stride = n + 1;
  run(args);
  for (size_t e = 0; e + 1 < kStarts.size(); ++e) {
    for (int64_t row = kStarts[e]; row < kStarts[e + 1]; ++row) {
      Linear one = args.all;
      one.m = 1;
      one.y = expected.data() + row * (n + 1);
      one.weight += static_cast<int64_t>(e) * g.weight_stride;
      one.bias += static_cast<int64_t>(e) * g.bias_stride;
      alone(one, row, static_cast<int64_t>(e));
    }
  }
  CHECK(same_bits(y, expected)) << what;
  const int64_t all = g.experts;
  for (const auto& [first, past] : {std::pair<int64_t, int64_t>{0, 2}, {1, 4}, {3, all}, {all - 1, all}}) {
    Grouped<Linear> part = some_of(g, first, past);
    auto some = filled(rows * (n + 1), -7), wanted = some;
    part.all.y = some.data(), part.all.y_stride = n + 1;
    run(part);
    const auto row = [&](int64_t e) { return kStarts[static_cast<size_t>(e)] * (n + 1); };
    std::copy(expected.begin() + row(first), expected.begin() + row(past), wanted.begin() + row(first));
    CHECK(same_bits(some, wanted)) << what << " experts " << first << " to " << past;
  }
}

template <class T>
void append(std::vector<T>& to, const std::vector<T>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

void grouped_linears() {
  const int64_t rows = kStarts.back(), experts = static_cast<int64_t>(kStarts.size()) - 1;
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{5, 3}, {33, 70}, {96, 64}, {700, 288}}) {
    const int64_t panels = (n + 31) / 32, quads = (k + 3) / 4, pairs = (k + 1) / 2, groups = (k + 31) / 32;
    const auto x = random_floats(rows * k, 1), bias = random_floats(experts * n, 2);
    std::vector<float> weight;
    std::vector<uint16_t> narrow, half;
    std::vector<uint8_t> bytes, nibbles;
    for (int64_t e = 0; e < experts; ++e) {
      const auto matrix = random_floats(n * k, static_cast<unsigned>(10 + e));
      std::vector<uint16_t> bits;
      for (const float v : matrix) bits.push_back(reference::to_bf16(v));
      append(weight, to_panels(matrix, n, k));
      append(narrow, to_packed_panels<uint16_t>(bits, n, k, 2, 0));
      append(bytes, to_panels_int8(random_bytes(n * k, static_cast<unsigned>(20 + e)), n, k));
      if (k % 32 == 0)
        append(nibbles, to_panels_int4(random_ints(n * k, 16, static_cast<unsigned>(30 + e)), n, k));
      append(half, random_half_panels(n, groups, static_cast<unsigned>(40 + e)));
    }
    Grouped<LinearArgs> f;
    f.all.m = rows, f.all.n = n, f.all.k = k, f.all.x = x.data(), f.all.x_stride = k;
    f.all.weight = weight.data(), f.all.bias = bias.data();
    f.experts = experts, f.starts = kStarts.data(), f.weight_stride = panels * 32 * k, f.bias_stride = n;

    std::vector<uint16_t> narrow_x(static_cast<size_t>(rows * pairs * 2));
    for (int64_t i = 0; i < rows * k; ++i)
      narrow_x[static_cast<size_t>(i / k * pairs * 2 + i % k)] =
          reference::to_bf16(x[static_cast<size_t>(i)]);
    Grouped<LinearBf16Args> b;
    b.all.m = rows, b.all.n = n, b.all.k = k, b.all.x = narrow_x.data(), b.all.x_stride = pairs * 2;
    b.all.weight = narrow.data(), b.all.bias = bias.data();
    b.experts = experts, b.starts = kStarts.data(), b.weight_stride = panels * pairs * 64, b.bias_stride = n;

    std::vector<int8_t> values(static_cast<size_t>(rows * quads * 4));
    std::vector<float> scales(static_cast<size_t>(rows * groups));
    std::vector<int32_t> sums(scales.size());
    QuantizeActivationArgs q;
    q.m = rows, q.k = k, q.group_size = 32, q.x = x.data(), q.x_stride = k;
    q.values = values.data(), q.values_stride = quads * 4;
    q.scales = scales.data(), q.scales_stride = groups, q.sums = sums.data(), q.sums_stride = groups;
    reference::quantize_activation(q);
    Grouped<LinearInt8Args> i;
    i.all.m = rows, i.all.n = n, i.all.k = k, i.all.weight_group = i.all.activation_group = 32;
    i.all.values = values.data(), i.all.values_stride = quads * 4;
    i.all.scales = scales.data(), i.all.scales_stride = groups;
    i.all.sums = sums.data(), i.all.sums_stride = groups;
    i.all.weight = bytes.data(), i.all.weight_scales = half.data(), i.all.bias = bias.data();
    i.experts = experts, i.starts = kStarts.data(), i.weight_stride = panels * quads * 128;
    i.scales_stride = panels * groups * 32, i.bias_stride = n;

    const std::vector<uint16_t> shifts(half.rbegin(), half.rend());
    Grouped<LinearInt4Args> j;
    j.all.m = rows, j.all.n = n, j.all.k = k, j.all.group = 32;
    j.all.values = values.data(), j.all.values_stride = quads * 4;
    j.all.scales = scales.data(), j.all.scales_stride = groups;
    j.all.sums = sums.data(), j.all.sums_stride = groups;
    j.all.weight = nibbles.data(), j.all.weight_scales = half.data(), j.all.bias = bias.data();
    j.experts = experts, j.starts = kStarts.data(), j.weight_stride = panels * (k / 8) * 128;
    j.scales_stride = panels * groups * 32, j.bias_stride = n;

    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      check_grouped(
          f, [&](const auto& args) { kernels.grouped_linear(args, pool); },
          [&](LinearArgs one, int64_t row, int64_t) {
            one.x += row * k;
            kernels.linear(one, pool);
          },
          what + " f32 n " + std::to_string(n));
      check_grouped(
          b, [&](const auto& args) { kernels.grouped_linear_bf16(args, pool); },
          [&](LinearBf16Args one, int64_t row, int64_t) {
            one.x += row * pairs * 2;
            kernels.linear_bf16(one, pool);
          },
          what + " bf16 n " + std::to_string(n));
      check_grouped(
          i, [&](const auto& args) { kernels.grouped_linear_int8(args, pool); },
          [&](LinearInt8Args one, int64_t row, int64_t e) {
            one.values += row * quads * 4;
            one.scales += row * groups;
            one.sums += row * groups;
            one.weight_scales += e * panels * groups * 32;
            kernels.linear_int8(one, pool);
          },
          what + " int8 n " + std::to_string(n));
      for (const bool offsets : {false, true}) {
        if (k % 32 != 0) continue;
        j.all.weight_offsets = offsets ? shifts.data() : nullptr;
        check_grouped(
            j, [&](const auto& args) { kernels.grouped_linear_int4(args, pool); },
            [&](LinearInt4Args one, int64_t row, int64_t e) {
              one.values += row * quads * 4;
              one.scales += row * groups;
              one.sums += row * groups;
              one.weight_scales += e * panels * groups * 32;
              if (offsets) one.weight_offsets += e * panels * groups * 32;
              kernels.linear_int4(one, pool);
            },
            what + " int4 n " + std::to_string(n));
      }
    });
  }
}

}  // namespace

int main() {
  RUN(top_k);
  RUN(gather_and_scatter);
  RUN(route_experts);
  RUN(combine_experts);
  RUN(grouped_linears);
  return check::result();
}
