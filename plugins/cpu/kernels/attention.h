// paged_attention. kv_write (kv_format.h, which draws the cache) fills the cache that it reads.
//
// A query tile has rows (token, head): the query heads that share a kv head, for some tokens of one request.
//
// The canonical order, for each row by itself: keys are visited in steps of 128 at absolute positions, four
// blocks of the cache. Inside a split of 512 absolute keys an online softmax runs over its steps from m =
// -inf, l = 0, o = 0; the splits' (m, l, o) are merged in ascending order. q.k is a chain over d, p.v a chain
// over the keys of the step. A slot that a row may not see (past its position, or before its window) has
// weight 0; whatever lies there, NaN too, doesn't reach the row. A step that a row sees nothing of leaves (m,
// l, o) as they are. Which blocks a row may see, where it chooses: attention_choice.h. So a row's bits depend
// on nothing but its own keys, and where a cache of ends has some of these once more, the positions of query
// and key say where a step is read (reads_ends). (Online softmax: Milakov and Gimelshein, arXiv:1805.02867;
// splits: FlashDecoding.)
//
// The rows of a tile are taken in pieces of as many as fill the registers: for each, scores of the step,
// their weights, and what these add to o, so that the scores stay in the first cache. With few registers a
// step's keys would come from the second cache for each piece: there all pieces take a block of 32 keys, then
// the next one, and values likewise.
#pragma once

#include "attention_choice.h"
#include "attention_products.h"
#include "attention_tasks.h"
#include "kernels.h"
#include "parallel.h"

namespace ew {
namespace {

// One worker's memory.
template <class Products>
struct AttentionScratch {
  using Element = typename Products::Element;
  Element* q;                        // [rows, query_size]
  typename Products::Stored *k, *v;  // unpacked blocks of a step
  Element* p;                        // [kRows, kStep] weights, or block by block of all rows
  float* scores;                     // the same
  float *key_scales, *value_scales;  // [kStep]
  Sums split, total;
};

// The blocks of a step: where their elements are to be read, and how far ahead of it what comes next.
template <class Products>
struct StepBlocks {
  const typename Products::Stored *k[kStepBlocks], *v[kStepBlocks];
  int64_t k_ahead[kStepBlocks], v_ahead[kStepBlocks];
};

// Those of blocks begin .. end-1 of step `step` that are among `needed`. Blocks of 32 slots are too short a
// run for the processor to guess the next; what a later step reads is prefetched, so far ahead that memory
// has the time.
template <class Products>
void load_blocks(const PagedAttentionArgs& a, const AttentionTask& t, const AttentionScratch<Products>& s,
                 int64_t step, int64_t begin, int64_t end, uint32_t needed, StepBlocks<Products>* blocks) {
  using Stored = typename Products::Stored;
  const KvCache& c = a.cache;
  const float scale = common_scale(a);
  for (int64_t b = begin; b < end; ++b) {
    if ((needed >> b & 1u) == 0) continue;
    const int64_t tile = step * kStepBlocks + b;
    const LaterPiece later = later_piece(a, t, tile, Products::kBlocksAhead);
    const char* k = key_piece(c, t.blocks[tile], t.kv_head);
    const char* v = value_piece(c, t.blocks[tile], t.kv_head);
    const char* next_k = key_piece(c, later.block, later.head);
    const char* next_v = value_piece(c, later.block, later.head);
    blocks->k[b] = reinterpret_cast<const Stored*>(k);
    blocks->v[b] = reinterpret_cast<const Stored*>(v);
    blocks->k_ahead[b] = (next_k - k) / static_cast<int64_t>(sizeof(Stored));
    blocks->v_ahead[b] = (next_v - v) / static_cast<int64_t>(sizeof(Stored));
    if constexpr (!Products::kAsStored) {
      if (Products::kTiles || !Products::reads_keys(c))
        prefetch_piece(next_k, kv_piece_bytes(c.format, Side::keys, c.key_size));
      if (!c.values_in_keys && (Products::kTiles || !Products::reads_values(c)))
        prefetch_piece(next_v, kv_piece_bytes(c.format, Side::values, c.value_size));
      if (!Products::reads_keys(c)) {
        Stored* to = s.k + b * Products::key_elements(c.key_size);
        Products::unpack_keys(c, k, to);
        blocks->k[b] = to;
        blocks->k_ahead[b] = 0;
      }
      if (!Products::reads_values(c)) {
        Stored* to = s.v + b * kBlock * c.value_size;
        if (c.values_in_keys) {
          Products::transpose_keys(blocks->k[b], c.value_size, to);
        } else {
          Products::unpack_values(c, v, to);
        }
        blocks->v[b] = to;
        blocks->v_ahead[b] = 0;
      }
    }
    if (!has_scales(c.format)) continue;
    float* key_scales = s.key_scales + b * kBlock;
    float* value_scales = s.value_scales + b * kBlock;
    load_scales(c.format, Side::keys, k, c.key_size, key_scales);
    if (c.values_in_keys) {
      __builtin_memcpy(value_scales, key_scales, kBlock * sizeof(float));
    } else {
      load_scales(c.format, Side::values, v, c.value_size, value_scales);
    }
    for (int64_t i = 0; i < kBlock; ++i) key_scales[i] *= scale;
  }
}

// Bits of a step's blocks from block `first` on; past the last one there is nothing to hide.
EW_INLINE uint32_t shifted(uint32_t blocks, int64_t first) {
  return (blocks >> first | ~(kAllBlocks >> first)) & kAllBlocks;
}

// Calls fn(begin, end) for each run of slots of neighbouring blocks among `blocks`, within low .. high-1.
template <class F>
EW_INLINE void for_runs(uint32_t blocks, int64_t low, int64_t high, const F& fn) {
  if (blocks == kAllBlocks) return fn(low, high);
  for (int64_t b = low / kBlock; b * kBlock < high;) {
    int64_t past = b;
    while (past < kStepBlocks && (blocks >> past & 1u) != 0) ++past;
    if (past > b) fn(clamp(b * kBlock, low, high), clamp(past * kBlock, low, high));
    b = past + 1;
  }
}

// Keys of step `step` for all rows of the task, into s.split.
template <class Products>
void attend_step(const PagedAttentionArgs& a, const AttentionTask& t, const AttentionScratch<Products>& s,
                 int64_t step) {
  using Element = typename Products::Element;
  const int64_t size = Products::query_size(a.cache.key_size), width = a.cache.value_size;
  const int64_t base = step * kStep, rows = t.tokens * t.heads;
  const bool plain = plain_scores(a);
  const float factor = plain ? common_scale(a) : 1.0f;
  const auto begin_of = [&](int64_t token) {  // the slots that a token sees: begin .. end-1
    return clamp(first_key(a.window, t.position + token) - base, 0, kStep);
  };
  const auto end_of = [&](int64_t token) { return clamp(past_key(t, t.position + token) - base, 0, kStep); };
  // What a token sees of the step, and all or any of some tokens.
  const auto blocks_of = [&](int64_t token) {
    return chosen_blocks(t, token, step * kStepBlocks, kStepBlocks);
  };
  struct Seen {
    uint32_t any, all;
  };
  const auto seen_by = [&](int64_t first, int64_t last) {
    Seen seen = {kAllBlocks, kAllBlocks};
    if (t.chosen == nullptr) return seen;
    seen.any = 0;
    for (int64_t token = first; token <= last; ++token) {
      seen.any |= blocks_of(token);
      seen.all &= blocks_of(token);
    }
    return seen;
  };
  const uint32_t needed = seen_by(0, t.tokens - 1).any;
  if (needed == 0) return;
  StepBlocks<Products> blocks;
  load_blocks(a, t, s, step, begin_of(0) / kBlock, (end_of(t.tokens - 1) + kBlock - 1) / kBlock, needed,
              &blocks);
  if (Products::kTiles &&
      needed != kAllBlocks) {  // tiles read all: in the place of what nobody needs, any other
    const int64_t other = __builtin_ctz(needed);
    for (int64_t b = 0; b < kStepBlocks; ++b) {
      if ((needed >> b & 1u) == 0) blocks.k[b] = blocks.k[other], blocks.v[b] = blocks.v[other];
    }
  }

  // Some rows, as many as fill the registers or a tile, and the slots that any of them sees.
  struct Piece {
    int64_t row, count, low, high;
    Seen seen;
    bool apart;          // each row's values are added by themselves
    const float* scale;  // what sums so far are scaled by when the next values are added
  };
  const auto piece_of = [&](int64_t row, int64_t end) {
    const int64_t first_token = row / t.heads, last_token = (end - 1) / t.heads;
    Piece piece = {
        row,   end - row, begin_of(first_token), end_of(last_token), seen_by(first_token, last_token),
        false, nullptr};
    if (piece.seen.any == 0) piece.high = piece.low;
    if (t.chosen == nullptr || piece.low >= piece.high) return piece;
    piece.low = clamp(__builtin_ctz(piece.seen.any) * kBlock, piece.low, piece.high);
    piece.high = clamp((32 - __builtin_clz(piece.seen.any)) * kBlock, piece.low, piece.high);
    return piece;
  };
  // Where a row's scores and weights are: one piece's, or those of all rows.
  const auto place_of = [&](int64_t row) { return Products::kBlockwise ? row * kStep : 0; };

  const auto add_scores = [&](const Piece& piece, int64_t begin, int64_t end) {
    float* to = s.scores + place_of(piece.row);
    const Element* q = s.q + piece.row * size;
    if constexpr (Products::kTiles) {
      Products::scores(a.cache, q, blocks.k, begin, end, to);
    } else {
      with_rows<Products::kRows>(piece.count, [&]<int R>() {
        for (int64_t b = begin; b < end; ++b) {
          if ((piece.seen.any >> b & 1u) == 0) continue;
          Products::template scores<R>(q, size, blocks.k[b], blocks.k_ahead[b], to + b * kBlock);
        }
      });
    }
  };
  float all_factors[kTileRows];
  const auto weigh = [&](Piece& piece) {
    const int64_t row = piece.row, count = piece.count, first = piece.low / kBlock * kBlock;
    const int64_t past = (piece.high + kBlock - 1) / kBlock * kBlock;
    const int64_t first_token = row / t.heads, last_token = (row + count - 1) / t.heads;
    float* own = s.scores + place_of(row);
    Element* p = Products::weights_of(s.scores, s.p) + place_of(row);
    float best[16], tops[16];
    float* factors = all_factors + row;
    int64_t token = first_token, of_token = row - token * t.heads;  // without a division for each row
    for (int64_t r = 0; r < count; ++r, ++of_token) {
      if (of_token == t.heads) of_token = 0, ++token;
      const int64_t head = t.head + of_token;
      const RowView view = {head, base + first - t.position - token, begin_of(token) - first,
                            end_of(token) - first, shifted(blocks_of(token), first / kBlock)};
      float* scores = own + r * kStep + first;
      best[r] = plain ? largest_score(view, past - first, scores)
                      : scale_scores(a, view, s.key_scales + first, past - first, scores);
    }
    float scales[16];
    raise_maxima(count, best, factor, s.split.m + row, scales, tops);
    __builtin_memcpy(factors, scales, static_cast<size_t>(count) * sizeof(float));
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = r * kStep + first;
      const float sum =
          Products::weights(a.cache, tops[r], factor, own + at, s.value_scales + first, past - first, p + at);
      s.split.l[row + r] = s.split.l[row + r] * factors[r] + sum;
    }
    piece.scale = factors;
    // Rows that see different slots share them, unless a value that some may not see is NaN or infinite: a
    // weight of 0 would not keep it from them. Tiles take blocks whole, what no row sees included.
    if (has_scales(a.cache.format)) return;
    const int64_t all_begin = begin_of(last_token), all_end = end_of(first_token);
    for (int64_t b = piece.low / kBlock; b * kBlock < piece.high; ++b) {
      if (!Products::kTiles && (piece.seen.any >> b & 1u) == 0) continue;
      const bool of_all = (piece.seen.all >> b & 1u) != 0;
      if (of_all && b * kBlock >= all_begin && (b + 1) * kBlock <= all_end) continue;
      if (of_all && !Products::kTiles && piece.low == all_begin && piece.high == all_end) continue;
      piece.apart = piece.apart || !finite(blocks.v[b], kBlock * width);
    }
  };
  const auto add_values = [&](Piece& piece, int64_t begin, int64_t end) {
    const Element* p = Products::weights_of(s.scores, s.p) + place_of(piece.row);
    float* o = s.split.o + piece.row * width;
    if constexpr (Products::kTiles) {
      Products::values(p, blocks.v, begin, end, width, piece.count, piece.scale, o);
    } else {
      with_rows<Products::kRows>(piece.count, [&]<int R>() {
        const int64_t low = clamp(begin * kBlock, piece.low, piece.high);
        const int64_t high = clamp(end * kBlock, piece.low, piece.high);
        for_runs(piece.seen.any, low, high, [&](int64_t from, int64_t to) {
          if (from >= to) return;
          Products::template values<R>(p, blocks.v, blocks.v_ahead, from, to, width, piece.scale, o);
          piece.scale = kOnes;
        });
      });
    }
  };
  const auto add_values_apart = [&](const Piece& piece) {
    const Element* p = Products::weights_of(s.scores, s.p) + place_of(piece.row);
    float* o = s.split.o + piece.row * width;
    for (int64_t r = 0; r < piece.count; ++r) {
      const int64_t token = (piece.row + r) / t.heads, begin = begin_of(token), end = end_of(token);
      if (begin >= end) continue;
      if constexpr (Products::kTiles) {
        Products::values_of_row(p + r * kStep, blocks.v, begin, end, blocks_of(token), width, piece.scale + r,
                                o + r * width);
      } else {
        const float* scale = piece.scale + r;
        for_runs(blocks_of(token), begin, end, [&](int64_t from, int64_t to) {
          Products::template values<1>(p + r * kStep, blocks.v, blocks.v_ahead, from, to, width, scale,
                                       o + r * width);
          scale = kOnes;
        });
      }
    }
  };

  const int64_t pieces = (rows + Products::kRows - 1) / Products::kRows;
  Piece list[kTileRows];
  int64_t count = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    list[count] = piece_of(rows * i / pieces, rows * (i + 1) / pieces);
    count += list[count].low < list[count].high ? 1 : 0;
  }
  if (!Products::kBlockwise || count == 1) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = list[i].low / kBlock, end = (list[i].high + kBlock - 1) / kBlock;
      add_scores(list[i], begin, end);
      weigh(list[i]);
      if (list[i].apart) {
        add_values_apart(list[i]);
      } else {
        add_values(list[i], begin, end);
      }
    }
    return;
  }
  // Block by block for all pieces: a block of keys, or of values, stays in the first cache.
  const auto each = [&](int64_t block, const auto& fn) {
    for (int64_t i = 0; i < count; ++i) {
      if (list[i].low < (block + 1) * kBlock && list[i].high > block * kBlock) fn(list[i], block, block + 1);
    }
  };
  for (int64_t b = 0; b < kStepBlocks; ++b) each(b, add_scores);
  for (int64_t i = 0; i < count; ++i) {
    weigh(list[i]);
    if (list[i].apart) add_values_apart(list[i]);
  }
  for (int64_t b = 0; b < kStepBlocks; ++b) {
    each(b, [&](Piece& piece, int64_t begin, int64_t end) {
      if (!piece.apart) add_values(piece, begin, end);
    });
  }
}

// Keys of split `split` for all rows of the task, into s.split.
template <class Products>
void attend_split(const PagedAttentionArgs& a, const AttentionTask& t, const AttentionScratch<Products>& s,
                  int64_t split) {
  begin_sums(t.tokens * t.heads, a.cache.value_size, s.split);
  const int64_t past = past_key(t, t.position + t.tokens - 1), from = first_key(a.window, t.position);
  const int64_t begin = clamp(from, split * kSplit, (split + 1) * kSplit) / kStep;
  const int64_t end = (clamp(past, split * kSplit, (split + 1) * kSplit) + kStep - 1) / kStep;
  PagedAttentionArgs of_ends;
  AttentionTask ends = t;
  if (t.ends != nullptr) {
    of_ends = a;
    of_ends.cache = a.ends;
    ends.blocks = t.ends;
    ends.next = nullptr;
  }
  const auto attend_steps = [&](const auto& own) {
    for (int64_t step = begin; step < end; ++step) {
      if (reads_ends(t, step)) {
        attend_step(of_ends, ends, own, step);
      } else {
        attend_step(a, t, own, step);
      }
    }
  };
#if !defined(EW_BF16)
  if (StoredProducts::takes(a.cache, t.tokens * t.heads)) {
    return attend_steps(AttentionScratch<StoredProducts>{s.q, nullptr, nullptr, s.p, s.scores, s.key_scales,
                                                         s.value_scales, s.split, s.total});
  }
#endif
  attend_steps(s);
}

template <class Products>
void gather_queries(const PagedAttentionArgs& a, const AttentionTask& t,
                    const AttentionScratch<Products>& s) {
  typename Products::Element* q = s.q;
  for (int64_t token = 0; token < t.tokens; ++token) {
    for (int64_t h = 0; h < t.heads; ++h) {
      const float* x = a.q.data + (t.token + token) * a.q.stride0 + (t.head + h) * a.q.stride1;
      if (has_few_bits(a.cache.format)) {
        alignas(64) float turned[kLongestHead];
        turn_query(x, a.cache.key_size, turned);
        Products::query(a.cache, turned, q);
      } else {
        Products::query(a.cache, x, q);
      }
      q += Products::query_size(a.cache.key_size);
    }
  }
  for (int64_t i = 0; i < kStep; ++i) {  // what formats with scales overwrite
    s.key_scales[i] = common_scale(a);
    s.value_scales[i] = 1.0f;
  }
}

// Where the pieces of a worker's scratch begin, in bytes; the last is its size.
template <class Products>
struct ScratchPlan {
  static constexpr int kPieces = 9;
  int64_t at[kPieces + 1];

  explicit ScratchPlan(const KvCache& c) {
    const int64_t element = static_cast<int64_t>(sizeof(typename Products::Element)), number = 4;
    const int64_t rows = kTileRows;  // a tile has fewer: kTileHeads and kTileRows bound them
    const int64_t bytes[kPieces] = {
        rows * Products::query_size(c.key_size) * element,
        Products::reads_keys(c) ? 0 : kStepBlocks * Products::key_elements(c.key_size) * element,
        Products::reads_values(c) ? 0 : kStep * c.value_size * element,
        (Products::kBlockwise ? rows : Products::kRows) * kStep * element,
        (Products::kBlockwise ? rows : Products::kRows) * kStep * number,
        2 * kStep * number,
        rows * c.value_size * number,
        rows * c.value_size * number,
        4 * rows * number};
    at[0] = 0;
    for (int i = 0; i < kPieces; ++i) at[i + 1] = at[i] + (bytes[i] + 63) / 64 * 64;
  }
  int64_t bytes() const { return at[kPieces]; }

  AttentionScratch<Products> scratch(char* memory) const {
    using Element = typename Products::Element;
    const auto elements = [&](int i) { return reinterpret_cast<Element*>(memory + at[i]); };
    const auto floats = [&](int i) { return reinterpret_cast<float*>(memory + at[i]); };
    const int64_t rows = kTileRows;
    return {elements(0),
            elements(1),
            elements(2),
            elements(3),
            floats(4),
            floats(5),
            floats(5) + kStep,
            {floats(6), floats(8), floats(8) + rows},
            {floats(7), floats(8) + 2 * rows, floats(8) + 3 * rows}};
  }
};

template <class Products>
void attend(const PagedAttentionArgs& a, Workers& pool) {
  const int64_t size = a.cache.key_size, width = a.cache.value_size, threads = pool.size();
  const int64_t per_row = width + 2;  // o, m, l of a split
  const ChoicePlan choice = a.chosen != nullptr ? ChoicePlan() : ChoicePlan(a, threads);
  int64_t tiles = 0, splits = 0, partial_rows = 0, work = 0;
  for_query_tiles(a, [&](const AttentionTask& t) {
    const int64_t seen = t.split_end - t.split_begin, rows = t.tokens * t.heads;
    tiles += 1;
    splits += seen;
    partial_rows += rows * seen;
    work += rows * (t.position + t.tokens - first_key(a.window, t.position)) * (size + width);
  });
  if (tiles == 0) return;
  // Long requests with few tiles for the threads: a task a split, then the merge.
  const bool split_up = threads > 1 && work >= small_work(pool) &&
                        tiles < tuned(pool.tuning().split_tiles, 16) * threads && splits > tiles &&
                        partial_rows * per_row <= kMaxPartial;

  const ScratchPlan<Products> plan(a.cache);
  const int64_t task_count = split_up ? splits : tiles;
  const int64_t list_bytes =
      ((tiles + task_count) * static_cast<int64_t>(sizeof(AttentionTask)) + 63) / 64 * 64;
  const int64_t partial_bytes = split_up ? partial_rows * per_row * static_cast<int64_t>(sizeof(float)) : 0;
  char* memory = static_cast<char*>(
      a.workspace->reserve(choice.bytes + list_bytes + threads * plan.bytes() + partial_bytes));
  const uint64_t* chosen = a.chosen;
  const int64_t words = chosen != nullptr ? a.chosen_words : choice.words;
  if (choice.bytes > 0) {
    choose(a, choice, pool, memory);
    chosen = reinterpret_cast<const uint64_t*>(memory);
    memory += choice.bytes;
  }
  AttentionTask* tile_list = reinterpret_cast<AttentionTask*>(memory);
  AttentionTask* task_list = tile_list + tiles;
  char* scratch = memory + list_bytes;

  float* partial = reinterpret_cast<float*>(scratch + threads * plan.bytes());
  int64_t tile = 0, task = 0;
  for_query_tiles(a, [&](AttentionTask t) {
    if (chosen != nullptr) {
      t.chosen = chosen + a.cache.at(t.token, t.kv_head) * words;
      t.chosen_stride = a.cache.pieces(words);
    }
    if (split_up) {
      t.partial = partial;
      partial += t.tokens * t.heads * per_row * (t.split_end - t.split_begin);
    }
    tile_list[tile++] = t;
    if (!split_up) task_list[task++] = t;
  });
  // The heads of a split follow each other, as their pieces of each block do in memory.
  for (int64_t first = 0, past = 0; split_up && first < tiles; first = past) {
    const AttentionTask& of = tile_list[first];
    while (past < tiles && tile_list[past].token == of.token) ++past;
    for (int64_t split = of.split_begin; split < of.split_end; ++split) {
      for (int64_t i = first; i < past; ++i) {
        AttentionTask one = tile_list[i];
        one.split_begin = split;
        one.split_end = split + 1;
        one.partial += (split - of.split_begin) * one.tokens * one.heads * per_row;
        task_list[task++] = one;
      }
    }
  }
  for (int64_t i = 0; i + 1 < task_count; ++i) task_list[i].next = task_list + i + 1;
  const auto sums_at = [&](const AttentionTask& t, float* at) {
    const int64_t rows = t.tokens * t.heads;
    return Sums{at, at + rows * width, at + rows * width + rows};
  };

  run_tasks(pool, task_count, work, [&](int64_t i, int worker) {
    const AttentionTask& t = task_list[i];
    AttentionScratch<Products> s = plan.scratch(scratch + worker * plan.bytes());
    [[maybe_unused]] const typename Products::Scope scope(a.cache, t.tokens * t.heads);
    gather_queries(a, t, s);
    if (t.partial != nullptr) {
      s.split = sums_at(t, t.partial);
      attend_split(a, t, s, t.split_begin);
      return;
    }
    begin_sums(t.tokens * t.heads, width, s.total);
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      attend_split(a, t, s, split);
      merge_split(a, t, split, s.split, s.total);
    }
    finish(a, t, s.total);
  });
  if (!split_up) return;
  run_tasks(pool, tiles, partial_rows * width, [&](int64_t i, int worker) {
    const AttentionTask& t = tile_list[i];
    const Sums total = plan.scratch(scratch + worker * plan.bytes()).total;
    begin_sums(t.tokens * t.heads, width, total);
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      float* at = t.partial + (split - t.split_begin) * t.tokens * t.heads * per_row;
      merge_split(a, t, split, sums_at(t, at), total);
    }
    finish(a, t, total);
  });
}

inline void paged_attention(const PagedAttentionArgs& a, Workers& pool) {
#if defined(EW_BF16)
  if (a.cache.format != KvFormat::f32) return attend<PairProducts>(a, pool);
#endif
  attend<FloatProducts>(a, pool);
}

}  // namespace
}  // namespace ew
