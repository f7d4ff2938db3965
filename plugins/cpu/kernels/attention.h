// paged_attention over a float cache. kv_write (rows.h) fills it.
//
// A layer's cache, block by block (K = 32 slots; block_table[b][i] holds positions 32 i .. 32 i + 31 of
// request b):
//
//   k  [P][Nkv][D][32]     | d=0: slot 0 .. 31 | d=1: slot 0 .. 31 | ...      keys side by side
//   v  [P][Nkv][32][Dv]    | slot 0: 0 .. Dv-1 | slot 1: 0 .. Dv-1 | ...      one value after another
//
// so that q.k of a block and p.v are both products of the linear's shape: a row's element, broadcast, times a
// vector. A query tile has rows (token, head): the query heads that share a kv head, for some tokens of one
// request.
//
// The canonical order, for each row by itself: keys are visited in tiles of 32 at absolute positions. Inside
// a split of 512 absolute keys an online softmax runs from m = -inf, l = 0, o = 0; the splits' (m, l, o) are
// merged in ascending order. q.k is a chain over d, p.v a chain over the keys the row may see, and no others:
// a slot past a query's position, or before its window, is read for neither its value nor its weight. A tile
// or split with no visible key is passed over. So a row's bits depend on nothing but its own keys. (Online
// softmax: Milakov and Gimelshein, arXiv:1805.02867; splits: FlashDecoding.)
#pragma once

#include "kernels.h"
#include "microkernel.h"
#include "parallel.h"
#include "vector_math.h"

namespace ew {
namespace {

constexpr int64_t kTileRows = 36;    // most rows of a query tile: three full microkernels of AVX-512
constexpr int64_t kTileTokens = 32;  // most tokens of one, so that few rows are cut by the diagonal
constexpr int64_t kTileHeads = 32;   // most heads of one; a larger group is taken in pieces
constexpr int64_t kMaxPartial = int64_t{1} << 24;  // floats of partial results: 64 MB

// Some tokens and heads of one request, against its keys of splits split_begin .. split_end-1.
struct AttentionTask {
  int64_t token, tokens;  // within the step
  int64_t position;       // of `token` in its request
  int64_t kv_head, head, heads;
  const int32_t* blocks;  // the request's row of the block table
  int64_t split_begin, split_end;
  float* partial;  // where (o, m, l) of each split go, or null: merge and finish here
};

// One worker's memory. Rows are in order (token, head).
struct AttentionScratch {
  float* q;                            // [rows, D]
  float* scores;                       // [rows, 32]
  float *o, *m, *l;                    // [rows, Dv], [rows], [rows]: of the present split
  float *total_o, *total_m, *total_l;  // of all splits so far
};

EW_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// The keys that a query at `position` sees begin here; they end with itself.
EW_INLINE int64_t first_key(int64_t window, int64_t position) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// What lies between a tile's first key and each of its keys.
constexpr float kSlots[kBlock] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                  16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

// One row of a tile, in place: q.k to scores, -inf but for slots begin .. end-1. `distance` is the position
// of the tile's first key less the query's. Returns the largest.
EW_INLINE float mask_scores(const PagedAttentionArgs& a, int64_t head, int64_t distance, float* scores,
                            int64_t begin, int64_t end) {
  const F16 scale = splat(a.scale), hidden = splat(-__builtin_inff());
  F16 s0 = load(scores) * scale, s1 = load(scores + 16) * scale;
  if (a.softcap > 0) {
    const F16 cap = splat(a.softcap);
    s0 = cap * tanh(s0 / cap);
    s1 = cap * tanh(s1 / cap);
  }
  if (a.slopes != nullptr) {  // ALiBi (Press et al., arXiv:2108.12409)
    const F16 slope = splat(a.slopes[head]), first = splat(static_cast<float>(distance));
    s0 = fma(slope, first + load(kSlots), s0);
    s1 = fma(slope, first + load(kSlots + 16), s1);
  }
  if (begin > 0 || end < kBlock) {
    s0 = select(lanes_between(clamp(begin, 0, 16), clamp(end, 0, 16)), s0, hidden);
    s1 = select(lanes_between(clamp(begin - 16, 0, 16), clamp(end - 16, 0, 16)), s1, hidden);
  }
  store(scores, s0);
  store(scores + 16, s1);
  return max_lanes(max(s0, s1));
}

// One step of the online softmax for `rows` rows, given each row's largest score: scores become weights, m
// and l take them in, o is scaled to the new m. The rows' factors are computed 16 at a time.
EW_INLINE void softmax_rows(int64_t rows, int64_t width, const float* best, float* scores, float* m, float* l,
                            float* o) {
  float factors[kTileRows + 16];
  for (int64_t r = 0; r < rows; r += 16) {
    const F16 before = load_some(m + r, rows - r), after = max(load_some(best + r, rows - r), before);
    store(factors + r, exp(before - after));  // 0 for a split's first tile, where m is -inf
    store_some(m + r, after, rows - r);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const F16 top = splat(m[r]);
    const F16 p0 = exp(load(scores + r * kBlock) - top), p1 = exp(load(scores + r * kBlock + 16) - top);
    store(scores + r * kBlock, p0);
    store(scores + r * kBlock + 16, p1);
    l[r] = l[r] * factors[r] + sum_lanes(p0 + p1);
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (factors[r] == 1.0f) continue;
    const F16 factor = splat(factors[r]);
    for (int64_t i = 0; i < width; i += 16) {
      float* at = o + r * width + i;
      store_some(at, load_some(at, width - i) * factor, width - i);
    }
  }
}

// Keys of split `split` for all rows of the task, into s.o, s.m, s.l.
void attend_split(const PagedAttentionArgs& a, const AttentionTask& t, const AttentionScratch& s,
                  int64_t split) {
  const int64_t size = a.cache.key_size, width = a.cache.value_size, rows = t.tokens * t.heads;
  for (int64_t r = 0; r < rows; ++r) {
    s.m[r] = -__builtin_inff();
    s.l[r] = 0;
  }
  __builtin_memset(s.o, 0, static_cast<size_t>(rows * width) * sizeof(float));

  const int64_t last = t.position + t.tokens - 1;
  const int64_t from = first_key(a.window, t.position);
  const int64_t tile_begin = clamp(from, split * kSplit, (split + 1) * kSplit) / kBlock;
  const int64_t tile_end = (clamp(last + 1, split * kSplit, (split + 1) * kSplit) + kBlock - 1) / kBlock;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t base = tile * kBlock;
    const auto begin = [&](int64_t token) {  // the slots that a token sees: begin .. end-1
      return clamp(first_key(a.window, t.position + token) - base, 0, kBlock);
    };
    const auto end = [&](int64_t token) { return clamp(t.position + token + 1 - base, 0, kBlock); };
    int64_t low = 0, high = t.tokens;  // the tokens that see any
    while (low < high && end(low) == 0) ++low;
    while (low < high && begin(high - 1) == kBlock) --high;
    if (low == high) continue;

    const int64_t block = t.blocks[tile] * a.cache.kv_heads + t.kv_head;
    // Blocks of 32 slots are too short a run for the processor to guess the next: it is prefetched.
    const int64_t next = t.blocks[tile < last / kBlock ? tile + 1 : tile] * a.cache.kv_heads + t.kv_head;
    const float* k = a.cache.k + block * size * kBlock;
    const float* v = a.cache.v + block * kBlock * width;
    const int64_t row = low * t.heads;
    accumulate((high - low) * t.heads, s.q + row * size, size, k, kBlock, size,
               (next - block) * size * kBlock, s.scores + row * kBlock, kBlock, kBlock, true);
    float best[kTileRows];
    for (int64_t token = low; token < high; ++token) {
      for (int64_t r = token * t.heads; r < (token + 1) * t.heads; ++r) {
        best[r - row] = mask_scores(a, t.head + r % t.heads, base - t.position - token, s.scores + r * kBlock,
                                    begin(token), end(token));
      }
    }
    softmax_rows((high - low) * t.heads, width, best, s.scores + row * kBlock, s.m + row, s.l + row,
                 s.o + row * width);
    // p.v in ascending slots: those before what all tokens see, those that all see, those after.
    const auto values = [&](int64_t token, int64_t tokens, int64_t first, int64_t past) {
      if (first >= past) return;
      const int64_t r = token * t.heads;
      accumulate(tokens * t.heads, s.scores + r * kBlock + first, kBlock, v + first * width, width,
                 past - first, (next - block) * kBlock * width, s.o + r * width, width, width, false);
    };
    const int64_t common_begin = begin(high - 1), common_end = end(low);
    if (common_begin >= common_end) {
      for (int64_t token = low; token < high; ++token) values(token, 1, begin(token), end(token));
      continue;
    }
    for (int64_t token = low; token < high; ++token) values(token, 1, begin(token), common_begin);
    values(low, high - low, common_begin, common_end);
    for (int64_t token = low; token < high; ++token) values(token, 1, common_end, end(token));
  }
}

// total = total and (o, m, l) of a later split, for one row.
EW_INLINE void merge_row(int64_t width, const float* o, float m, float l, float* total_o, float* total_m,
                         float* total_l) {
  const float top = m > *total_m ? m : *total_m;
  float lanes[16] = {*total_m - top, m - top};
  store(lanes, exp(load(lanes)));
  const float keep = lanes[0], take = lanes[1];
  for (int64_t i = 0; i < width; ++i) total_o[i] = total_o[i] * keep + o[i] * take;
  *total_l = *total_l * keep + l * take;
  *total_m = top;
}

// Merges split `split` into the totals, for the rows that see any of its keys.
void merge_split(const PagedAttentionArgs& a, const AttentionTask& t, const AttentionScratch& s,
                 int64_t split) {
  for (int64_t token = 0; token < t.tokens; ++token) {
    const int64_t position = t.position + token;
    if (position < split * kSplit || first_key(a.window, position) >= (split + 1) * kSplit) continue;
    for (int64_t r = token * t.heads; r < (token + 1) * t.heads; ++r) {
      merge_row(a.cache.value_size, s.o + r * a.cache.value_size, s.m[r], s.l[r],
                s.total_o + r * a.cache.value_size, s.total_m + r, s.total_l + r);
    }
  }
}

void begin_totals(const PagedAttentionArgs& a, const AttentionTask& t, const AttentionScratch& s) {
  const int64_t rows = t.tokens * t.heads;
  for (int64_t r = 0; r < rows; ++r) {
    s.total_m[r] = -__builtin_inff();
    s.total_l[r] = 0;
  }
  __builtin_memset(s.total_o, 0, static_cast<size_t>(rows * a.cache.value_size) * sizeof(float));
}

// out = o / l, with a head's sink in the denominator.
void finish(const PagedAttentionArgs& a, const AttentionTask& t, const AttentionScratch& s) {
  const int64_t width = a.cache.value_size;
  for (int64_t token = 0; token < t.tokens; ++token) {
    for (int64_t h = 0; h < t.heads; ++h) {
      const int64_t r = token * t.heads + h;
      float scale = 1.0f, l = s.total_l[r];
      if (a.sinks != nullptr) {
        const float sink = a.sinks[t.head + h], m = s.total_m[r];
        const float top = m > sink ? m : sink;
        float lanes[16] = {m - top, sink - top};
        store(lanes, exp(load(lanes)));
        scale = lanes[0];
        l = l * scale + lanes[1];
      }
      scale /= l;
      const float* o = s.total_o + r * width;
      float* out = a.out.data + (t.token + token) * a.out.stride0 + (t.head + h) * a.out.stride1;
      for (int64_t i = 0; i < width; ++i) out[i] = o[i] * scale;
    }
  }
}

void gather_queries(const PagedAttentionArgs& a, const AttentionTask& t, float* q) {
  const size_t bytes = static_cast<size_t>(a.cache.key_size) * sizeof(float);
  for (int64_t token = 0; token < t.tokens; ++token) {
    for (int64_t h = 0; h < t.heads; ++h) {
      __builtin_memcpy(q, a.q.data + (t.token + token) * a.q.stride0 + (t.head + h) * a.q.stride1, bytes);
      q += a.cache.key_size;
    }
  }
}

// Calls fn(AttentionTask, splits seen by its tokens) for every query tile, later tokens first: the longest
// come first.
template <class F>
void for_query_tiles(const PagedAttentionArgs& a, const F& fn) {
  const int64_t group = a.query_heads / a.cache.kv_heads;
  const int64_t pieces = (group + kTileHeads - 1) / kTileHeads;
  for (int64_t b = 0; b < a.requests; ++b) {
    const int64_t begin = a.q_start[b], end = a.q_start[b + 1], offset = a.kv_len[b] - end;
    const int64_t most = (group + pieces - 1) / pieces;
    const int64_t tokens = clamp(kTileRows / most, 1, kTileTokens);
    const int64_t tiles = (end - begin + tokens - 1) / tokens;
    for (int64_t tile = tiles - 1; tile >= 0; --tile) {
      AttentionTask t = {};
      t.token = begin + tile * tokens;
      t.tokens = t.token + tokens < end ? tokens : end - t.token;
      t.position = t.token + offset;
      t.blocks = a.block_table + b * a.block_table_stride;
      t.split_begin = first_key(a.window, t.position) / kSplit;
      t.split_end = (t.position + t.tokens - 1) / kSplit + 1;
      for (t.kv_head = 0; t.kv_head < a.cache.kv_heads; ++t.kv_head) {
        for (int64_t piece = 0; piece < pieces; ++piece) {
          t.head = t.kv_head * group + group * piece / pieces;
          t.heads = t.kv_head * group + group * (piece + 1) / pieces - t.head;
          fn(t);
        }
      }
    }
  }
}

void paged_attention(const PagedAttentionArgs& a, ThreadPool& pool) {
  const int64_t size = a.cache.key_size, width = a.cache.value_size, threads = pool_size(pool);
  const int64_t per_row = width + 2;  // o, m, l of a split
  int64_t tiles = 0, splits = 0, partial_rows = 0, work = 0;
  for_query_tiles(a, [&](const AttentionTask& t) {
    const int64_t seen = t.split_end - t.split_begin, rows = t.tokens * t.heads;
    tiles += 1;
    splits += seen;
    partial_rows += rows * seen;
    work += rows * (t.position + t.tokens - first_key(a.window, t.position)) * (size + width);
  });
  if (tiles == 0) return;
  // Long requests with too few tiles for the threads: a task a split, then the merge.
  const bool split_up = threads > 1 && work >= kSmallWork && tiles < 4 * threads && splits > tiles &&
                        partial_rows * per_row <= kMaxPartial;

  const int64_t rows = kTileRows;  // of a scratch; a tile has fewer: kTileHeads and kTileRows bound them
  const int64_t scratch_floats = (rows * (size + kBlock + 2 * width + 4) + 15) / 16 * 16;
  const int64_t task_count = split_up ? splits : tiles;
  const int64_t list_bytes =
      ((tiles + task_count) * static_cast<int64_t>(sizeof(AttentionTask)) + 63) / 64 * 64;
  const int64_t partial_floats = split_up ? partial_rows * per_row : 0;
  const int64_t floats = threads * scratch_floats + partial_floats;
  char* memory =
      static_cast<char*>(a.workspace->reserve(list_bytes + floats * static_cast<int64_t>(sizeof(float))));
  AttentionTask* tile_list = reinterpret_cast<AttentionTask*>(memory);
  AttentionTask* task_list = tile_list + tiles;
  float* scratch = reinterpret_cast<float*>(memory + list_bytes);

  float* partial = scratch + threads * scratch_floats;
  int64_t tile = 0, task = 0;
  for_query_tiles(a, [&](AttentionTask t) {
    if (split_up) t.partial = partial;
    tile_list[tile++] = t;
    if (!split_up) {
      task_list[task++] = t;
      return;
    }
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      AttentionTask one = t;
      one.split_begin = split;
      one.split_end = split + 1;
      one.partial = partial;
      task_list[task++] = one;
      partial += t.tokens * t.heads * per_row;
    }
  });

  const auto scratch_of = [&](int worker) {
    AttentionScratch s;
    s.q = scratch + worker * scratch_floats;
    s.scores = s.q + rows * size;
    s.o = s.scores + rows * kBlock;
    s.total_o = s.o + rows * width;
    s.m = s.total_o + rows * width;
    s.l = s.m + rows;
    s.total_m = s.l + rows;
    s.total_l = s.total_m + rows;
    return s;
  };
  const auto point_to_partial = [&](const AttentionTask& t, float* at, AttentionScratch* s) {
    s->o = at;
    s->m = at + t.tokens * t.heads * width;
    s->l = s->m + t.tokens * t.heads;
  };

  run_tasks(pool, task_count, work, [&](int64_t i, int worker) {
    const AttentionTask& t = task_list[i];
    AttentionScratch s = scratch_of(worker);
    gather_queries(a, t, s.q);
    if (t.partial != nullptr) {
      point_to_partial(t, t.partial, &s);
      attend_split(a, t, s, t.split_begin);
      return;
    }
    begin_totals(a, t, s);
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      attend_split(a, t, s, split);
      merge_split(a, t, s, split);
    }
    finish(a, t, s);
  });
  if (!split_up) return;
  run_tasks(pool, tiles, partial_rows * width, [&](int64_t i, int worker) {
    const AttentionTask& t = tile_list[i];
    AttentionScratch s = scratch_of(worker);
    begin_totals(a, t, s);
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      point_to_partial(t, t.partial + (split - t.split_begin) * t.tokens * t.heads * per_row, &s);
      merge_split(a, t, s, split);
    }
    finish(a, t, s);
  });
}

}  // namespace
}  // namespace ew
