// What the tests of attention share: requests with their cache, in any format.
#pragma once

#include <iterator>
#include <utility>

#include "test_kernels.h"

namespace ew::testing {

constexpr char kNotWritten = -1;

struct Options {
  int64_t heads = 2, kv_heads = 2, key_size = 64, value_size = 64, window = 0;
  float softcap = 0;
  bool sinks = false, slopes = false;
  KvFormat format = KvFormat::f32;
};

// Some requests: `past` tokens are in the cache before the step, `tokens` come in it. The blocks are dealt
// out in a shuffled order; every slot that no request has reached is NaN,
// by its scale where it has one.
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
    k_.assign(static_cast<size_t>(blocks * o.kv_heads * kv_piece_bytes(o.format, o.key_size)), kNotWritten);
    v_.assign(static_cast<size_t>(blocks * o.kv_heads * kv_piece_bytes(o.format, o.value_size)), kNotWritten);
    cache_ = {k_.data(), v_.data(), o.kv_heads, o.key_size, o.value_size, o.format};
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

  const KvCache& cache() const { return cache_; }
  // Element d of the value at a position, as the cache has it.
  double value(int64_t b, int64_t position, int64_t head, int64_t d) const {
    return reference::cached(cache_, false, block(b, position / kBlock), head, position % kBlock, d);
  }
  // Writes the only head's value at a position anew.
  void overwrite(int64_t b, int64_t position, const std::vector<float>& v) {
    const auto k = random_floats(o_.key_size, 7);
    const int32_t slot = slot_of(b, position);
    reference::kv_write({1, {k.data(), 0, 0}, {v.data(), 0, 0}, &slot, cache_});
  }
  using Memory = std::pair<std::vector<char>, std::vector<char>>;
  Memory memory() const { return {k_, v_}; }
  void put_back(const Memory& memory) {
    std::copy(memory.first.begin(), memory.first.end(), k_.begin());
    std::copy(memory.second.begin(), memory.second.end(), v_.begin());
  }
  int32_t slot_of(int64_t b, int64_t position) const {
    return block(b, position / kBlock) * static_cast<int32_t>(kBlock) +
           static_cast<int32_t>(position % kBlock);
  }
  int32_t block(int64_t b, int64_t i) const { return table_[static_cast<size_t>(b * columns_ + i)]; }

 private:
  void write(int64_t b, int64_t length) {
    KvWriteArgs w;
    const auto k = random_floats(length * o_.kv_heads * o_.key_size, static_cast<unsigned>(100 + b), 2);
    const auto v = random_floats(length * o_.kv_heads * o_.value_size, static_cast<unsigned>(200 + b));
    std::vector<int32_t> slots;
    for (int64_t p = 0; p < length; ++p) {
      slots.push_back(slot_of(b, p));
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
  std::vector<float> q_, sinks_, slopes_;
  std::vector<char> k_, v_;
  KvCache cache_;
  Workspace workspace_;
};

inline const std::vector<Options>& all_options() {
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
      {.heads = 8, .kv_heads = 1, .key_size = 64, .value_size = 64},
      {.heads = 4, .kv_heads = 1, .key_size = 128, .value_size = 128, .window = 130},
      {.heads = 6,
       .kv_heads = 2,
       .key_size = 33,
       .value_size = 17,
       .window = 37,
       .softcap = 5,
       .sinks = true},
      {.heads = 1, .kv_heads = 1, .key_size = 1, .value_size = 1},
  };
  // Each with floats and with one other format.
  static const std::vector<Options> of_all_formats = [] {
    std::vector<Options> all = options;
    for (size_t i = 0; i < options.size(); ++i) {
      all.push_back(options[i]);
      all.back().format = kKvFormats[1 + i % (std::size(kKvFormats) - 1)].value;
    }
    return all;
  }();
  return of_all_formats;
}

inline std::string describe(const Options& o) {
  return " heads " + std::to_string(o.heads) + "/" + std::to_string(o.kv_heads) + " D " +
         std::to_string(o.key_size) + "/" + std::to_string(o.value_size) + " window " +
         std::to_string(o.window) + (o.slopes ? " slopes" : "") + " " +
         kKvFormats[static_cast<size_t>(o.format)].name;
}

}  // namespace ew::testing
