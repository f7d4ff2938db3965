// What the tests of attention share: requests with their cache, in any format.
#pragma once

#include <iterator>
#include <thread>
#include <utility>

#include "test_kernels.h"

namespace ew::testing {

constexpr char kNotWritten = -1;

struct Options {
  int64_t heads = 2, kv_heads = 2, key_size = 64, value_size = 64, window = 0;
  float softcap = 0;
  bool sinks = false, slopes = false;
  KvFormat format = KvFormat::f32;
  BlockChoice choice = {};
  bool values_in_keys = false;
  bool ends = false;   // a second cache, of k8v8, has the ends, and the first one NaN where that is read
  int64_t owners = 1;  // the blocks of a split have the same number modulo this, a random one
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
    const int64_t each = columns_ * requests + 2, blocks = each * o.owners;
    std::vector<int32_t> order(static_cast<size_t>(blocks));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(5));
    if (o.owners > 1) order = in_splits(order);
    const bool summaries = o.choice.best > 0;
    const KvShape shape{o.kv_heads, o.key_size, o.value_size, o.format, summaries, o.values_in_keys};
    k_.assign(static_cast<size_t>(shape.pieces(blocks) * shape.key_bytes()), kNotWritten);
    v_.assign(static_cast<size_t>(shape.pieces(blocks) * shape.value_bytes()), kNotWritten);
    cache_ = {shape, k_.data(), v_.data()};
    for (int64_t b = 0; b < requests; ++b) {
      const int64_t length = kv_len_[static_cast<size_t>(b)];
      for (int64_t i = 0; i < columns_; ++i) {
        const bool used = i < (length + kBlock - 1) / kBlock;
        table_.push_back(used ? order[static_cast<size_t>(b * columns_ + i)] : -1);
      }
      write(b, length, cache_, table_);
      // Earlier steps have left the summaries of what they filled.
      for (int64_t i = 0; summaries && i < past[static_cast<size_t>(b)] / kBlock; ++i) {
        for (int64_t h = 0; h < o.kv_heads; ++h) reference::summarize(cache_, block(b, i), h);
      }
    }
    if (o.ends) add_ends(past, blocks);
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
    a.spans = {static_cast<int64_t>(kv_len_.size()), q_start_.data()};
    a.query_heads = o_.heads;
    a.q = {q_.data(), o_.heads * o_.key_size, o_.key_size};
    a.cache = cache_;
    a.block_table = table_.data();
    a.block_table_stride = columns_;
    a.ends = ends_;
    a.ends_table = ends_table_.data();
    a.ends_table_stride = columns_;
    a.kv_len = kv_len_.data();
    a.sinks = o_.sinks ? sinks_.data() : nullptr;
    a.slopes = o_.slopes ? slopes_.data() : nullptr;
    a.scale = 1 / std::sqrt(static_cast<float>(o_.key_size));
    a.window = o_.window;
    a.softcap = o_.softcap;
    a.choice = o_.choice;
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
        a.spans = {1, q_start};
        a.q.data += first * a.q.stride0;
        a.out = {out.data() + first * o_.heads * o_.value_size, o_.heads * o_.value_size, o_.value_size};
        a.block_table += static_cast<int64_t>(b) * columns_;
        a.ends_table += static_cast<int64_t>(b) * columns_;
        a.kv_len = &kv_len;
        fn(a);
        first += count;
      }
    }
    return out;
  }

  // Query heads low .. high-1 alone, [T, high - low, Dv], over a cache of just the kv heads that they meet.
  template <class F>
  std::vector<float> run_heads(int64_t low, int64_t high, const F& fn) {
    const int64_t group = o_.heads / o_.kv_heads, first = low / group, past = (high - 1) / group + 1;
    const auto some = [&](const std::vector<char>& all, Side side, int64_t size) {
      const int64_t piece = kv_piece_bytes(o_.format, side, size), row = o_.kv_heads * piece;
      std::vector<char> kept;
      for (int64_t at = 0; at < static_cast<int64_t>(all.size()); at += row)
        kept.insert(kept.end(), all.begin() + at + first * piece, all.begin() + at + past * piece);
      return kept;
    };
    std::vector<char> k = some(k_, Side::keys, o_.key_size), v = some(v_, Side::values, o_.value_size);
    std::vector<float> out = filled(q_start_.back() * (high - low) * o_.value_size, kNaN);
    PagedAttentionArgs a = args();
    a.query_heads = high - low, a.group = group, a.first_head = low % group;
    a.q.data += low * o_.key_size;
    a.cache.k = k.data(), a.cache.v = v.data(), a.cache.kv_heads = past - first;
    if (a.sinks != nullptr) a.sinks += low;
    if (a.slopes != nullptr) a.slopes += low;
    a.out = {out.data(), (high - low) * o_.value_size, o_.value_size};
    fn(a);
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
  // Makes keys and values of a block and head NaN; a summary stays.
  void spoil(int64_t b, int64_t i, int64_t head) {
    const int64_t piece = block(b, i) * o_.kv_heads + head;
    const int64_t keys = kv_piece_bytes(o_.format, Side::keys, o_.key_size);
    const int64_t values = kv_piece_bytes(o_.format, Side::values, o_.value_size);
    std::fill_n(k_.begin() + piece * cache_.key_bytes(), keys, kNotWritten);
    if (!o_.values_in_keys) std::fill_n(v_.begin() + piece * values, values, kNotWritten);
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

  // The step by `ranks` threads, each with a cache that has its own blocks alone, and a table without what is
  // before the window. fn(RingAttentionArgs, rank), whose exchange the caller sets. [T, Nq, Dv].
  template <class F>
  std::vector<float> run_ring(int64_t ranks, const F& fn) {
    const int64_t tokens = q_start_.back(), size = o_.value_size;
    std::vector<std::vector<float>> parts(static_cast<size_t>(ranks));
    std::vector<int32_t> table = table_;
    for (size_t b = 0; b < kv_len_.size(); ++b) {
      const int64_t first = kv_len_[b] - (q_start_[b + 1] - q_start_[b]);
      const int64_t past = o_.window > 0 ? std::max<int64_t>(0, first - o_.window + 1) / kBlock : 0;
      std::fill_n(table.begin() + static_cast<int64_t>(b) * columns_, past, -1);
    }
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        std::vector<char> k = own_blocks(k_, cache_.key_bytes(), ranks, rank);
        std::vector<char> v = own_blocks(v_, cache_.value_bytes(), ranks, rank);
        Workspace workspace;
        RingAttentionArgs a;
        a.attention = args();
        a.attention.cache.k = k.data(), a.attention.cache.v = v.data();
        a.attention.block_table = table.data();
        a.attention.workspace = &workspace;
        a.ranks = ranks, a.rank = rank;
        a.head = o_.heads * rank / ranks, a.heads = o_.heads * (rank + 1) / ranks - a.head;
        std::vector<float>& out = parts[static_cast<size_t>(rank)];
        out = filled(tokens * a.heads * size, kNaN);
        a.attention.out = {out.data(), a.heads * size, size};
        fn(a, rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<float> whole;
    for (int64_t t = 0; t < tokens; ++t) {
      for (const std::vector<float>& part : parts) {
        const int64_t row = static_cast<int64_t>(part.size()) / std::max<int64_t>(tokens, 1);
        whole.insert(whole.end(), part.begin() + t * row, part.begin() + (t + 1) * row);
      }
    }
    return whole;
  }

 private:
  // The same blocks, of which each run of 16 that a request takes is of one owner.
  std::vector<int32_t> in_splits(const std::vector<int32_t>& order) const {
    std::vector<std::vector<int32_t>> of(static_cast<size_t>(o_.owners));
    for (const int32_t block : order) of[static_cast<size_t>(block % o_.owners)].push_back(block);
    std::mt19937 random(11);
    std::vector<int32_t> dealt;
    size_t owner = 0;
    for (int64_t i = 0; i < columns_ * static_cast<int64_t>(kv_len_.size()); ++i) {
      if (i % columns_ % (kSplit / kBlock) == 0) owner = random() % of.size();
      dealt.push_back(of[owner].back());
      of[owner].pop_back();
    }
    return dealt;
  }

  std::vector<char> own_blocks(const std::vector<char>& all, int64_t piece, int64_t ranks,
                               int64_t rank) const {
    const int64_t bytes = o_.kv_heads * piece;
    std::vector<char> own(all.size(), kNotWritten);
    for (int64_t at = rank * bytes; at < static_cast<int64_t>(all.size()); at += ranks * bytes)
      std::copy_n(all.begin() + at, bytes, own.begin() + at);
    return own;
  }

  // The ends that queries of this step read, and gaps elsewhere. What all queries read there is NaN in the
  // cache of all keys.
  void add_ends(const std::vector<int64_t>& past, int64_t blocks) {
    const KvShape shape{o_.kv_heads, o_.key_size, o_.value_size, KvFormat::k8v8};
    end_k_.assign(static_cast<size_t>(shape.pieces(blocks) * shape.key_bytes()), kNotWritten);
    end_v_.assign(static_cast<size_t>(shape.pieces(blocks) * shape.value_bytes()), kNotWritten);
    ends_ = {shape, end_k_.data(), end_v_.data()};
    ends_table_ = table_;
    const int64_t each = 128 / kBlock;  // blocks of a step of keys
    std::vector<int32_t> unused;
    for (int32_t block = 0; block < static_cast<int32_t>(blocks); ++block) unused.push_back(block);
    std::shuffle(unused.begin(), unused.end(), std::mt19937(7));
    for (size_t b = 0; b < kv_len_.size(); ++b) {
      const int64_t first = past[b] / kBlock / each - 1, last = (kv_len_[b] - 1) / kBlock / each - 1;
      for (int64_t i = 0; i < columns_; ++i) {
        int32_t& place = ends_table_[b * static_cast<size_t>(columns_) + static_cast<size_t>(i)];
        place = -1;
        if (i * kBlock >= kv_len_[b] || (i >= each && i / each < first)) continue;
        place = unused.back();
        unused.pop_back();
        if (i >= each && i / each < last) continue;  // a later query reads it in the cache of all keys
        for (int64_t h = 0; h < o_.kv_heads; ++h) {
          const int64_t piece = cache_.at(block(static_cast<int64_t>(b), i), h);
          std::fill_n(k_.begin() + piece * cache_.key_bytes(), cache_.key_bytes(), kNotWritten);
          std::fill_n(v_.begin() + piece * cache_.value_bytes(), cache_.value_bytes(), kNotWritten);
        }
      }
      write(static_cast<int64_t>(b), kv_len_[b], ends_, ends_table_);
    }
  }

  // The first `length` tokens of a request to the blocks that a table has.
  void write(int64_t b, int64_t length, const KvCache& cache, const std::vector<int32_t>& table) {
    const auto k = random_floats(length * o_.kv_heads * o_.key_size, static_cast<unsigned>(100 + b), 2);
    const auto v = random_floats(length * o_.kv_heads * o_.value_size, static_cast<unsigned>(200 + b));
    for (int64_t p = 0; p < length; ++p) {
      const int32_t block = table[static_cast<size_t>(b * columns_ + p / kBlock)];
      if (block < 0) continue;
      const int32_t slot = block * static_cast<int32_t>(kBlock) + static_cast<int32_t>(p % kBlock);
      KvWriteArgs w;
      w.tokens = 1;
      w.k = {k.data() + p * o_.kv_heads * o_.key_size, o_.kv_heads * o_.key_size, o_.key_size};
      w.v = {v.data() + p * o_.kv_heads * o_.value_size, o_.kv_heads * o_.value_size, o_.value_size};
      w.slots = &slot;
      w.cache = cache;
      reference::kv_write(w);
    }
  }

  Options o_;
  int64_t columns_ = 0;
  std::vector<int32_t> q_start_, kv_len_, table_, ends_table_;
  std::vector<float> q_, sinks_, slopes_;
  std::vector<char> k_, v_, end_k_, end_v_;
  KvCache cache_, ends_;
  Workspace workspace_;
};

inline bool takes_heads(const Options& o, KvFormat format) {
  if (o.values_in_keys && has_few_bits(format)) return false;
  return takes_head(format, Side::keys, o.key_size) && takes_head(format, Side::values, o.value_size);
}

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
      {.heads = 40, .kv_heads = 1, .key_size = 72, .value_size = 64, .values_in_keys = true},
      {.heads = 5, .kv_heads = 1, .key_size = 41, .value_size = 33, .sinks = true, .values_in_keys = true},
      {.heads = 16, .kv_heads = 1, .key_size = 96, .value_size = 80, .window = 40, .values_in_keys = true},
      {.heads = 6, .kv_heads = 2, .key_size = 24, .value_size = 24, .softcap = 5, .values_in_keys = true},
  };
  // Each with floats and with one other format that takes its heads.
  static const std::vector<Options> of_all_formats = [] {
    std::vector<Options> all = options;
    for (size_t i = 0; i < options.size(); ++i) {
      all.push_back(options[i]);
      size_t other = 1 + i % (std::size(kKvFormats) - 1);
      if (!takes_heads(options[i], kKvFormats[other].value)) other = 1 + i % 3;
      all.back().format = kKvFormats[other].value;
    }
    for (const KvFormatEntry& entry : kKvFormats) {
      if (!has_few_bits(entry.value)) continue;
      all.push_back({.heads = 9, .kv_heads = 3, .format = entry.value});
      all.push_back({.heads = 4,
                     .kv_heads = 1,
                     .key_size = 192,
                     .value_size = 128,
                     .window = 130,
                     .softcap = 20,
                     .sinks = true,
                     .format = entry.value});
      all.push_back({.heads = 3, .kv_heads = 1, .key_size = 256, .value_size = 24, .format = entry.value});
    }
    return all;
  }();
  return of_all_formats;
}

// Rows that choose blocks, of each format.
inline std::vector<Options> choosing_options() {
  std::vector<Options> all;
  for (const KvFormatEntry& format : kKvFormats) {
    const KvFormat value = format.value;
    if (has_few_bits(value)) continue;
    all.push_back({.heads = 9, .kv_heads = 3, .format = value, .choice = {1, 1, 3, 0}});
    all.push_back({.heads = 4,
                   .kv_heads = 1,
                   .key_size = 20,
                   .value_size = 36,
                   .softcap = 3,
                   .sinks = true,
                   .format = value,
                   .choice = {0, 2, 1, 300}});
    all.push_back({.heads = 8,
                   .kv_heads = 2,
                   .key_size = 128,
                   .value_size = 64,
                   .slopes = true,
                   .format = value,
                   .choice = {2, 0, 5, 64}});
    all.push_back({.heads = 40,
                   .kv_heads = 1,
                   .key_size = 33,
                   .value_size = 16,
                   .format = value,
                   .choice = {1, 1, 2, 0}});
    all.push_back(all.back());
    all.back().values_in_keys = true;
  }
  return all;
}

// all_options(), or under a sanitizer one in five from the one of that number on.
inline std::vector<Options> some_options(size_t from) {
  std::vector<Options> some;
  for (size_t i = from % kOneIn; i < all_options().size(); i += kOneIn == 1 ? 1 : 5) {
    some.push_back(all_options()[i]);
  }
  return some;
}

inline std::string describe(const Options& o) {
  return " heads " + std::to_string(o.heads) + "/" + std::to_string(o.kv_heads) + " D " +
         std::to_string(o.key_size) + "/" + std::to_string(o.value_size) + " window " +
         std::to_string(o.window) + (o.slopes ? " slopes" : "") +
         (o.values_in_keys ? " values in keys" : "") + (o.ends ? " ends" : "") +
         (o.choice.best > 0 ? " best " + std::to_string(o.choice.best) : "") + " " +
         kKvFormats[static_cast<size_t>(o.format)].name;
}

}  // namespace ew::testing
