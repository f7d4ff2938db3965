// attention: the tokens of each request over those of the same step, without a cache.
//
// A task packs the keys and values of a (request, kv head) as blocks of a cache of floats or bf16 lie
// (kv_format.h), in its thread's memory, and attends to them as paged_attention does. So results have the
// canonical order of attention.h, with positions that begin at 0; a causal one has the bits of
// paged_attention with such a cache. (But for AMX: bf16 is multiplied in pairs there, too.)
//
//   q, k, v  [T, N, D]     request 0 | request 1 | ...
//   task     (request 1, kv head 2, its query tiles 0, 1)  ->  k [blocks][D][32], v [blocks][32][Dv]
//
// Tasks that share a (request, kv head) pack it each for itself: they don't wait for each other. There are as
// many as their work needs, so that none takes long: a request's work grows with the square of its tokens.
#pragma once

#include "attention.h"
#include "kernels.h"
#include "parallel.h"

namespace ew {
namespace {

// Keys of up to 32 tokens, at least one, to a block [size][32]. Slots past them repeat the last key: no query
// sees them.
inline void pack_keys(const float* k, int64_t stride, int64_t tokens, int64_t size, float* to) {
  for (int64_t slot = 0; slot < kBlock; slot += 16) {
    const float* rows[16];
    for (int64_t i = 0; i < 16; ++i) rows[i] = k + clamp(slot + i, 0, tokens - 1) * stride;
    int64_t d = 0;
    for (; d + 4 <= size; d += 4) {
      F16 columns[4];
      load_columns(rows, d, columns);
      for (int64_t i = 0; i < 4; ++i) store(to + (d + i) * kBlock + slot, columns[i]);
    }
    for (; d < size; ++d) {
      for (int64_t i = 0; i < 16; ++i) to[d * kBlock + slot + i] = rows[i][d];
    }
  }
}

// The same as bf16, of an even number of channels: [size/2][32][2].
inline void pack_key_pairs(const float* k, int64_t stride, int64_t tokens, int64_t size, uint16_t* to) {
  for (int64_t slot = 0; slot < kBlock; slot += 16) {
    if (slot >= tokens) {  // all 16 are the last key
      const float* last = k + (tokens - 1) * stride;
      for (int64_t d = 0; d < size; d += 2) {
        const uint32_t first = float_to_bf16(last[d]), second = float_to_bf16(last[d + 1]);
        uint32_t pairs[16];
        for (uint32_t& pair : pairs) pair = first | second << 16;
        __builtin_memcpy(to + (d * kBlock / 2 + slot) * 2, pairs, sizeof pairs);
      }
      continue;
    }
    const float* rows[16];
    for (int64_t i = 0; i < 16; ++i) rows[i] = k + clamp(slot + i, 0, tokens - 1) * stride;
    const auto put = [&](int64_t d, const float* first, const float* second) {
      uint32_t pairs[16];
      for (int64_t i = 0; i < 16; ++i)
        pairs[i] = float_to_bf16(first[i]) | static_cast<uint32_t>(float_to_bf16(second[i])) << 16;
      __builtin_memcpy(to + (d * kBlock / 2 + slot) * 2, pairs, sizeof pairs);
    };
    int64_t d = 0;
    for (; d + 4 <= size; d += 4) {
      F16 columns[4];
      float lanes[4][16];
      load_columns(rows, d, columns);
      for (int64_t i = 0; i < 4; ++i) store(lanes[i], columns[i]);
      put(d, lanes[0], lanes[1]);
      put(d + 2, lanes[2], lanes[3]);
    }
    for (; d < size; d += 2) {
      float first[16], second[16];
      for (int64_t i = 0; i < 16; ++i) first[i] = rows[i][d], second[i] = rows[i][d + 1];
      put(d, first, second);
    }
  }
}

// Values of up to 32 tokens as bf16, [16][size][2]; slots past them are zero.
inline void pack_value_pairs(const float* v, int64_t stride, int64_t tokens, int64_t size, uint16_t* to) {
  for (int64_t slot = 0; slot < kBlock; slot += 2, to += 2 * size) {
    const float *first = v + slot * stride, *second = first + stride;
    const auto put = [&](const auto& low, const auto& high) {
      for (int64_t c = 0; c < size; c += 16) {
        uint32_t pairs[16];
        const int64_t count = size - c < 16 ? size - c : 16;
        for (int64_t i = 0; i < count; ++i) pairs[i] = low(c + i) | static_cast<uint32_t>(high(c + i)) << 16;
        __builtin_memcpy(to + 2 * c, pairs, static_cast<size_t>(count) * sizeof(uint32_t));
      }
    };
    const auto none = [](int64_t) { return uint16_t{0}; };
    const auto of = [](const float* row) { return [row](int64_t c) { return float_to_bf16(row[c]); }; };
    if (slot + 1 < tokens) {
      put(of(first), of(second));
    } else if (slot < tokens) {
      put(of(first), none);
    } else {
      __builtin_memset(to, 0, static_cast<size_t>(size) * sizeof(uint32_t));
    }
  }
}

// Keys and values low .. high-1 of the request that begins at `token` to the blocks of a cache of one head,
// which are packed whole: values that a request lacks of its last one are zero.
inline void pack(const AttentionArgs& a, int64_t token, int64_t tokens, int64_t head, int64_t low,
                 int64_t high, const KvCache& c) {
  for (int64_t block = low / kBlock; block * kBlock < high; ++block) {
    const int64_t first = block * kBlock, row = token + first;
    const int64_t count = clamp(tokens - first, 1, kBlock);
    const float* k = a.k.data + row * a.k.stride0 + head * a.k.stride1;
    const float* v = a.v.data + row * a.v.stride0 + head * a.v.stride1;
    if (c.format != KvFormat::f32) {
      if (a.key_size % 2 == 0) {
        pack_key_pairs(k, a.k.stride0, count, a.key_size,
                       reinterpret_cast<uint16_t*>(key_piece(c, block, 0)));
      } else {
        for (int64_t slot = 0; slot < kBlock; ++slot)
          write_key(c, block, slot, 0, k + clamp(slot, 0, count - 1) * a.k.stride0);
      }
      pack_value_pairs(v, a.v.stride0, count, a.value_size,
                       reinterpret_cast<uint16_t*>(value_piece(c, block, 0)));
      continue;
    }
    pack_keys(k, a.k.stride0, count, a.key_size, reinterpret_cast<float*>(key_piece(c, block, 0)));
    float* to = reinterpret_cast<float*>(value_piece(c, block, 0));
    for (int64_t slot = 0; slot < count; ++slot)
      copy_floats(v + slot * a.v.stride0, a.value_size, to + slot * a.value_size);
    __builtin_memset(to + count * a.value_size, 0,
                     static_cast<size_t>((kBlock - count) * a.value_size) * sizeof(float));
  }
}

// The query tiles tile_begin .. tile_end-1 of the heads that share a kv head, of one request.
struct PackedTask {
  int64_t token, tokens;  // the request's, within the step
  int64_t kv_head, tile_begin, tile_end;
};

// How the queries of a kv head are divided: `pieces` of its heads, and tiles of `tokens` tokens.
struct TileShape {
  int64_t group, pieces, tokens;
  explicit TileShape(const AttentionArgs& a) {
    group = a.query_heads / a.kv_heads;
    pieces = (group + kTileHeads - 1) / kTileHeads;
    const int64_t most = (group + pieces - 1) / pieces;
    // Where tiles are cut by no diagonal they may have as many tokens as rows.
    tokens = clamp(kTileRows / most, 1, a.causal || a.window > 0 ? kTileTokens : kTileRows);
  }
  int64_t tiles(int64_t of) const { return pieces * ((of + tokens - 1) / tokens); }

  // Tile `number` of a task's (request, kv head), but for its splits.
  AttentionTask tile(const AttentionArgs& a, const PackedTask& task, int64_t number) const {
    const int64_t per_piece = tiles(task.tokens) / pieces, piece = number / per_piece;
    const int64_t first_head = task.kv_head * group;
    AttentionTask t = {};
    t.position = number % per_piece * tokens;
    t.token = task.token + t.position;
    t.tokens = clamp(task.tokens - t.position, 0, tokens);
    t.keys = task.tokens;
    t.beyond = a.causal ? 0 : a.window > 0 ? a.window - 1 : task.tokens;
    t.head = first_head + group * piece / pieces;
    t.heads = first_head + group * (piece + 1) / pieces - t.head;
    return t;
  }
};

// Multiply-adds of a kv head of a request, or as much time.
inline int64_t attention_work(const AttentionArgs& a, int64_t tokens) {
  constexpr int64_t kPacking = 8;  // of each element that is packed
  const int64_t sides = a.causal ? 1 : 2, seen = a.window > 0 ? sides * a.window : tokens;
  const int64_t keys = seen < tokens ? seen : tokens, group = a.query_heads / a.kv_heads;
  return tokens * (a.key_size + a.value_size) * (keys * group + kPacking);
}

// Calls fn(PackedTask) for all tasks, none of which is to have more work than `most` if it can be helped.
template <class F>
void for_packed_tasks(const AttentionArgs& a, const TileShape& shape, int64_t most, const F& fn) {
  for (int64_t b = 0; b < a.spans.requests; ++b) {
    const int64_t begin = a.spans.begin(b), tokens = a.spans.tokens(b), tiles = shape.tiles(tokens);
    if (tokens == 0) continue;
    const int64_t parts = clamp(attention_work(a, tokens) / most + 1, 1, (tiles + 1) / 2);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      for (int64_t i = 0; i < parts; ++i)
        fn(PackedTask{begin, tokens, head, tiles * i / parts, tiles * (i + 1) / parts});
    }
  }
}

// Fetches the rows that a task will read to the second cache. A head's rows are too far apart for the
// processor to guess the next one, and a short text waits longer for memory than for its products.
inline void prefetch_rows(const AttentionArgs& a, const PackedTask& task) {
  constexpr int64_t kMost = 128;  // of a longer one the rest comes while it is computed
  const int64_t group = a.query_heads / a.kv_heads, tokens = task.tokens < kMost ? task.tokens : kMost;
  const auto row = [&](const Rows<const float>& x, int64_t token, int64_t head, int64_t floats) {
    prefetch_piece(reinterpret_cast<const char*>(x.data + token * x.stride0 + head * x.stride1), floats * 4);
  };
  for (int64_t token = task.token; token < task.token + tokens; ++token) {
    row(a.k, token, task.kv_head, a.key_size);
    row(a.v, token, task.kv_head, a.value_size);
    row(a.q, token, task.kv_head * group, a.key_size);
  }
}

template <class Products>
void attend_packed(const AttentionArgs& a, Workers& pool) {
  const int64_t threads = pool.size();
  const TileShape shape(a);
  int64_t work = 0, longest = 0;
  for (int64_t b = 0; b < a.spans.requests; ++b) {
    const int64_t tokens = a.spans.tokens(b);
    work += a.kv_heads * attention_work(a, tokens);
    longest = tokens > longest ? tokens : longest;
  }
  if (longest == 0) return;
  const int64_t most = threads > 1 ? work / (8 * threads) + 1 : INT64_MAX;
  int64_t tasks = 0;
  for_packed_tasks(a, shape, most, [&](const PackedTask&) { ++tasks; });

  const int64_t blocks = (longest + kBlock - 1) / kBlock;
  const KvShape kept{1, a.key_size, a.value_size, a.format};
  const ScratchPlan<Products> plan(KvCache{kept});
  const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  const int64_t list_bytes = aligned(tasks * static_cast<int64_t>(sizeof(PackedTask)));
  const int64_t table_bytes = aligned(blocks * static_cast<int64_t>(sizeof(int32_t)));
  const int64_t key_bytes = aligned(blocks * kept.key_bytes());
  const int64_t value_bytes = aligned(blocks * kept.value_bytes());
  const int64_t each = plan.bytes() + key_bytes + value_bytes;
  char* memory = static_cast<char*>(a.workspace->reserve(list_bytes + table_bytes + threads * each));
  PackedTask* list = reinterpret_cast<PackedTask*>(memory);
  int32_t* table = reinterpret_cast<int32_t*>(memory + list_bytes);
  char* workers = memory + list_bytes + table_bytes;
  for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(i);
  int64_t filled = 0;
  for_packed_tasks(a, shape, most, [&](const PackedTask& task) { list[filled++] = task; });

  run_tasks(pool, tasks, work, [&](int64_t number, int worker) {
    const PackedTask& task = list[number];
    if (number + 1 < tasks) prefetch_rows(a, list[number + 1]);
    char* own = workers + worker * each;
    const AttentionScratch<Products> s = plan.scratch(own);
    PagedAttentionArgs paged;
    paged.q = a.q;
    paged.cache = {kept, own + plan.bytes(), own + plan.bytes() + key_bytes};
    paged.sinks = a.sinks;
    paged.slopes = a.slopes;
    paged.biases = a.biases;
    paged.scale = a.scale;
    paged.window = a.window;
    paged.softcap = a.softcap;
    paged.out = a.out;

    const auto begin_of = [&](const AttentionTask& t) { return first_key(a.window, t.position); };
    const auto end_of = [&](const AttentionTask& t) { return past_key(t, t.position + t.tokens - 1); };
    int64_t low = task.tokens, high = 0;
    for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
      const AttentionTask t = shape.tile(a, task, tile);
      low = begin_of(t) < low ? begin_of(t) : low;
      high = end_of(t) > high ? end_of(t) : high;
    }
    pack(a, task.token, task.tokens, task.kv_head, low, high, paged.cache);
    for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
      AttentionTask t = shape.tile(a, task, tile);
      t.blocks = table;
      t.split_begin = begin_of(t) / kSplit;
      t.split_end = (end_of(t) - 1) / kSplit + 1;
      gather_queries(paged, t, s);
      if (t.split_end == t.split_begin + 1) {
        attend_split(paged, t, s, t.split_begin);
        // As merging it with nothing does: -0 becomes 0.
        for (int64_t i = 0; i < t.tokens * t.heads * a.value_size; ++i) s.split.o[i] = s.split.o[i] + 0.0f;
        finish(paged, t, s.split);
        continue;
      }
      begin_sums(t.tokens * t.heads, a.value_size, s.total);
      for (int64_t split = t.split_begin; split < t.split_end; ++split) {
        attend_split(paged, t, s, split);
        merge_split(paged, t, split, s.split, s.total);
      }
      finish(paged, t, s.total);
    }
  });
}

inline void attention(const AttentionArgs& a, Workers& pool) {
#if defined(EW_BF16)
  if (a.format != KvFormat::f32) return attend_packed<PairProducts>(a, pool);
#endif
  attend_packed<FloatProducts>(a, pool);
}

}  // namespace
}  // namespace ew
