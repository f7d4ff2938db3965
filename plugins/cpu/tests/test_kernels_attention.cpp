#include "test_kernels.h"

using namespace ew;
using namespace ew::testing;

namespace {

struct Options {
  int64_t heads = 2, kv_heads = 2, key_size = 64, value_size = 64, window = 0;
  float softcap = 0;
  bool sinks = false, slopes = false;
};

// Some requests: `past` tokens are in the cache before the step, `tokens` come in it. The blocks are dealt
// out in a shuffled order; every slot that no request has reached is NaN.
class Scene {
 public:
  Scene(const Options& o, std::vector<int64_t> past, std::vector<int64_t> tokens) : o_(o) {
    const int64_t requests = static_cast<int64_t>(past.size());
    q_start_.push_back(0);
    for (int64_t b = 0; b < requests; ++b) {
      const size_t i = static_cast<size_t>(b);
      q_start_.push_back(q_start_.back() + static_cast<int32_t>(tokens[i]));
      kv_len_.push_back(static_cast<int32_t>(past[i] + tokens[i]));
      columns_ = std::max<int64_t>(columns_, (kv_len_.back() + kBlock - 1) / kBlock);
    }
    std::vector<int32_t> order(static_cast<size_t>(columns_ * requests + 2));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(5));
    const int64_t blocks = static_cast<int64_t>(order.size());
    k_ = filled(blocks * o.kv_heads * o.key_size * kBlock, kNaN);
    v_ = filled(blocks * o.kv_heads * o.value_size * kBlock, kNaN);
    cache_ = {k_.data(), v_.data(), o.kv_heads, o.key_size, o.value_size};
    for (int64_t b = 0; b < requests; ++b) {
      const int64_t length = kv_len_[static_cast<size_t>(b)];
      for (int64_t i = 0; i < columns_; ++i) {
        const bool used = i < (length + kBlock - 1) / kBlock;
        table_.push_back(used ? order[static_cast<size_t>(b * columns_ + i)] : -1);
      }
      write(b, length);
    }
    const int64_t total = q_start_.back();
    q_ = filled(total * o.heads * o.key_size, 0);
    for (int64_t b = 0; b < requests; ++b) {  // a token's query depends on its request and position alone
      for (int64_t t = q_start_[static_cast<size_t>(b)]; t < q_start_[static_cast<size_t>(b) + 1]; ++t) {
        const int64_t position = kv_len_[static_cast<size_t>(b)] - q_start_[static_cast<size_t>(b) + 1] + t;
        const auto row = random_floats(o.heads * o.key_size, static_cast<unsigned>(1000 * b + position + 1));
        std::copy(row.begin(), row.end(), q_.begin() + t * o.heads * o.key_size);
      }
    }
    sinks_ = random_floats(o.heads, 17);
    for (int64_t h = 0; h < o.heads; ++h) slopes_.push_back(std::exp2(-static_cast<float>(1 + 2 * h)));
  }

  PagedAttentionArgs args() {
    PagedAttentionArgs a;
    a.requests = static_cast<int64_t>(kv_len_.size());
    a.query_heads = o_.heads;
    a.q = {q_.data(), o_.heads * o_.key_size, o_.key_size};
    a.cache = cache_;
    a.block_table = table_.data();
    a.block_table_stride = columns_;
    a.q_start = q_start_.data();
    a.kv_len = kv_len_.data();
    a.sinks = o_.sinks ? sinks_.data() : nullptr;
    a.slopes = o_.slopes ? slopes_.data() : nullptr;
    a.scale = 1 / std::sqrt(static_cast<float>(o_.key_size));
    a.window = o_.window;
    a.softcap = o_.softcap;
    a.workspace = &workspace_;
    return a;
  }

  // The step in one call, [T, Nq, Dv].
  template <class F>
  std::vector<float> run(const F& fn) {
    std::vector<float> out = filled(q_start_.back() * o_.heads * o_.value_size, kNaN);
    PagedAttentionArgs a = args();
    a.out = {out.data(), o_.heads * o_.value_size, o_.value_size};
    fn(a);
    return out;
  }

  // Request by request, in chunks of at most `chunk` tokens.
  template <class F>
  std::vector<float> run_chunked(int64_t chunk, const F& fn) {
    std::vector<float> out = filled(q_start_.back() * o_.heads * o_.value_size, kNaN);
    for (size_t b = 0; b < kv_len_.size(); ++b) {
      for (int32_t first = q_start_[b]; first < q_start_[b + 1];) {
        const int32_t count = std::min<int32_t>(static_cast<int32_t>(chunk), q_start_[b + 1] - first);
        const int32_t q_start[2] = {0, count};
        const int32_t kv_len = kv_len_[b] - (q_start_[b + 1] - first) + count;
        PagedAttentionArgs a = args();
        a.requests = 1;
        a.q.data += first * a.q.stride0;
        a.out = {out.data() + first * o_.heads * o_.value_size, o_.heads * o_.value_size, o_.value_size};
        a.block_table += static_cast<int64_t>(b) * columns_;
        a.q_start = q_start;
        a.kv_len = &kv_len;
        fn(a);
        first += count;
      }
    }
    return out;
  }

  std::vector<float>& values() { return v_; }
  int32_t block(int64_t b, int64_t i) const { return table_[static_cast<size_t>(b * columns_ + i)]; }

 private:
  void write(int64_t b, int64_t length) {
    KvWriteArgs w;
    const auto k = random_floats(length * o_.kv_heads * o_.key_size, static_cast<unsigned>(100 + b), 2);
    const auto v = random_floats(length * o_.kv_heads * o_.value_size, static_cast<unsigned>(200 + b));
    std::vector<int32_t> slots;
    for (int64_t p = 0; p < length; ++p) {
      slots.push_back(block(b, p / kBlock) * static_cast<int32_t>(kBlock) + static_cast<int32_t>(p % kBlock));
    }
    w.tokens = length;
    w.k = {k.data(), o_.kv_heads * o_.key_size, o_.key_size};
    w.v = {v.data(), o_.kv_heads * o_.value_size, o_.value_size};
    w.slots = slots.data();
    w.cache = cache_;
    reference::kv_write(w);
  }

  Options o_;
  int64_t columns_ = 0;
  std::vector<int32_t> q_start_, kv_len_, table_;
  std::vector<float> q_, k_, v_, sinks_, slopes_;
  KvCache cache_;
  Workspace workspace_;
};

// Scores are chains of D products and within a few eps of their size (about 2 to 6), which their exponentials
// pass on as a relative error; the weights add to 1 and the values are of size 1. So a few tens of eps in
// all; this is 34 of them.
constexpr double kTolerance = 4e-6;

const std::vector<Options>& all_options() {
  static const std::vector<Options> options = {
      {},
      {.heads = 9, .kv_heads = 3},
      {.heads = 4, .kv_heads = 1, .key_size = 8, .value_size = 8, .sinks = true},
      {.heads = 3, .kv_heads = 1, .key_size = 80, .value_size = 80, .window = 20},
      {.heads = 2, .kv_heads = 1, .key_size = 20, .value_size = 36, .softcap = 3},
      {.heads = 4,
       .kv_heads = 4,
       .key_size = 96,
       .value_size = 128,
       .window = 40,
       .softcap = 20,
       .sinks = true},
      {.heads = 4, .kv_heads = 2, .key_size = 16, .value_size = 16, .slopes = true},
      {.heads = 3,
       .kv_heads = 3,
       .key_size = 40,
       .value_size = 24,
       .window = 50,
       .softcap = 2,
       .sinks = true,
       .slopes = true},
      {.heads = 40, .kv_heads = 1, .key_size = 16, .value_size = 16},  // more heads than a tile has rows
      {.heads = 1, .kv_heads = 1, .key_size = 256, .value_size = 256, .window = 1},
  };
  return options;
}

std::string describe(const Options& o) {
  return " heads " + std::to_string(o.heads) + "/" + std::to_string(o.kv_heads) + " D " +
         std::to_string(o.key_size) + "/" + std::to_string(o.value_size) + " window " +
         std::to_string(o.window) + (o.slopes ? " slopes" : "");
}

void equals_reference() {
  for (const Options& o : all_options()) {
    // Prefill alone, decodes at the borders of blocks and splits, a chunk upon a past, an empty request.
    Scene scene(o, {0, 31, 32, 513, 10, 600, 0}, {40, 1, 1, 1, 0, 70, 1});
    const auto expected = scene.run([](const PagedAttentionArgs& a) { reference::paged_attention(a); });
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const auto out = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); });
      CHECK(worst(out, expected, kTolerance, 0) <= 1)
          << what << describe(o) << ": " << worst(out, expected, kTolerance, 0) << " of the tolerance";
    });
  }
}

// Alone, in a batch, chunked in any way, with any threads: the same bits.
void same_bits_in_any_company() {
  for (const Options& o : all_options()) {
    Scene scene(o, {0, 1100, 40, 505}, {75, 1, 33, 20});
    for (const std::string& isa : available_isas()) {
      const KernelTable& kernels = *kernels_for(isa.c_str());
      std::vector<float> first;
      for (const int threads : {1, 2, 3}) {
        ThreadPool pool(threads);
        const auto attend = [&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); };
        const auto whole = scene.run(attend);
        if (first.empty()) first = whole;
        CHECK(same_bits(whole, first)) << isa << describe(o) << " threads " << threads;
        for (const int64_t chunk : {1, 7, 16, 64}) {
          CHECK(same_bits(scene.run_chunked(chunk, attend), first))
              << isa << describe(o) << " threads " << threads << " chunk " << chunk;
        }
      }
    }
  }
}

// One long decode on many threads goes through split tasks and a merge; on one thread it doesn't.
void split_decode_has_the_same_bits() {
  for (const Options& o :
       {Options{}, Options{.heads = 6, .kv_heads = 2, .window = 1300, .sinks = true},
        Options{.heads = 4, .kv_heads = 2, .key_size = 32, .value_size = 32, .slopes = true},
        Options{.heads = 3, .kv_heads = 1, .key_size = 24, .value_size = 40}}) {
    Scene scene(o, {4000}, {2});
    const auto expected = scene.run([](const PagedAttentionArgs& a) { reference::paged_attention(a); });
    for (const std::string& isa : available_isas()) {
      const KernelTable& kernels = *kernels_for(isa.c_str());
      ThreadPool one(1), three(3);
      const auto plain = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, one); });
      const auto split = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, three); });
      CHECK(same_bits(plain, split)) << isa << describe(o);
      CHECK(worst(plain, expected, kTolerance, 0) <= 1) << isa << describe(o);
    }
  }
}

// A NaN in a later token's value reaches no earlier token, though they share a tile.
void later_values_do_not_leak() {
  for (const int64_t window : {0, 9}) {
    Options o{.heads = 3, .kv_heads = 1, .window = window};
    Scene scene(o, {0}, {20});
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const auto attend = [&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); };
      const auto clean = scene.run(attend);
      std::vector<float>& v = scene.values();
      const std::vector<float> saved = v;
      v[static_cast<size_t>((scene.block(0, 0) * kBlock + 11) * 64 + 5)] = kNaN;  // position 11, channel 5
      const auto out = scene.run(attend);
      v = saved;
      for (int64_t t = 0; t < 20; ++t) {
        const bool sees = t >= 11 && (window == 0 || t < 11 + window);
        for (int64_t i = t * 3 * 64; i < (t + 1) * 3 * 64; ++i) {
          const float x = out[static_cast<size_t>(i)], y = clean[static_cast<size_t>(i)];
          const bool same = std::memcmp(&x, &y, sizeof x) == 0;
          CHECK(sees && i % 64 == 5 ? std::isnan(x) : same)
              << what << " token " << t << " channel " << i % 64;
        }
      }
    });
  }
}

// Queries and results as slices of wider buffers, as a fused q/k/v gives.
void strides() {
  Scene scene({.heads = 4, .kv_heads = 2, .key_size = 16, .value_size = 16}, {0, 5}, {37, 1});
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto plain = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); });
    PagedAttentionArgs a = scene.args();
    std::vector<float> q = filled(38 * 100, kNaN), out = filled(38 * 90, -7);
    for (int64_t t = 0; t < 38; ++t) {
      for (int64_t h = 0; h < 4; ++h)
        std::copy_n(a.q.data + t * 64 + h * 16, 16, q.data() + t * 100 + h * 20);
    }
    a.q = {q.data(), 100, 20};
    a.out = {out.data(), 90, 17};
    kernels.paged_attention(a, pool);
    for (int64_t t = 0; t < 38; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        CHECK(std::memcmp(out.data() + t * 90 + h * 17, plain.data() + t * 64 + h * 16, 64) == 0) << what;
        CHECK(out[static_cast<size_t>(t * 90 + h * 17 + 16)] == -7) << what;
      }
    }
  });
}

// A steep slope leaves a query its own value and next to nothing of the others; a slope of 0 changes no bit.
void slopes_say_how_far() {
  Scene plain({.heads = 2, .kv_heads = 1}, {40}, {9});
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto without = plain.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); });
    const float slopes[2] = {0, 100};
    const auto with = plain.run([&](PagedAttentionArgs a) {
      a.slopes = slopes;
      kernels.paged_attention(a, pool);
    });
    for (int64_t t = 0; t < 9; ++t) {
      CHECK(std::memcmp(&with[static_cast<size_t>(t * 128)], &without[static_cast<size_t>(t * 128)], 256) ==
            0)
          << what << " token " << t;
      const int64_t position = 40 + t;
      const int64_t row = plain.block(0, position / kBlock) * kBlock + position % kBlock;
      for (int64_t i = 0; i < 64; ++i) {
        const float own = plain.values()[static_cast<size_t>(row * 64 + i)];
        CHECK(std::fabs(with[static_cast<size_t>(t * 128 + 64 + i)] - own) < 1e-6f) << what << " token " << t;
      }
    }
  });
}

void kv_write_is_exact() {
  const int64_t tokens = 50, heads = 3, key = 20, value = 12, blocks = 4;
  const auto k = random_floats(tokens * 70, 1), v = random_floats(tokens * 40, 2);
  std::vector<int32_t> slots(static_cast<size_t>(tokens));
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i * 37 % (blocks * kBlock));
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    std::vector<float> caches[2][2];
    for (int which = 0; which < 2; ++which) {
      auto& cache = caches[which];
      cache[0] = filled(blocks * heads * key * kBlock, 0);
      cache[1] = filled(blocks * heads * value * kBlock, 0);
      KvWriteArgs a;
      a.tokens = tokens;
      a.k = {k.data(), 70, 21};
      a.v = {v.data(), 40, 13};
      a.slots = slots.data();
      a.cache = {cache[0].data(), cache[1].data(), heads, key, value};
      which == 0 ? kernels.kv_write(a, pool) : reference::kv_write(a);
    }
    CHECK(same_bits(caches[0][0], caches[1][0]) && same_bits(caches[0][1], caches[1][1])) << what;
  });
}

}  // namespace

int main() {
  RUN(equals_reference);
  RUN(same_bits_in_any_company);
  RUN(split_decode_has_the_same_bits);
  RUN(later_values_do_not_leak);
  RUN(strides);
  RUN(slopes_say_how_far);
  RUN(kv_write_is_exact);
  return check::result();
}
