// The tasks of attention: which rows meet which keys, and what of several splits becomes a result.
#pragma once

#include "attention_softmax.h"
#include "few_bits.h"
#include "kernels.h"

namespace ew {
namespace {

constexpr int64_t kTileRows = 48;  // most rows of a query tile: four full blocks of AVX-512; a multiple of 16
constexpr int64_t kTileTokens = 32;  // most tokens of one, so that few rows are cut by the diagonal
constexpr int64_t kTileHeads = 32;   // most heads of one; a larger group is taken in pieces
constexpr int64_t kStepBlocks = kStep / kBlock, kSplitBlocks = kSplit / kBlock;
constexpr int64_t kMaxPartial = int64_t{1} << 24;  // floats of partial results: 64 MB

// Some tokens and heads of one request, against its keys of splits split_begin .. split_end-1. Rows are in
// order (token, head).
struct AttentionTask {
  int64_t token, tokens;  // within the step
  int64_t position;       // of `token` in its request
  int64_t keys, beyond;   // of the request, and how many behind its own a query sees
  int64_t kv_head, head, heads;
  const int32_t* blocks;  // the request's row of the block table
  const int32_t* ends;    // that of the table of ends, or null
  int64_t split_begin, split_end;
  const uint64_t* chosen;     // bits of the blocks that `token` sees, or null: all
  int64_t chosen_stride;      // from one token's to the next one's
  float* partial;             // where (o, m, l) of each split go, or null: merge and finish here
  const AttentionTask* next;  // the one behind it in the list, or null
};

// Few floats: without the call that memcpy is.
EW_INLINE void copy_floats(const float* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

// Weighted values, maxima and sums of a task's rows: [rows, Dv], [rows], [rows].
struct Sums {
  float *o, *m, *l;
};

// The keys that a query at `position` sees begin here.
EW_INLINE int64_t first_key(int64_t window, int64_t position) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// And they end before this one: behind the query's own, where it sees later ones.
EW_INLINE int64_t past_key(const AttentionTask& t, int64_t position) {
  const int64_t past = position + 1 + t.beyond;
  return past < t.keys ? past : t.keys;
}

// The first and the last block of the request that a task reads.
EW_INLINE int64_t first_block(const PagedAttentionArgs& a, const AttentionTask& t) {
  const int64_t seen = first_key(a.window, t.position), split = t.split_begin * kSplit;
  return (seen > split ? seen : split) / kBlock;
}
EW_INLINE int64_t last_block(const AttentionTask& t) {
  const int64_t last = past_key(t, t.position + t.tokens - 1) - 1, split = t.split_end * kSplit - 1;
  return (last < split ? last : split) / kBlock;
}

// Whether the tokens of a task read the keys of step `step` among the ends.
EW_INLINE bool reads_ends(const AttentionTask& t, int64_t step) {
  return t.ends != nullptr && (step == 0 || step + 1 >= t.position / kStep);
}

// `count` of a token's bits, from block `first` on: they lie in one word.
EW_INLINE uint32_t chosen_blocks(const AttentionTask& t, int64_t token, int64_t first, int64_t count) {
  if (t.chosen == nullptr) return (1u << count) - 1;
  const uint64_t word = t.chosen[token * t.chosen_stride + first / 64];
  return static_cast<uint32_t>(word >> first % 64) & ((1u << count) - 1);
}

EW_INLINE void prefetch_piece(const char* piece, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(piece + i, 0, 2);
}

// What is read `ahead` blocks after block `tile`: by this task, or by the next one, which mostly has the same
// worker.
struct LaterPiece {
  int64_t block, head;
};
EW_INLINE LaterPiece later_piece(const PagedAttentionArgs& a, const AttentionTask& t, int64_t tile,
                                 int64_t ahead) {
  if (t.chosen != nullptr) {  // the next block that the first token sees, so far behind or more
    for (int64_t later = tile + ahead; later <= last_block(t); ++later)
      if (chosen_blocks(t, 0, later, 1) != 0) return {t.blocks[later], t.kv_head};
    return {t.blocks[tile], t.kv_head};
  }
  const int64_t beyond = tile + ahead - last_block(t);
  if (beyond <= 0) {
    const int64_t later = t.blocks[tile + ahead];
    return {later < 0 ? t.blocks[tile] : later, t.kv_head};  // ends have gaps
  }
  if (t.next != nullptr) {
    const int64_t later = first_block(a, *t.next) + beyond - 1;
    if (later <= last_block(*t.next)) return {t.next->blocks[later], t.next->kv_head};
  }
  return {t.blocks[tile], t.kv_head};
}

inline void begin_sums(int64_t rows, int64_t width, const Sums& s) {
  for (int64_t r = 0; r < rows; ++r) {
    s.m[r] = -__builtin_inff();
    s.l[r] = 0;
  }
  __builtin_memset(s.o, 0, static_cast<size_t>(rows * width) * sizeof(float));
}

// Merges split `split` into the totals, for the rows that see any of its keys.
inline void merge_split(const PagedAttentionArgs& a, const AttentionTask& t, int64_t split, const Sums& s,
                        const Sums& total) {
  const int64_t width = a.cache.value_size, rows = t.tokens * t.heads;
  float tops[kTileRows], keeps[kTileRows], takes[kTileRows];
  for (int64_t r = 0; r < rows; r += 16) {
    const F16 before = load_some(total.m + r, rows - r), m = load_some(s.m + r, rows - r);
    const F16 top = select(before < m, m, before);
    store(tops + r, top);
    store(keeps + r, exp2_of_negative(before - top));
    store(takes + r, exp2_of_negative(m - top));
  }
  for (int64_t token = 0; token < t.tokens; ++token) {
    const int64_t position = t.position + token;
    if (past_key(t, position) <= split * kSplit || first_key(a.window, position) >= (split + 1) * kSplit)
      continue;
    if (chosen_blocks(t, token, split * kSplitBlocks, kSplitBlocks) == 0) continue;
    for (int64_t r = token * t.heads; r < (token + 1) * t.heads; ++r) {
      const F16 keep = splat(keeps[r]), take = splat(takes[r]);
      for (int64_t i = 0; i < width; i += 16) {
        float* to = total.o + r * width + i;
        const F16 sum = load_some(to, width - i) * keep + load_some(s.o + r * width + i, width - i) * take;
        store_some(to, sum, width - i);
      }
      total.l[r] = total.l[r] * keeps[r] + s.l[r] * takes[r];
      total.m[r] = tops[r];
    }
  }
}

// out = o / l, with a head's sink in the denominator.
inline void finish(const PagedAttentionArgs& a, const AttentionTask& t, const Sums& total) {
  const int64_t width = a.cache.value_size;
  for (int64_t token = 0; token < t.tokens; ++token) {
    for (int64_t h = 0; h < t.heads; ++h) {
      const int64_t r = token * t.heads + h;
      float scale = 1.0f, l = total.l[r];
      if (a.sinks != nullptr) {
        const float sink = a.sinks[t.head + h] * kLog2e, m = total.m[r];
        const float top = m > sink ? m : sink;
        float lanes[16] = {m - top, sink - top};
        store(lanes, exp2_of_negative(load(lanes)));
        scale = lanes[0];
        l = l * scale + lanes[1];
      }
      scale /= l;
      float* o = total.o + r * width;
      if (has_few_bits(a.cache.format)) {  // values are rotated
        turn(o, width);
        scale *= other_share(width);
      }
      float* out = a.out.data + (t.token + token) * a.out.stride0 + (t.head + h) * a.out.stride1;
      for (int64_t i = 0; i < width; i += 16)
        store_some(out + i, load_some(o + i, width - i) * splat(scale), width - i);
    }
  }
}

// Query heads of the step that meet a kv head: first .. past-1.
struct HeadRange {
  int64_t first, past;
};
EW_INLINE HeadRange heads_of(const PagedAttentionArgs& a, int64_t group, int64_t kv_head) {
  const int64_t first = kv_head * group - a.first_head;
  return {clamp(first, 0, a.query_heads), clamp(first + group, 0, a.query_heads)};
}

// Calls fn(AttentionTask) for every query tile, later tokens first: the longest come first.
template <class F>
void for_query_tiles(const PagedAttentionArgs& a, const F& fn) {
  const int64_t group = a.group > 0 ? a.group : a.cache.query_group(a.query_heads);
  const int64_t widest = group < a.query_heads ? group : a.query_heads;
  const int64_t pieces = (widest + kTileHeads - 1) / kTileHeads;
  for (int64_t b = 0; b < a.spans.requests; ++b) {
    const int64_t begin = a.spans.begin(b), end = a.spans.end(b), offset = a.kv_len[b] - end;
    const int64_t most = (widest + pieces - 1) / pieces;
    const int64_t tokens = clamp(kTileRows / most, 1, kTileTokens);
    for (int64_t past = end, first; past > begin; past = first) {
      first = begin + (past - 1 - begin) / tokens * tokens;
      if (a.ends.k != nullptr) {  // all tokens of a tile read the same steps of keys among the ends
        const int64_t step = (past - 1 + offset) / kStep * kStep - offset;
        first = first < step ? step : first;
      }
      AttentionTask t = {};
      t.token = first;
      t.tokens = past - first;
      t.position = t.token + offset;
      t.keys = a.kv_len[b];
      t.blocks = a.block_table + b * a.block_table_stride;
      if (a.ends.k != nullptr) t.ends = a.ends_table + b * a.ends_table_stride;
      t.split_begin = first_key(a.window, t.position) / kSplit;
      t.split_end = (t.position + t.tokens - 1) / kSplit + 1;
      for (t.kv_head = 0; t.kv_head < a.cache.kv_heads; ++t.kv_head) {
        const HeadRange range = heads_of(a, group, t.kv_head);
        const int64_t heads = range.past - range.first;
        for (int64_t piece = 0; piece < pieces; ++piece) {
          t.head = range.first + heads * piece / pieces;
          t.heads = range.first + heads * (piece + 1) / pieces - t.head;
          if (t.heads > 0) fn(t);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ew
