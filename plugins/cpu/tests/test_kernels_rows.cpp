// Norms, rope, gated activations, embedding and take_rows: kernels that treat each row by itself.
#include <cmath>

#include "test_kernels.h"

namespace ew::reference {
namespace {

float weight_or(const float* weight, int64_t i, float otherwise) {
  return weight != nullptr ? weight[i] : otherwise;
}

// The sum into sum, if wanted; then `one` on each row, as doubles.
template <class F>
void for_norm_rows(const NormArgs& a, const F& one) {
  for (int64_t i = 0; i < a.outer; ++i) {
    for (int64_t j = 0; j < a.inner; ++j) {
      std::vector<double> x(static_cast<size_t>(a.size));
      for (int64_t c = 0; c < a.size; ++c) {
        float value = row(a.x, i, j)[c];
        if (a.sum.data != nullptr) value = row(a.sum, i, j)[c] = value + row(a.residual, i, j)[c];
        x[static_cast<size_t>(c)] = value;
      }
      one(x, row(a.normed, i, j));
    }
  }
}

// Exact.
void embedding(const EmbeddingArgs& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t i = 0; i < a.hidden; ++i) {
      const int64_t id = a.ids[t];
      const int64_t at = a.layout == WeightLayout::rows ? id * a.hidden + i
                                                        : (id / kPanel * a.hidden + i) * kPanel + id % kPanel;
      a.out[t * a.out_stride + i] = a.weight[at];
    }
  }
}

// In double.
void rms_norm(const NormArgs& a) {
  for_norm_rows(a, [&](const std::vector<double>& x, float* y) {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double factor = 1 / std::sqrt(squares / static_cast<double>(a.size) + a.eps);
    for (int64_t c = 0; c < a.size; ++c) {
      y[c] = static_cast<float>(x[static_cast<size_t>(c)] * factor * weight_or(a.weight, c, 1));
    }
  });
}

// In double.
void layer_norm(const NormArgs& a) {
  for_norm_rows(a, [&](const std::vector<double>& x, float* y) {
    const double count = static_cast<double>(a.size);
    double mean = 0, squares = 0;
    for (const double v : x) mean += v / count;
    for (const double v : x) squares += (v - mean) * (v - mean);
    const double factor = 1 / std::sqrt(squares / count + a.eps);
    for (int64_t c = 0; c < a.size; ++c) {
      y[c] = static_cast<float>((x[static_cast<size_t>(c)] - mean) * factor * weight_or(a.weight, c, 1) +
                                weight_or(a.bias, c, 0));
    }
  });
}

// The angle is a float product; the rest in double.
void rope_table(const RopeTableArgs& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t f = 0; f < a.freqs; ++f) {
      const float angle = static_cast<float>(a.positions[t]) * a.inv_freq[f];
      float* out = a.out + t * a.out_stride;
      out[f] = static_cast<float>(std::cos(static_cast<double>(angle)) * a.scale);
      out[a.freqs + f] = static_cast<float>(std::sin(static_cast<double>(angle)) * a.scale);
    }
  }
}

// In double.
void rope(const RopeArgs& a) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float* table = a.table + t * a.table_stride;
    for (int64_t h = 0; h < a.heads; ++h) {
      const float* x = row(a.x, t, h);
      float* out = row(a.out, t, h);
      for (int64_t i = 0; i < a.freqs; ++i) {
        const int64_t p = a.interleaved ? 2 * i : i, q = a.interleaved ? 2 * i + 1 : i + a.freqs;
        const double c = table[i], s = table[a.freqs + i], first = x[p], second = x[q];
        out[p] = static_cast<float>(first * c - second * s);
        out[q] = static_cast<float>(second * c + first * s);
      }
      for (int64_t i = 2 * a.freqs; i < a.size; ++i) out[i] = x[i];
    }
  }
}

// In double.
void gated_activation(const GatedActivationArgs& a) {
  for (int64_t i = 0; i < a.outer; ++i) {
    for (int64_t j = 0; j < a.inner; ++j) {
      const float *gate = row(a.gate, i, j), *up = row(a.up, i, j);
      for (int64_t c = 0; c < a.size; ++c) {
        row(a.out, i, j)[c] = static_cast<float>(activate(a.kind, gate[c]) * up[c]);
      }
    }
  }
}

// Exact.
void take_rows(const TakeRowsArgs& a) {
  for (int64_t r = 0; r < a.count; ++r) {
    for (int64_t j = 0; j < a.inner; ++j) std::copy_n(row(a.x, a.rows[r], j), a.size, row(a.out, r, j));
  }
}

}  // namespace
}  // namespace ew::reference

using namespace ew;
using namespace ew::testing;

namespace {

// A [outer, inner, size] tensor with gaps between the rows.
struct Tensor {
  int64_t outer, inner, size, gap;
  std::vector<float> data;

  Tensor(int64_t n0, int64_t n1, int64_t n2, int64_t space, std::vector<float> values)
      : outer(n0), inner(n1), size(n2), gap(space), data(std::move(values)) {}
  static int64_t count(int64_t n0, int64_t n1, int64_t n2, int64_t space) {
    return n0 * (n1 * (n2 + space) + 3);
  }
  static Tensor random(int64_t n0, int64_t n1, int64_t n2, int64_t space, unsigned seed, float spread = 1) {
    return {n0, n1, n2, space, random_floats(count(n0, n1, n2, space), seed, spread)};
  }
  static Tensor blank(int64_t n0, int64_t n1, int64_t n2, int64_t space) {
    return {n0, n1, n2, space, filled(count(n0, n1, n2, space), -7)};
  }
  std::vector<float> packed() const {  // without the gaps
    std::vector<float> values;
    for (int64_t i = 0; i < outer * inner; ++i) {
      const auto row = data.begin() + i * (size + gap) + i / inner * 3;
      values.insert(values.end(), row, row + size);
    }
    return values;
  }
  Rows<float> rows() { return {data.data(), inner * (size + gap) + 3, size + gap}; }
  Rows<const float> view() const { return {data.data(), inner * (size + gap) + 3, size + gap}; }
};

using NormFn = void (*)(const NormArgs&, Workers&);
using NormReference = void (*)(const NormArgs&);

void check_norm(NormFn KernelTable::* kernel, NormReference expected_of, bool layer, bool add) {
  for (const int64_t size : {1, 15, 16, 17, 64, 576}) {
    for (const int64_t inner : {1, 3}) {
      for (const bool with_weight : {false, true}) {
        const Tensor x = Tensor::random(5, inner, size, size % 3, 1, 2),
                     residual = Tensor::random(5, inner, size, 1, 2);
        const auto weight = random_floats(size, 3), bias = random_floats(size, 4);
        NormArgs a;
        a.outer = 5, a.inner = inner, a.size = size, a.eps = 1e-5f;
        a.x = x.view();
        a.weight = with_weight ? weight.data() : nullptr;
        a.bias = layer && with_weight ? bias.data() : nullptr;
        const auto run = [&](const auto& fn) {
          Tensor normed = Tensor::blank(5, inner, size, 2), sum = Tensor::blank(5, inner, size, 0);
          a.normed = normed.rows();
          if (add) {
            a.residual = residual.view();
            a.sum = sum.rows();
          }
          fn(a);
          return std::pair(normed.data, sum.data);
        };
        const auto [expected, expected_sum] = run(expected_of);
        for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
          const auto [normed, sum] = run([&](const NormArgs& args) { (kernels.*kernel)(args, pool); });
          // 16 lanes of size / 16 terms each: the mean square is within (size / 16 + 6) eps / 2, a root
          // halves that, and a few roundings follow. In a layer norm x - mean cancels: the error of the mean
          // is of the size of x (about 4).
          const double n = static_cast<double>(size);
          const double relative = (n / 16 + 12) * kEps, absolute = layer ? 16 * (n / 16 + 6) * kEps : 1e-9;
          CHECK(worst(normed, expected, absolute, relative) <= 1)
              << what << " size " << size << " inner " << inner;
          CHECK(same_bits(sum, expected_sum)) << what << " size " << size;
        });
      }
    }
  }
}

void rms_norm() { check_norm(&KernelTable::rms_norm, reference::rms_norm, false, false); }
void layer_norm() { check_norm(&KernelTable::layer_norm, reference::layer_norm, true, false); }
void add_rms_norm() { check_norm(&KernelTable::add_rms_norm, reference::rms_norm, false, true); }
void add_layer_norm() { check_norm(&KernelTable::add_layer_norm, reference::layer_norm, true, true); }

// The sum may be written over the residual, as the memory planner likes it; threads and batch change no
// bit.
void norm_in_place_and_in_batch() {
  const auto x = random_floats(400 * 576, 1), residual = random_floats(400 * 576, 2),
             weight = random_floats(576, 3);
  for (const std::string& isa : available_isas()) {
    std::vector<float> first;
    for (const int threads : {1, 2, 3}) {
      ThreadPool pool(threads);
      std::vector<float> normed = filled(400 * 576, 0), sum = residual;
      NormArgs a;
      a.outer = 400, a.size = 576, a.eps = 1e-6f;
      a.x = {x.data(), 576, 0}, a.residual = {sum.data(), 576, 0}, a.weight = weight.data();
      a.normed = {normed.data(), 576, 0}, a.sum = {sum.data(), 576, 0};
      kernels_for(isa.c_str())->add_rms_norm(a, pool);
      if (first.empty()) first = normed;
      CHECK(same_bits(normed, first)) << isa << " " << threads;
      std::vector<float> one = filled(576, 0), one_sum = filled(576, 0);
      a.outer = 1;
      a.x.data += 399 * 576, a.residual.data = residual.data() + 399 * 576;
      a.normed.data = one.data(), a.sum.data = one_sum.data();
      kernels_for(isa.c_str())->add_rms_norm(a, pool);
      CHECK(std::memcmp(one.data(), normed.data() + 399 * 576, 576 * sizeof(float)) == 0) << isa;
      CHECK(std::memcmp(one_sum.data(), sum.data() + 399 * 576, 576 * sizeof(float)) == 0) << isa;
    }
  }
}

void rope_table() {
  for (const int64_t freqs : {1, 16, 32, 33}) {
    std::vector<int32_t> positions = random_ints(40, 131072, 1);
    positions[0] = 0, positions[1] = 131072;
    std::vector<float> inv_freq(static_cast<size_t>(freqs));
    for (size_t f = 0; f < inv_freq.size(); ++f) {
      inv_freq[f] = std::pow(10000.0f, -static_cast<float>(f) / static_cast<float>(freqs));
    }
    RopeTableArgs a;
    a.tokens = 40, a.freqs = freqs, a.positions = positions.data(), a.inv_freq = inv_freq.data();
    a.scale = 1.25f, a.out_stride = 2 * freqs + 1;
    const auto run = [&](const auto& fn) {
      std::vector<float> out = filled(40 * a.out_stride, -7);
      a.out = out.data();
      fn(a);
      return out;
    };
    const auto expected = run(reference::rope_table);
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const auto out = run([&](const RopeTableArgs& args) { kernels.rope_table(args, pool); });
      // libm's sine is within an ulp, the product with the scale another half.
      CHECK(worst(out, expected, 1e-12, 2 * kEps) <= 1) << what << " freqs " << freqs;
    });
  }
}

void rope() {
  for (const int64_t freqs : {4, 16, 20, 32}) {
    for (const int64_t rest : {0, 8}) {
      for (const bool interleaved : {false, true}) {
        const int64_t size = 2 * freqs + rest;
        const Tensor x = Tensor::random(9, 3, size, 1, 1);
        const auto table = random_floats(9 * (2 * freqs + 2), 2);
        RopeArgs a;
        a.tokens = 9, a.heads = 3, a.size = size, a.freqs = freqs, a.interleaved = interleaved;
        a.table = table.data(), a.table_stride = 2 * freqs + 2;
        const auto run = [&](const auto& fn, bool in_place) {
          Tensor from = x, out = Tensor::blank(9, 3, size, 1);
          a.x = from.view();
          a.out = in_place ? from.rows() : out.rows();
          fn(a);
          return (in_place ? from : out).packed();
        };
        const auto expected = run(reference::rope, false);
        for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
          const auto kernel = [&](const RopeArgs& args) { kernels.rope(args, pool); };
          const auto out = run(kernel, false);
          // Two products of numbers of size up to 4 x 4, one sum: a few roundings of at most 16.
          CHECK(worst(out, expected, 32 * kEps, 0) <= 1) << what << " freqs " << freqs << " " << interleaved;
          CHECK(same_bits(run(kernel, true), out)) << what << " in place";
        });
      }
    }
  }
}

void gated_activation() {
  for (const Activation kind :
       {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu, Activation::sigmoid}) {
    for (const int64_t size : {1, 31, 48, 1536}) {
      const Tensor x = Tensor::random(7, 2, 2 * size, 3, 1, 3);
      GatedActivationArgs a;
      a.outer = 7, a.inner = 2, a.size = size, a.kind = kind, a.gate = x.view(), a.up = x.view();
      a.up.data += size;
      const auto run = [&](const auto& fn) {
        Tensor out = Tensor::blank(7, 2, size, 1);
        a.out = out.rows();
        fn(a);
        return out.data;
      };
      const auto expected = run(reference::gated_activation);
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        const auto out = run([&](const GatedActivationArgs& args) { kernels.gated_activation(args, pool); });
        // gelu's 1 + erf cancels below 0: 2e-7 of |x| up to 12, times |up| up to 12. The rest is a few ulp.
        CHECK(worst(out, expected, 2e-7 * 12 * 12, 8 * kEps) <= 1) << what << " size " << size;
        // Any part of the channels alone: the same bits, and nothing else is written.
        for (const int64_t low : {size / 3, size - 1}) {
          GatedActivationArgs part = a;
          Tensor some = Tensor::blank(7, 2, size, 1), wanted = some;
          part.size = size - low, part.gate.data += low, part.up.data += low, part.out = some.rows();
          kernels.gated_activation(part, pool);
          for (int64_t row = 0; row < 14; ++row) {
            const int64_t at = row / 2 * part.out.stride0 + row % 2 * part.out.stride1;
            std::copy_n(out.begin() + at + low, part.size, wanted.data.begin() + at);
          }
          CHECK(same_bits(some.data, wanted.data)) << what << " channels from " << low << " of " << size;
        }
      });
    }
  }
}

void embedding() {
  const int64_t vocabulary = 70;
  for (const int64_t hidden : {1, 48, 577}) {
    const auto rows = random_floats(vocabulary * hidden, 1);
    const auto panels = to_panels(rows, vocabulary, hidden);
    std::vector<int32_t> ids = random_ints(300, vocabulary, 2);
    ids[0] = 0, ids[1] = 69;
    for (const WeightLayout layout : {WeightLayout::rows, WeightLayout::panel32}) {
      EmbeddingArgs a;
      a.tokens = 300, a.hidden = hidden, a.ids = ids.data(), a.layout = layout;
      a.weight = layout == WeightLayout::rows ? rows.data() : panels.data();
      a.out_stride = hidden + 1;
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        std::vector<float> out = filled(300 * (hidden + 1), -7), expected = out;
        a.out = out.data();
        kernels.embedding(a, pool);
        a.out = expected.data();
        reference::embedding(a);
        CHECK(same_bits(out, expected)) << what << " hidden " << hidden;
        CHECK(out[static_cast<size_t>(hidden + 1)] == rows[static_cast<size_t>(69 * hidden)]) << what;
      });
    }
  }
}

void take_rows() {
  const Tensor x = Tensor::random(50, 2, 33, 1, 1);
  const std::vector<int32_t> rows = {49, 0, 7, 7, 31};
  TakeRowsArgs a;
  a.count = 5, a.inner = 2, a.size = 33, a.x = x.view(), a.rows = rows.data();
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    Tensor out = Tensor::blank(5, 2, 33, 0), expected = out;
    a.out = out.rows();
    kernels.take_rows(a, pool);
    a.out = expected.rows();
    reference::take_rows(a);
    CHECK(same_bits(out.data, expected.data)) << what;
    CHECK(out.data[0] == x.data[static_cast<size_t>(49 * (2 * 34 + 3))]) << what;
  });
}

}  // namespace

int main() {
  RUN(rms_norm);
  RUN(layer_norm);
  RUN(add_rms_norm);
  RUN(add_layer_norm);
  RUN(norm_in_place_and_in_batch);
  RUN(rope_table);
  RUN(rope);
  RUN(gated_activation);
  RUN(embedding);
  RUN(take_rows);
  return check::result();
}
