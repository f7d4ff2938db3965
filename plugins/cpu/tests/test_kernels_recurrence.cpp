// stored_convolution, stored_scan and stored_delta_rule: recurrences whose states are in a cache.
#include <map>

#include "test_kernels.h"

namespace ew::reference {
namespace {

constexpr int64_t kTile = 16;

int64_t tiles(int64_t channels) { return (channels + kTile - 1) / kTile; }

// fn(state, token) for the tokens of all requests, each request's in order. Its `size` floats of state are
// doubles from its first token of the step to its last one.
template <class F>
void for_tokens(const StateArgs& s, int64_t size, const F& fn) {
  for (int64_t b = 0; b < s.spans.requests; ++b) {
    const int64_t tokens = s.spans.tokens(b);
    if (tokens == 0) continue;
    float* stored = s.state + s.block_table[b * s.block_table_stride] * s.stride + s.first;
    std::vector<double> state(static_cast<size_t>(size), 0.0);
    if (s.kv_len[b] > tokens) std::copy_n(stored, size, state.begin());
    const auto store = [&](float* to) {
      for (int64_t i = 0; i < size; ++i) to[i] = static_cast<float>(state[static_cast<size_t>(i)]);
    };
    for (int64_t t = s.spans.begin(b); t < s.spans.end(b); ++t) {
      fn(state.data(), t);
      if (s.slots[t] >= 0) store(s.state + s.slots[t] / s.slot_tokens * s.stride + s.first);
    }
    store(stored);
  }
}

// In double.
void stored_convolution(const StoredConvolutionArgs& a) {
  const int64_t before = a.taps - 1;
  for_tokens(a.state, before * a.channels, [&](double* state, int64_t t) {
    for (int64_t c = 0; c < a.channels; ++c) {
      const float* weight = a.weight + c * a.weight_stride;
      const double x = row(a.x, t, 0)[c];
      double sum = x * weight[before] + (a.bias != nullptr ? a.bias[c] : 0.0f);
      for (int64_t k = 0; k < before; ++k) sum += state[k * a.channels + c] * weight[k];
      row(a.out, t, 0)[c] = static_cast<float>(a.activated ? activate(a.activation, sum) : sum);
      for (int64_t k = 0; k < before; ++k)
        state[k * a.channels + c] = k + 1 < before ? state[(k + 1) * a.channels + c] : x;
    }
  });
}

// In double.
void stored_scan(const StoredScanArgs& a) {
  const int64_t channels = a.heads * a.head_channels;
  for_tokens(a.state, tiles(channels) * a.size * kTile, [&](double* state, int64_t t) {
    for (int64_t i = 0; i < channels; ++i) {
      const int64_t head = i / a.head_channels, group = head / (a.heads / a.groups);
      const double dt = row(a.dt, t, 0)[head], x = row(a.x, t, head)[i % a.head_channels];
      double sum = 0;
      for (int64_t k = 0; k < a.size; ++k) {
        const double rate = a.rates_of_state ? a.a[head * a.a_stride + k] : a.a[head];
        double& value = state[(i / kTile * a.size + k) * kTile + i % kTile];
        value = value * std::exp(dt * rate) + dt * x * row(a.b, t, group)[k];
        sum += value * row(a.c, t, group)[k];
      }
      row(a.out, t, head)[i % a.head_channels] = static_cast<float>(sum);
    }
  });
}

// In double.
void stored_delta_rule(const StoredDeltaRuleArgs& a) {
  const auto factor = [&](const float* x) {
    double squares = 0;
    for (int64_t d = 0; d < a.key_size; ++d) squares += double{x[d]} * x[d];
    return a.normalize ? 1 / std::sqrt(squares + 1e-6) : 1.0;
  };
  const int64_t head_size = tiles(a.value_size) * a.key_size * kTile;
  for_tokens(a.state, a.heads * head_size, [&](double* state, int64_t t) {
    for (int64_t head = 0; head < a.heads; ++head) {
      const float* q = row(a.q, t, head / (a.heads / a.key_heads));
      const float* k = row(a.k, t, head / (a.heads / a.key_heads));
      const double of_key = factor(k), of_query = factor(q) * a.scale, beta = row(a.beta, t, 0)[head];
      for (int64_t j = 0; j < a.value_size; ++j) {
        double* column = state + head * head_size + j / kTile * a.key_size * kTile + j % kTile;
        double known = 0, sum = 0;
        for (int64_t d = 0; d < a.key_size; ++d) {
          const double decay = a.decay_of_rows ? row(a.decay, t, head)[d] : row(a.decay, t, 0)[head];
          column[d * kTile] *= std::exp(decay);
          known += column[d * kTile] * k[d] * of_key;
        }
        const double delta = beta * (row(a.v, t, head)[j] - known);
        for (int64_t d = 0; d < a.key_size; ++d) {
          column[d * kTile] += k[d] * of_key * delta;
          sum += column[d * kTile] * q[d] * of_query;
        }
        row(a.out, t, head)[j] = static_cast<float>(sum);
      }
    }
  });
}

}  // namespace
}  // namespace ew::reference

using namespace ew;
using namespace ew::testing;

namespace {

// An operand [T, inner, size] of random numbers.
template <class Args>
struct Operand {
  Rows<const float> Args::* rows;
  int64_t inner, size;
  float spread = 1;
  float (*of_normal)(float) = nullptr;  // makes of a normal number what the operand may hold; null: nothing
};

// A layer with a recurrence.
template <class Args>
struct Layer {
  Args args;  // without what belongs to a step
  void (*reference)(const Args&);
  void (*KernelTable::*kernel)(const Args&, Workers&);
  std::vector<Operand<Args>> operands;
  int64_t inner, size;  // of the result [T, inner, size]
  int64_t state;        // floats of a request
  std::string about;
  std::vector<float> weight = {}, bias = {};  // where the arguments point to
};

// Tokens first .. first + tokens - 1 of a request, with a snapshot after `snapshot` tokens of them; 0: none.
struct Piece {
  int64_t request, first, tokens, snapshot = 0;
};
using Step = std::vector<Piece>;

// Requests of `length` tokens each with the cache of their states, which is NaN at first. A token's operands
// depend on its request and position alone.
template <class Args>
class Scene {
 public:
  Scene(const Layer<Args>& layer, int64_t requests, int64_t length)
      : layer_(&layer), requests_(requests), length_(length), stride_(kFirst + layer.state + 11) {
    unsigned seed = 100;
    for (const Operand<Args>& o : layer.operands) {
      operands_.push_back(random_floats(requests * length * o.inner * o.size, seed++, o.spread));
      if (o.of_normal == nullptr) continue;
      for (float& value : operands_.back()) value = o.of_normal(value);
    }
    results_ = filled(requests * length * layer.inner * layer.size, kNaN);
    cache_ = filled((2 * requests + 2) * stride_, kNaN);
  }

  // Computes the step by fn(Args), and checks that nothing is written but its results, its requests' states
  // and their snapshots.
  template <class F>
  void run(const Step& step, const F& fn, const std::string& what) {
    constexpr int64_t kColumns = 3, kSlotTokens = 1000;
    std::vector<int32_t> q_start = {0}, kv_len, slots, table(step.size() * kColumns, -1);
    for (size_t i = 0; i < step.size(); ++i) {
      table[i * kColumns] = static_cast<int32_t>(block(step[i].request));
      q_start.push_back(q_start.back() + static_cast<int32_t>(step[i].tokens));
      kv_len.push_back(static_cast<int32_t>(step[i].first + step[i].tokens));
      slots.resize(static_cast<size_t>(q_start.back()), -1);
      if (step[i].snapshot > 0)
        slots[static_cast<size_t>(q_start[i] + step[i].snapshot - 1)] =
            static_cast<int32_t>(snapshot_block(step[i].request) * kSlotTokens + step[i].snapshot);
    }
    Args a = layer_->args;
    std::vector<std::vector<float>> inputs;
    for (size_t i = 0; i < operands_.size(); ++i) {
      const Operand<Args>& o = layer_->operands[i];
      inputs.push_back(filled(q_start.back() * row_stride(o.inner, o.size), kNaN));
      const Rows<float> rows = with_gaps(inputs.back(), o.inner, o.size);
      for_rows(step, o.inner, o.size, [&](int64_t t, int64_t j, int64_t at) {
        std::copy_n(operands_[i].begin() + at, o.size, reference::row(rows, t, j));
      });
      a.*o.rows = {rows.data, rows.stride0, rows.stride1};
    }
    std::vector<float> out = filled(q_start.back() * row_stride(layer_->inner, layer_->size), kNaN);
    std::vector<float> expected_out = out, expected_cache = cache_;
    a.out = with_gaps(out, layer_->inner, layer_->size);
    a.state = {{static_cast<int64_t>(step.size()), q_start.data()},
               cache_.data(),
               stride_,
               kFirst,
               table.data(),
               kColumns,
               kv_len.data(),
               slots.data(),
               kSlotTokens};
    fn(a);
    const Rows<float> expected_rows = with_gaps(expected_out, layer_->inner, layer_->size);
    for_rows(step, layer_->inner, layer_->size, [&](int64_t t, int64_t j, int64_t at) {
      const float* result = reference::row(a.out, t, j);
      std::copy_n(result, layer_->size, results_.begin() + at);
      std::copy_n(result, layer_->size, reference::row(expected_rows, t, j));
    });
    for (const Piece& piece : step) {
      const int64_t at = state_at(piece.request);
      if (piece.tokens > 0) std::copy_n(cache_.begin() + at, layer_->state, expected_cache.begin() + at);
      const int64_t kept = snapshot_block(piece.request) * stride_ + kFirst;
      if (piece.snapshot > 0)
        std::copy_n(cache_.begin() + kept, layer_->state, expected_cache.begin() + kept);
    }
    CHECK(same_bits(out, expected_out)) << "writes between its results: " << what;
    CHECK(same_bits(cache_, expected_cache)) << "writes beside its states: " << what;
  }

  const std::vector<float>& results() const { return results_; }  // [requests, length, inner, size]
  const std::vector<float>& cache() const { return cache_; }
  std::vector<float> results(int64_t request) const {
    const int64_t each = length_ * layer_->inner * layer_->size;
    return {results_.begin() + request * each, results_.begin() + (request + 1) * each};
  }
  std::vector<float> state(int64_t request) const {
    return {cache_.begin() + state_at(request), cache_.begin() + state_at(request) + layer_->state};
  }
  std::vector<float> snapshot(int64_t request) const {
    const auto at = cache_.begin() + snapshot_block(request) * stride_ + kFirst;
    return {at, at + layer_->state};
  }
  // A request goes on from its snapshot.
  void resume(int64_t request) {
    const std::vector<float> kept = snapshot(request);
    std::copy(kept.begin(), kept.end(), cache_.begin() + state_at(request));
  }

 private:
  static constexpr int64_t kFirst = 13;

  static int64_t row_stride(int64_t inner, int64_t size) { return inner * (size + 3) + 5; }
  static Rows<float> with_gaps(std::vector<float>& data, int64_t inner, int64_t size) {
    return {data.data(), row_stride(inner, size), size + 3};
  }
  int64_t block(int64_t request) const { return requests_ - request; }  // the first and the last are nobody's
  int64_t snapshot_block(int64_t request) const { return requests_ + 1 + request; }
  int64_t state_at(int64_t request) const { return block(request) * stride_ + kFirst; }

  // fn(token of the step, j, where the row is in an array [requests, length, inner, size])
  template <class F>
  void for_rows(const Step& step, int64_t inner, int64_t size, const F& fn) const {
    int64_t t = 0;
    for (const Piece& piece : step) {
      for (int64_t i = 0; i < piece.tokens; ++i, ++t) {
        for (int64_t j = 0; j < inner; ++j)
          fn(t, j, ((piece.request * length_ + piece.first + i) * inner + j) * size);
      }
    }
  }

  const Layer<Args>* layer_;
  int64_t requests_, length_, stride_;
  std::vector<std::vector<float>> operands_;
  std::vector<float> results_, cache_;
};

// A step with a prompt, a prompt that goes on, requests without tokens, a token that goes on and a request
// of one token. `tolerance`: in units of the last place of the greatest result, and of the greatest state.
template <class Args>
void is_near_reference(const Layer<Args>& layer, double tolerance) {
  const auto reference = [&](const Args& a) { layer.reference(a); };
  const auto greatest = [](const std::vector<float>& values) {
    float most = 0;
    for (const float value : values) most = std::isnan(value) ? most : std::max(most, std::fabs(value));
    return double{most};
  };
  Scene<Args> before(layer, 5, 37);
  before.run({{1, 0, 6}, {2, 0, 3}, {3, 0, 20}}, reference, "the reference");
  const Step step = {{0, 0, 37, 19}, {1, 6, 5, 5}, {2, 3, 0}, {2, 0, 0}, {3, 20, 1}, {4, 0, 1, 1}};
  Scene<Args> expected = before;
  expected.run(step, reference, "the reference");
  std::map<std::string, Scene<Args>> of_one_thread;
  for_all(
      [&](const KernelTable& kernels, ThreadPool& pool, const std::string& threads) {
        const std::string what = layer.about + ", " + threads;
        Scene<Args> scene = before;
        scene.run(step, [&](const Args& a) { (kernels.*layer.kernel)(a, pool); }, what);
        const double of_results =
            worst(scene.results(), expected.results(), kEps * greatest(expected.results()), 0);
        const double of_states = worst(scene.cache(), expected.cache(), kEps * greatest(expected.cache()), 0);
        CHECK(of_results <= tolerance) << what << " results " << of_results;
        CHECK(of_states <= tolerance) << what << " states " << of_states;
        const Scene<Args>& first = of_one_thread.try_emplace(kernels.isa, scene).first->second;
        CHECK(same_bits(scene.results(), first.results()) && same_bits(scene.cache(), first.cache())) << what;
      },
      {.small_work = 1});
}

// A request has the same bits in one step, in steps of 1, 7 and 16 tokens, and packed with others.
template <class Args>
void has_same_bits_in_pieces(const Layer<Args>& layer) {
  constexpr int64_t kLength = 37;
  std::vector<std::vector<Step>> divisions;
  for (const int64_t chunk : {kLength, int64_t{1}, int64_t{7}, int64_t{16}}) {
    divisions.emplace_back();
    for (int64_t first = 0; first < kLength; first += chunk)
      divisions.back().push_back({{0, first, std::min(chunk, kLength - first)}});
  }
  divisions.push_back({{{1, 0, 3}, {0, 0, kLength}, {2, 0, 9}}});
  divisions.push_back({{{1, 0, 3}, {0, 0, 10}, {2, 0, 1}},
                       {{0, 10, 1}, {1, 3, 30}},
                       {{2, 1, 5}, {0, 11, 0}, {1, 33, 1}},
                       {{2, 6, 31}, {1, 34, 0}, {0, 11, 26}}});
  const Scene<Args> before(layer, 3, kLength);
  for_all(
      [&](const KernelTable& kernels, ThreadPool& pool, const std::string& threads) {
        std::vector<Scene<Args>> scenes;
        for (const std::vector<Step>& steps : divisions) {
          const std::string what =
              layer.about + ", division " + std::to_string(scenes.size()) + ", " + threads;
          scenes.push_back(before);
          Scene<Args>& scene = scenes.back();
          for (const Step& step : steps)
            scene.run(step, [&](const Args& a) { (kernels.*layer.kernel)(a, pool); }, what);
          CHECK(same_bits(scene.results(0), scenes.front().results(0))) << what;
          CHECK(same_bits(scene.state(0), scenes.front().state(0))) << what;
        }
      },
      {.small_work = 1});
}

// A snapshot after any token has the bits of a state that ends there, and a request that goes on from it
// those of one that never stopped.
template <class Args>
void resumes_from_snapshots(const Layer<Args>& layer) {
  constexpr int64_t kLength = 23;
  const Scene<Args> before(layer, 2, kLength);
  for_all(
      [&](const KernelTable& kernels, ThreadPool& pool, const std::string& threads) {
        const auto kernel = [&](const Args& a) { (kernels.*layer.kernel)(a, pool); };
        Scene<Args> whole = before;
        whole.run({{0, 0, kLength}}, kernel, layer.about);
        for (const int64_t end : {int64_t{1}, int64_t{7}, kLength}) {
          const std::string what = layer.about + ", a snapshot after " + std::to_string(end) + ", " + threads;
          Scene<Args> kept = before, ended = before;
          kept.run({{1, 0, 3}, {0, 0, kLength, end}}, kernel, what);
          ended.run({{0, 0, end}}, kernel, what);
          CHECK(same_bits(kept.snapshot(0), ended.state(0))) << what;
          if (end == kLength) continue;
          kept.resume(0);
          kept.run({{0, end, kLength - end}}, kernel, what);
          CHECK(same_bits(kept.results(0), whole.results(0))) << what;
          CHECK(same_bits(kept.state(0), whole.state(0))) << what;
        }
      },
      {.small_work = 1});
}

template <class Args>
void verify(const Layer<Args>& layer, double tolerance) {
  if (left_out()) return;
  is_near_reference(layer, tolerance);
  has_same_bits_in_pieces(layer);
  resumes_from_snapshots(layer);
}

struct ConvolutionCase {
  int64_t channels, taps;
  bool has_bias;
  const char* activation;  // "": none
};

Layer<StoredConvolutionArgs> convolution(const ConvolutionCase& c) {
  using Args = StoredConvolutionArgs;
  Args args;
  args.channels = c.channels, args.taps = c.taps, args.weight_stride = c.taps + 2;
  args.activated = parse_activation(c.activation, &args.activation);
  Layer<Args> layer = {
      .args = args,
      .reference = reference::stored_convolution,
      .kernel = &KernelTable::stored_convolution,
      .operands = {{&Args::x, 1, c.channels}},
      .inner = 1,
      .size = c.channels,
      .state = (c.taps - 1) * c.channels,
      .about = "C " + std::to_string(c.channels) + " W " + std::to_string(c.taps) + " " + c.activation};
  layer.weight = random_floats(c.channels * (c.taps + 2), 1);
  layer.bias = random_floats(c.channels, 2);
  layer.args.weight = layer.weight.data();
  layer.args.bias = c.has_bias ? layer.bias.data() : nullptr;
  return layer;
}

// Each of the W products and the bias is rounded to half a unit of a sum, which may be twice the greatest
// result. An activation adds at most 4 units, and erf 1.5e-7, little more than one.
void convolutions() {
  const ConvolutionCase cases[] = {
      {16, 4, true, "silu"},  {33, 3, false, ""},         {100, 7, true, "gelu"}, {1, 4, false, "gelu_tanh"},
      {520, 4, true, "relu"}, {31, 16, false, "sigmoid"}, {48, 3, true, ""},      {7, 7, false, "silu"},
      {40, 2, true, "silu"},  {20, 1, false, ""},
  };
  for (const ConvolutionCase& c : cases) verify(convolution(c), static_cast<double>(c.taps) + 5);
}

struct ScanCase {
  int64_t heads, head_channels, groups, size;
  bool rates_of_state;
};

Layer<StoredScanArgs> scan(const ScanCase& c) {
  using Args = StoredScanArgs;
  const int64_t channels = c.heads * c.head_channels;
  Args args;
  args.heads = c.heads, args.head_channels = c.head_channels, args.groups = c.groups, args.size = c.size;
  args.rates_of_state = c.rates_of_state;
  args.a_stride = c.rates_of_state ? c.size + 3 : 0;
  Layer<Args> layer = {
      .args = args,
      .reference = reference::stored_scan,
      .kernel = &KernelTable::stored_scan,
      .operands = {{&Args::x, c.heads, c.head_channels},
                   {&Args::dt, 1, c.heads, 1, [](float x) { return std::log1p(std::exp(x)); }},
                   {&Args::b, c.groups, c.size},
                   {&Args::c, c.groups, c.size}},
      .inner = c.heads,
      .size = c.head_channels,
      .state = reference::tiles(channels) * reference::kTile * c.size,
      .about = "N " + std::to_string(c.heads) + " P " + std::to_string(c.head_channels) + " G " +
               std::to_string(c.groups) + " S " + std::to_string(c.size)};
  layer.weight = random_floats(c.heads * (c.rates_of_state ? c.size + 3 : 1), 3);
  for (float& rate : layer.weight) rate = -std::exp(rate);
  layer.args.a = layer.weight.data();
  return layer;
}

// Mamba has heads of one channel with rates [N, S], Mamba-2 heads of many channels with one rate each. Some
// groups and heads change within 16 channels. States fade, and errors with them: exp has up to 4 units, a
// token 3 roundings, and the sums of 1024 values up to another 4 units.
void scans() {
  const ScanCase cases[] = {
      {40, 1, 1, 16, true},   {7, 1, 1, 5, true},     {24, 1, 3, 4, true},   {6, 8, 2, 16, false},
      {3, 8, 3, 7, false},    {4, 64, 2, 128, false}, {8, 64, 1, 32, false}, {5, 20, 5, 33, false},
      {4, 8, 1, 9, true},     {1, 3, 1, 1, false},    {2, 40, 2, 6, true},   {2, 8, 1, 1024, false},
      {18, 1, 9, 1024, true},
  };
  for (const ScanCase& c : cases) verify(scan(c), 8);
}

struct DeltaRuleCase {
  int64_t heads, key_heads, key_size, value_size;
  bool decay_of_rows, normalize;
};

Layer<StoredDeltaRuleArgs> delta_rule(const DeltaRuleCase& c) {
  using Args = StoredDeltaRuleArgs;
  const auto decay = [](float x) { return -std::fabs(x); };
  const auto beta = [](float x) { return 1 / (1 + std::exp(-x)); };
  // A key that isn't normalized has a length of about 0.7, so that states don't grow.
  const float spread = c.normalize ? 1 : 0.7f / std::sqrt(static_cast<float>(c.key_size));
  Args args;
  args.heads = c.heads, args.key_heads = c.key_heads, args.key_size = c.key_size;
  args.value_size = c.value_size, args.decay_of_rows = c.decay_of_rows, args.normalize = c.normalize;
  args.scale = 1 / std::sqrt(static_cast<float>(c.key_size));
  return {.args = args,
          .reference = reference::stored_delta_rule,
          .kernel = &KernelTable::stored_delta_rule,
          .operands = {{&Args::q, c.key_heads, c.key_size},
                       {&Args::k, c.key_heads, c.key_size, spread},
                       {&Args::v, c.heads, c.value_size},
                       {&Args::decay, c.decay_of_rows ? c.heads : 1, c.decay_of_rows ? c.key_size : c.heads,
                        0.3f, decay},
                       {&Args::beta, 1, c.heads, 1, beta}},
          .inner = c.heads,
          .size = c.value_size,
          .state = c.heads * c.key_size * reference::tiles(c.value_size) * reference::kTile,
          .about = "N " + std::to_string(c.heads) + "/" + std::to_string(c.key_heads) + " D " +
                   std::to_string(c.key_size) + "/" + std::to_string(c.value_size) +
                   (c.decay_of_rows ? " decay of rows" : "") + (c.normalize ? " normalized" : "")};
}

// Gated delta networks have a decay for each head, Kimi delta attention one for each row of the state. A
// token makes no error greater, since keys are at most 1 long and beta is below 1. It adds those of exp and
// of two sums.
void delta_rules() {
  const DeltaRuleCase cases[] = {
      {4, 2, 64, 64, false, true},  {3, 3, 20, 36, true, true}, {2, 1, 33, 17, false, false},
      {6, 2, 128, 128, true, true}, {1, 1, 1, 1, false, true},  {4, 4, 7, 40, true, false},
      {2, 1, 1024, 8, false, true}, {3, 1, 16, 16, true, true},
  };
  for (const DeltaRuleCase& c : cases) verify(delta_rule(c), 8);
}

}  // namespace

int main() {
  RUN(convolutions);
  RUN(scans);
  RUN(delta_rules);
  return check::result();
}
