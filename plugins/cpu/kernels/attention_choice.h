// Which blocks of keys a row attends to, where it isn't all of them: the first ones, the last ones, and of
// those between the best.
//
// Behind the keys of a block (kv_format.h) are two numbers for each channel of its keys:
//
//   center  half the mean, and half the middle between the least and the greatest
//   spread  a quarter of the greatest less the least
//
// How large the score of a query head with a key of the block may well be is estimated as
//
//   estimate(head, block) = sum over d of q_d * center_d + |q_d| * spread_d
//
// With the middle and twice the spread this would be a bound that no score is above, as Quest has it (Tang et
// al., arXiv:2406.10774). But no key is at the end of every channel's range, and a wide block looks better
// than it is: benchmarks/notes/cpu.md has what each finds. The query heads that share a kv head choose
// together. A head's own best block counts as much as another's: a block is as good as the largest, over the
// heads, of estimate(head, block) - the head's largest estimate of those to choose from. Of equal blocks the
// earlier comes first, and NaN before all.
//
// A row at position p chooses from the p / 32 whole blocks before its own, which it sees itself: its choice
// depends on nothing but its query and its keys, whatever comes with it in the step.
//
// A sum has 16 lanes, lane i of channels d = i mod 16 in ascending order, of each channel first q * center,
// then |q| * spread; sum_lanes adds them up. A mean's sum goes over the keys in ascending order.
#pragma once

#include "attention_tasks.h"
#include "kernels.h"
#include "kv_format.h"
#include "parallel.h"
#include "quantize.h"

namespace ew {
namespace {

// The summary of a block all of whose slots are written.
inline void summarize(const KvCache& c, int64_t block, int64_t head) {
  char* piece = key_piece(c, block, head);
  uint16_t* center = summary_of(c, block, head);
  uint16_t* spread = center + summary_channels(c.key_size);
  const float* scales = reinterpret_cast<const float*>(piece + kBlock * c.key_size);
  const auto of_channel = [&](int64_t d, const auto& at) {
    float low = at(0), high = low, sum = low;
    for (int64_t slot = 1; slot < kBlock; ++slot) {
      const float x = at(slot);
      low = x < low ? x : low;
      high = high < x ? x : high;
      sum += x;
    }
    center[d] = float_to_bf16(0.5f * (sum * (1.0f / kBlock) + 0.5f * (low + high)));
    spread[d] = float_to_bf16(0.25f * (high - low));
  };
  for (int64_t d = 0; d < c.key_size; ++d) {
    if (c.format == KvFormat::f32) {
      const float* keys = reinterpret_cast<const float*>(piece) + d * kBlock;
      of_channel(d, [&](int64_t slot) { return keys[slot]; });
      continue;
    }
    with_elements(c.format, piece, [&](const auto* keys, const auto& convert) {
      of_channel(d, [&](int64_t slot) {
        const float x = convert(keys[key_place(c.key_size, slot, d)]);
        return has_scales(c.format) ? x * scales[slot] : x;
      });
    });
  }
  for (int64_t d = c.key_size; d < summary_channels(c.key_size); ++d) center[d] = spread[d] = 0;
}

// A float's place in the order of ranks, as a number: NaN above all.
EW_INLINE uint32_t in_order(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  if (x != x) return 0xffffffffu;
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

// How good the blocks begin .. end-1 are for `heads` query heads that share a kv head, to ranks[0 ..].
// `floats`: room for two channels, and `estimates` for as many as there are.
inline void rank_blocks(const KvCache& c, const int32_t* blocks, int64_t kv_head, const float* q,
                        int64_t q_stride, int64_t heads, int64_t begin, int64_t end, float* floats,
                        float* estimates, uint32_t* ranks) {
  const int64_t channels = summary_channels(c.key_size), count = end - begin;
  for (int64_t b = 0; b < count; ++b) {
    const uint16_t* summary = summary_of(c, blocks[begin + b], kv_head);
    if (b + 4 < count) {
      const uint16_t* later = summary_of(c, blocks[begin + b + 4], kv_head);
      prefetch_piece(reinterpret_cast<const char*>(later), 4 * channels);
    }
    for (int64_t i = 0; i < 2 * channels; ++i) floats[i] = bf16_to_float(summary[i]);
    for (int64_t h = 0; h < heads; ++h) {
      F16 sum = zero();
      for (int64_t d = 0; d < c.key_size; d += 16) {
        const F16 x = load_some(q + h * q_stride + d, c.key_size - d);
        sum = fma(x, load(floats + d), sum);
        sum = fma(abs(x), load(floats + channels + d), sum);
      }
      estimates[h * count + b] = sum_lanes(sum);
    }
  }
  for (int64_t b = 0; b < count; ++b) ranks[b] = 0;
  for (int64_t h = 0; h < heads; ++h) {
    const float* own = estimates + h * count;
    float top = -__builtin_inff();
    for (int64_t b = 0; b < count; ++b) top = own[b] > top ? own[b] : top;
    for (int64_t b = 0; b < count; ++b) {
      const uint32_t rank = in_order(own[b] - top);
      ranks[b] = rank > ranks[b] ? rank : ranks[b];
    }
  }
}

// The rank that `want` of `count` (more) are at or above, by the digits from the highest on; `above` becomes
// how many are above it.
inline uint32_t least_chosen(const uint32_t* ranks, int64_t count, int64_t want, int64_t* above) {
  uint32_t found = 0;
  *above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int32_t counts[256] = {};
    const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8);
    for (int64_t i = 0; i < count; ++i)
      if ((ranks[i] & known) == found) ++counts[ranks[i] >> shift & 255u];
    uint32_t digit = 255;
    while (*above + counts[digit] < want) *above += counts[digit--];
    found |= digit << shift;
  }
  return found;
}

// The blocks that the row at `position` sees, as bits of `chosen` [words].
inline void choose_for_row(const PagedAttentionArgs& a, const int32_t* blocks, int64_t position,
                           int64_t kv_head, const float* q, int64_t q_stride, int64_t heads, int64_t words,
                           float* floats, float* estimates, uint32_t* ranks, uint64_t* chosen) {
  const int64_t whole = position / kBlock;
  const auto take = [&](int64_t block) { chosen[block / 64] |= uint64_t{1} << (block % 64); };
  __builtin_memset(chosen, 0, static_cast<size_t>(words) * sizeof *chosen);
  const int64_t begin = a.choice.first < whole ? a.choice.first : whole;
  const int64_t end = whole - a.choice.last > begin ? whole - a.choice.last : begin;
  const bool all = position < a.choice.from || end - begin <= a.choice.best;
  for (int64_t b = 0; b < (all ? whole : begin); ++b) take(b);
  for (int64_t b = all ? whole : end; b <= whole; ++b) take(b);
  if (all) return;
  rank_blocks(a.cache, blocks, kv_head, q, q_stride, heads, begin, end, floats, estimates, ranks);
  int64_t above = 0;
  const uint32_t least = least_chosen(ranks, end - begin, a.choice.best, &above);
  int64_t equal = a.choice.best - above;
  for (int64_t b = begin; b < end; ++b) {
    const uint32_t rank = ranks[b - begin];
    if (rank > least || (rank == least && equal-- > 0)) take(b);
  }
}

// What choosing takes of the workspace, in bytes: the bits of all rows and kv heads, then room for each
// thread.
struct ChoicePlan {
  // All but `words` are multiples of 64.
  int64_t words = 0, bits = 0, ranks = 0, estimates = 0, each = 0, bytes = 0;

  ChoicePlan() = default;
  ChoicePlan(const PagedAttentionArgs& a, int64_t threads) {
    if (a.choice.best == 0) return;
    int64_t longest = 0;
    for (int64_t b = 0; b < a.spans.requests; ++b) longest = a.kv_len[b] > longest ? a.kv_len[b] : longest;
    const int64_t blocks = (longest + kBlock - 1) / kBlock;
    words = (blocks + 63) / 64;
    bits = (a.cache.pieces(a.spans.total()) * words * 8 + 63) / 64 * 64;
    ranks = (blocks * 4 + 63) / 64 * 64;
    estimates = ranks * a.cache.query_group(a.query_heads);
    each = ranks + estimates + 8 * summary_channels(a.cache.key_size);
    bytes = bits + threads * each;
  }
};

// Summaries of the blocks that this step has filled, and each row's choice: [T, Nkv, words] at `memory`.
inline void choose(const PagedAttentionArgs& a, const ChoicePlan& plan, Workers& pool, char* memory) {
  const KvCache& c = a.cache;
  const int64_t group = c.query_group(a.query_heads);
  int64_t filled = 0, rows = a.spans.total(), ranked = 0;
  for (int64_t b = 0; b < a.spans.requests; ++b) {
    const int64_t tokens = a.spans.tokens(b);
    filled += a.kv_len[b] / kBlock - (a.kv_len[b] - tokens) / kBlock;
    ranked += tokens * (a.kv_len[b] / kBlock);
  }
  const auto request_of = [&](int64_t token) {
    int64_t b = 0;
    while (a.spans.end(b) <= token) ++b;
    return b;
  };
  run_rows(pool, filled, c.kv_heads * c.key_size * kBlock, [&](int64_t begin, int64_t end) {
    int64_t at = 0;
    for (int64_t b = 0; b < a.spans.requests; ++b) {
      const int64_t tokens = a.spans.tokens(b);
      for (int64_t block = (a.kv_len[b] - tokens) / kBlock; block < a.kv_len[b] / kBlock; ++block, ++at) {
        if (at < begin || at >= end) continue;
        for (int64_t h = 0; h < c.kv_heads; ++h)
          summarize(c, a.block_table[b * a.block_table_stride + block], h);
      }
    }
  });
  const int64_t tasks = c.pieces(rows);
  const int64_t row_work = tasks > 0 ? ranked / rows * group * c.key_size * 2 : 0;
  run_rows(pool, tasks, row_work + 1, [&](int64_t begin, int64_t end, int worker) {
    char* own = memory + plan.bits + worker * plan.each;
    uint32_t* ranks = reinterpret_cast<uint32_t*>(own);
    float* estimates = reinterpret_cast<float*>(own + plan.ranks);
    float* floats = reinterpret_cast<float*>(own + plan.ranks + plan.estimates);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = i / c.kv_heads, kv_head = i % c.kv_heads, b = request_of(token);
      const int64_t position = a.kv_len[b] - a.spans.end(b) + token;
      const float* q = a.q.data + token * a.q.stride0 + kv_head * group * a.q.stride1;
      choose_for_row(a, a.block_table + b * a.block_table_stride, position, kv_head, q, a.q.stride1, group,
                     plan.words, floats, estimates, ranks,
                     reinterpret_cast<uint64_t*>(memory) + i * plan.words);
    }
  });
}

// The same to a.chosen, for who brings what is chosen into memory before paged_attention reads it.
inline void choose_blocks(const PagedAttentionArgs& a, Workers& pool) {
  const ChoicePlan plan(a, pool.size());
  char* memory = static_cast<char*>(a.workspace->reserve(plan.bytes));
  choose(a, plan, pool, memory);
  const int64_t words = a.cache.pieces(a.spans.total()) * plan.words;
  __builtin_memcpy(a.chosen, memory, static_cast<size_t>(words) * sizeof *a.chosen);
}

}  // namespace
}  // namespace ew
