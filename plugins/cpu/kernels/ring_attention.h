// ring_attention: attention whose keys are divided among ranks, by splits of 512. (After ring attention, Liu
// et al., arXiv:2310.01889, whose blocks of keys travel; here queries are everywhere, and results of splits
// are shared.)
//
//   rank 0   splits 0, 2, 3 of the tile's queries --(o, m, l)--> memory     meet     merge 0 1 2 3, own heads
//   rank 1   split 1                              --(o, m, l)--> of all     meet     merge 0 1 2 3, own heads
//
// A split is computed as paged_attention does, and splits are merged in the same order, so that results have
// its bits, whoever has which split. Query tiles are taken in rounds of bounded memory. Two memories
// alternate: who merges from one isn't disturbed by those who are a round ahead, and nobody can be two ahead.
#pragma once

#include "attention.h"

namespace ew {
namespace {

constexpr int64_t kRoundFloats = int64_t{1} << 21;  // of a round: 8 MB, unless one tile needs more

// All blocks of a split have one owner: that of the last one that the task sees has been checked.
EW_INLINE int64_t owner_of(const RingAttentionArgs& a, const AttentionTask& t, int64_t split) {
  const int64_t last = t.position + t.tokens - 1, end = (split + 1) * kSplit - 1;
  return t.blocks[(last < end ? last : end) / kBlock] % a.ranks;
}

// What several splits of a tile become, for those of its heads that this rank gives.
inline void merge_own_heads(const RingAttentionArgs& a, const AttentionTask& t, const Sums& total) {
  PagedAttentionArgs own = a.attention;
  if (own.sinks != nullptr) own.sinks += a.head;
  const int64_t width = own.cache.value_size, rows = t.tokens * t.heads;
  const int64_t first = clamp(t.head, a.head, a.head + a.heads);
  const int64_t past = clamp(t.head + t.heads, a.head, a.head + a.heads);
  const bool whole = first == t.head && past == t.head + t.heads;
  AttentionTask part = t;  // all tokens at once, or one after the other
  part.head = first - a.head;
  part.heads = past - first;
  if (!whole) part.tokens = 1;
  for (int64_t token = 0; token < t.tokens; token += part.tokens) {
    part.token = t.token + token;
    part.position = t.position + token;
    begin_sums(part.tokens * part.heads, width, total);
    const int64_t row = token * t.heads + first - t.head;
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      float* o = t.partial + (split - t.split_begin) * rows * (width + 2);
      float *m = o + rows * width, *l = m + rows;
      merge_split(own, part, split, {o + row * width, m + row, l + row}, total);
    }
    finish(own, part, total);
  }
}

template <class Products>
void attend_in_a_ring(const RingAttentionArgs& a, Workers& pool) {
  const PagedAttentionArgs& all = a.attention;
  const int64_t size = all.cache.key_size, width = all.cache.value_size, threads = pool.size();
  const auto floats_of = [&](const AttentionTask& t, int64_t splits) {
    return t.tokens * t.heads * splits * (width + 2);
  };
  const auto seen = [](const AttentionTask& t) { return t.split_end - t.split_begin; };

  // Rounds are the same on all ranks: of tiles in their order, as many as fit.
  int64_t tiles = 0, most_floats = kRoundFloats;
  for_query_tiles(all, [&](const AttentionTask& t) {
    const int64_t floats = floats_of(t, seen(t));
    most_floats = floats > most_floats ? floats : most_floats;
    ++tiles;
  });
  int64_t floats = 0, tasks = 0, most_tasks = 0;
  for_query_tiles(all, [&](const AttentionTask& t) {
    if (floats + floats_of(t, seen(t)) > most_floats) floats = tasks = 0;
    floats += floats_of(t, seen(t));
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      const int64_t owner = owner_of(a, t, split);
      tasks += owner == a.rank;
      if (t.head == 0 && a.pairs != nullptr) a.pairs[owner] += t.tokens;
    }
    most_tasks = tasks > most_tasks ? tasks : most_tasks;
  });

  const ScratchPlan<Products> plan(all.cache);
  const int64_t list_bytes =
      ((tiles + most_tasks) * static_cast<int64_t>(sizeof(AttentionTask)) + 63) / 64 * 64;
  char* memory = static_cast<char*>(all.workspace->reserve(list_bytes + threads * plan.bytes()));
  AttentionTask* tile_list = reinterpret_cast<AttentionTask*>(memory);
  AttentionTask* task_list = tile_list + tiles;
  char* scratch = memory + list_bytes;
  int64_t tile = 0;
  for_query_tiles(all, [&](const AttentionTask& t) { tile_list[tile++] = t; });

  for (int64_t begin = 0, end = 0; begin < tiles; begin = end) {
    floats = 0;
    for (; end < tiles && floats + floats_of(tile_list[end], seen(tile_list[end])) <= most_floats; ++end)
      floats += floats_of(tile_list[end], seen(tile_list[end]));
    float* partial = reinterpret_cast<float*>(a.memory(a.exchange, static_cast<int>((*a.rounds)++ % 2),
                                                       floats * static_cast<int64_t>(sizeof(float))));
    int64_t work = 0, own_work = 0;
    tasks = 0;
    for (int64_t i = begin; i < end; ++i) {
      AttentionTask& t = tile_list[i];
      t.partial = partial;
      for (int64_t split = t.split_begin; split < t.split_end; ++split) {
        if (owner_of(a, t, split) == a.rank) {
          AttentionTask& one = task_list[tasks++] = t;
          one.split_begin = split;
          one.split_end = split + 1;
          one.partial = partial;
          work += t.tokens * t.heads * kSplit * (size + width);
        }
        partial += floats_of(t, 1);
      }
      own_work += floats_of(t, seen(t));
    }
    for (int64_t i = 0; i + 1 < tasks; ++i) task_list[i].next = task_list + i + 1;

    run_tasks(pool, tasks, work, [&](int64_t i, int worker) {
      const AttentionTask& t = task_list[i];
      AttentionScratch<Products> s = plan.scratch(scratch + worker * plan.bytes());
      [[maybe_unused]] const typename Products::Scope scope(all.cache, t.tokens * t.heads);
      gather_queries(all, t, s);
      const int64_t rows = t.tokens * t.heads;
      s.split = {t.partial, t.partial + rows * width, t.partial + rows * width + rows};
      attend_split(all, t, s, t.split_begin);
    });
    a.meet(a.exchange);
    run_tasks(pool, end - begin, own_work, [&](int64_t i, int worker) {
      const AttentionTask& t = tile_list[begin + i];
      if (t.head + t.heads <= a.head || t.head >= a.head + a.heads) return;
      merge_own_heads(a, t, plan.scratch(scratch + worker * plan.bytes()).total);
    });
  }
}

inline void ring_attention(const RingAttentionArgs& a, Workers& pool) {
#if defined(EW_BF16)
  if (a.attention.cache.format != KvFormat::f32) return attend_in_a_ring<PairProducts>(a, pool);
#endif
  attend_in_a_ring<FloatProducts>(a, pool);
}

}  // namespace
}  // namespace ew
