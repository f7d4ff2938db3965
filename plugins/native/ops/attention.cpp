// Rotary embeddings, the KV cache and attention.
#include <cmath>

#include "exchange.h"
#include "op.h"
#include "step_resolver.h"
#include "step_verifier.h"

namespace ew {
namespace {

// positions [T], inv_freq [F] -> [T, 2F]
void verify_rope_table(StepVerifier& v) {
  v.data(v.in(0), Dtype::i32, 1, 1);
  v.data(v.in(1), Dtype::f32, 1, 1);
  v.data(v.out(), Dtype::f32, 2, 2);
  const Affine& f = v.in(1).shape[0];
  v.require(
      f == Affine{f.constant} && v.out().shape[1].is(2 * f.constant) && v.out().shape[0] == v.in(0).shape[0],
      "operands " + shape_text(v.in(0)) + ", " + shape_text(v.in(1)) + " don't give " + shape_text(v.out()));
  v.attributes().scale = static_cast<float>(v.number("scale"));
  v.require(std::isfinite(v.attributes().scale), "attribute scale is not finite");
}

Call bind_rope_table(const StepResolver& s) {
  return call(&KernelTable::rope_table, {.tokens = s.out().shape[0],
                                         .freqs = s.in(1).shape[0],
                                         .positions = s.in(0).as<int32_t>(),
                                         .inv_freq = s.in(1).as<float>(),
                                         .scale = s.attributes().scale,
                                         .out = s.out().as<float>(),
                                         .out_stride = s.out().strides[0]});
}

void verify_rotation(const StepVerifier& v, const Operand& table, const Operand& x) {
  v.data(x, Dtype::f32, 3, 3);
  v.data(table, Dtype::f32, 2, 2);
  const Affine& width = table.shape[1];
  const Affine& size = x.shape[2];
  v.require(table.shape[0] == x.shape[0] && width == Affine{width.constant} &&
                size == Affine{size.constant} && width.constant % 2 == 0 && width.constant <= size.constant,
            "operand " + shape_text(table) + " doesn't rotate " + shape_text(x));
}

RopeArgs rotation(const StepResolver& s, const Place& x, const Place& table) {
  return {.tokens = x.shape[0],
          .heads = x.shape[1],
          .size = x.shape[2],
          .freqs = table.shape[1] / 2,
          .x = rows<const float>(x),
          .table = table.as<float>(),
          .table_stride = table.strides[0],
          .interleaved = s.attributes().interleaved,
          .out = {}};
}

// x [T, N, D], table [T, 2F] -> [T, N, D]
void verify_rope(StepVerifier& v) {
  verify_rotation(v, v.in(1), v.in(0));
  v.data(v.out(), Dtype::f32, 3, 3);
  v.same_shape(v.in(0), v.out());
  v.attributes().interleaved = v.flag("interleaved");
}

Call bind_rope(const StepResolver& s) {
  RopeArgs args = rotation(s, s.in(0), s.in(1));
  args.out = rows<float>(s.out());
  return call(&KernelTable::rope, args);
}

void verify_cached_rows(const StepVerifier& v, const Operand& x, const CacheGroup& cached, int64_t size) {
  v.data(x, Dtype::f32, 3, 3);
  v.require(x.shape[0] == kTokens && x.shape[1].is(cached.kv_heads) && x.shape[2].is(size),
            "operand " + shape_text(x) + " doesn't fit cache group " + cached.name);
}

// k [T, Nkv, D] and v [T, Nkv, Dv], operands `key` and the next one. Values that are a part of keys are not
// written: they have to be that part.
void verify_keys_and_values(const StepVerifier& v, size_t key, const CacheGroup& cached) {
  const Operand &k = v.in(key), &values = v.in(key + 1);
  verify_cached_rows(v, k, cached, cached.key_size);
  verify_cached_rows(v, values, cached, cached.value_size);
  v.require(!cached.values_in_keys || (values.kind == k.kind && values.index == k.index &&
                                       values.offset == k.offset && values.strides == k.strides),
            "operand " + shape_text(values) + " isn't the first part of the keys, as in cache group " +
                cached.name);
}

// The group of a second cache, operand `at`: the ends of requests, in another format than the first,
// `cached`.
void verify_group_of_ends(const StepVerifier& v, size_t at, const CacheGroup& cached, int* group) {
  const CacheGroup& ends = v.cache(v.in(at), group);
  v.require(ends.kv_heads == cached.kv_heads && ends.key_size == cached.key_size &&
                ends.value_size == cached.value_size && has_few_bits(ends.format) &&
                has_few_bits(cached.format),
            "cache group " + ends.name + " of ends doesn't fit cache group " + cached.name);
}

// k [T, Nkv, D], v [T, Nkv, Dv], slots [T], cache
void verify_kv_write(StepVerifier& v) {
  int group = 0;
  const CacheGroup& cached = v.cache(v.in(3), &group);
  verify_keys_and_values(v, 0, cached);
  v.input(v.in(2), PortCheck::slots, group);
  v.divides(group);
}

// A call that writes to a cache: its blocks are in memory by then.
template <class Args>
Call writing(OffloadedLayer* layer, void (*KernelTable::*kernel)(const Args&, Workers&), const Args& args,
             const KvWriteArgs& write) {
  if (!layer) return call(kernel, args);
  return [=, slots = write.slots, tokens = write.tokens](const RunContext& run) {
    layer->fetch_written(slots, tokens);
    (run.kernels.*kernel)(args, run.pool);
  };
}

Call bind_kv_write(const StepResolver& s) {
  const KvWriteArgs args{.tokens = s.in(0).shape[0],
                         .k = rows<const float>(s.in(0)),
                         .v = rows<const float>(s.in(1)),
                         .slots = s.in(2).as<int32_t>(),
                         .cache = s.cache(3),
                         .ranks = s.attributes().ranks,
                         .rank = s.attributes().rank};
  return writing(s.offloaded(3), &KernelTable::kv_write, args, args);
}

// q [T, Nq, D], k [T, Nkv, D], v [T, Nkv, Dv], table [T, 2F], slots [T], cache, ends?, ends_slots? [T]
// -> [T, Nq, D]
void verify_rope_kv_write(StepVerifier& v) {
  int group = 0;
  const CacheGroup& cached = v.cache(v.in(5), &group);
  v.require(!cached.values_in_keys, "cache group " + cached.name + " has values that are a part of keys");
  verify_keys_and_values(v, 1, cached);
  verify_rotation(v, v.in(3), v.in(0));
  verify_rotation(v, v.in(3), v.in(1));
  v.require(v.in(0).shape[0] == kTokens && v.size(v.in(0), 1) > 0,
            "operand " + shape_text(v.in(0)) + " has no queries");
  v.require(cached.key_size <= kLongestHead, "cache group " + cached.name + " has heads of more than 2^10");
  v.data(v.out(), Dtype::f32, 3, 3);
  v.same_shape(v.in(0), v.out());
  v.input(v.in(4), PortCheck::slots, group);
  v.divides(group);
  v.attributes().interleaved = v.flag("interleaved");
  v.attributes().has_ends = v.flag("has_ends", false);
  if (!v.attributes().has_ends) return;
  verify_group_of_ends(v, 6, cached, &group);
  v.input(v.in(7), PortCheck::slots, group);
  v.divides(group);
  v.require(v.attributes().ranks == 1, "attribute ranks: a second cache isn't divided among ranks");
}

Call bind_rope_kv_write(const StepResolver& s) {
  RopeKvWriteArgs args{.query = rotation(s, s.in(0), s.in(3)),
                       .key = rotation(s, s.in(1), s.in(3)),
                       .write = {.tokens = s.in(1).shape[0],
                                 .k = {},
                                 .v = rows<const float>(s.in(2)),
                                 .slots = s.in(4).as<int32_t>(),
                                 .cache = s.cache(5),
                                 .ranks = s.attributes().ranks,
                                 .rank = s.attributes().rank}};
  args.query.out = rows<float>(s.out());
  if (s.attributes().has_ends) {
    args.write.ends = s.cache(6);
    args.write.ends_slots = s.in(7).as<int32_t>();
  }
  return writing(s.offloaded(5), &KernelTable::rope_kv_write, args, args.write);
}

// The place among the operands of a second cache, which has the ends of requests.
size_t place_of_ends(const Attributes& a) {
  return 5 + static_cast<size_t>(a.has_sinks) + static_cast<size_t>(a.has_slopes);
}

// What paged_attention and ring_attention have in common: inputs, and what of keys a query sees. Returns the
// cache group.
const CacheGroup& verify_attention(StepVerifier& v) {
  Attributes& a = v.attributes();
  a.has_sinks = v.flag("has_sinks", false);
  a.has_slopes = v.flag("has_slopes", false);
  int group = 0;
  const CacheGroup& cached = v.cache(v.in(1), &group);
  v.data(v.in(0), Dtype::f32, 3, 3);
  v.data(v.out(), Dtype::f32, 3, 3);
  const Affine& heads = v.in(0).shape[1];
  v.require(v.in(0).shape[0] == kTokens && v.size(v.in(0), 1) > 0 && v.in(0).shape[2].is(cached.key_size) &&
                v.out().shape[0] == kTokens && v.out().shape[2].is(cached.value_size),
            "operands " + shape_text(v.in(0)) + ", " + shape_text(v.out()) + " don't fit cache group " +
                cached.name);
  v.input(v.in(2), PortCheck::table, group);
  v.input(v.in(3), PortCheck::starts);
  v.input(v.in(4), PortCheck::lengths);
  for (size_t i = 5; i < place_of_ends(a); ++i) v.vector(v.in(i), heads);
  a.scale = static_cast<float>(v.number("scale"));
  a.softcap = static_cast<float>(v.number("softcap"));
  a.window = v.integer("window");
  v.require(std::isfinite(a.scale) && a.softcap >= 0 && std::isfinite(a.softcap) && a.window >= 0,
            "attribute scale, softcap or window is out of range");
  v.attends(group, a.window);
  v.divides(group);
  return cached;
}

// Which blocks a query sees, where it isn't all.
void verify_choice(StepVerifier& v, const CacheGroup& cached) {
  Attributes& a = v.attributes();
  if (!v.has("best_blocks")) return;
  a.choice = {.first = v.integer("first_blocks", 0, INT32_MAX),
              .last = v.integer("last_blocks", 0, INT32_MAX),
              .best = v.integer("best_blocks", 1, INT32_MAX),
              .from = v.integer("all_below", 0, INT32_MAX)};
  v.require(cached.summaries,
            "attribute best_blocks: cache group " + cached.name + " lacks the keys' minima and maxima");
  v.require(a.scale > 0, "attribute best_blocks: the scale isn't above 0");
  v.require(a.window == 0, "attribute best_blocks: blocks aren't chosen within a window");
  v.require(a.first_head == 0 && v.in(0).shape[1].is(cached.kv_heads * a.heads_per_kv_head),
            "attribute best_blocks: the heads of a group choose together, and some of them aren't here");
}

void verify_ends(StepVerifier& v, const CacheGroup& cached) {
  if (!v.attributes().has_ends) return;
  int group = 0;
  const size_t at = place_of_ends(v.attributes());
  verify_group_of_ends(v, at, cached, &group);
  v.input(v.in(at + 1), PortCheck::table, group);
  v.attends(group, 2 * kStep, kStep);
  v.divides(group);
}

// q [T, Nq, D], cache, block_table, q_start, kv_len, sinks? [Nq], slopes? [Nq], ends?, ends_table?
// -> [T, Nq, Dv]
void verify_paged_attention(StepVerifier& v) {
  Attributes& a = v.attributes();
  const CacheGroup& cached = verify_attention(v);
  a.has_ends = v.flag("has_ends", false);
  verify_ends(v, cached);
  const Affine& heads = v.in(0).shape[1];
  v.require(a.ranks == 1, "attribute ranks: keys that are divided among ranks are for ring_attention");
  const bool whole = !v.has("group");  // all query heads of the cache's kv heads
  v.require(!whole || heads.constant % cached.kv_heads == 0,
            "operand " + shape_text(v.in(0)) + " doesn't fit cache group " + cached.name);
  a.heads_per_kv_head = whole ? heads.constant / cached.kv_heads : v.integer("group", 1, INT32_MAX);
  a.first_head = v.has("first_head") ? v.integer("first_head", 0, a.heads_per_kv_head - 1) : 0;
  v.require((heads.constant - 1 + a.first_head) / a.heads_per_kv_head < cached.kv_heads,
            "operand " + shape_text(v.in(0)) + " from head " + std::to_string(a.first_head) +
                " in groups of " + std::to_string(a.heads_per_kv_head) + " meets more than the " +
                std::to_string(cached.kv_heads) + " kv heads of cache group " + cached.name);
  v.require(v.out().shape[1] == heads,
            "operand " + shape_text(v.out()) + " doesn't fit the query and cache group " + cached.name);
  verify_choice(v, cached);
}

PagedAttentionArgs attention_args(const StepResolver& s) {
  const Attributes& a = s.attributes();
  return {.spans = {s.sizes().requests, s.in(3).as<int32_t>()},
          .query_heads = s.in(0).shape[1],
          .group = a.heads_per_kv_head,
          .first_head = a.first_head,
          .q = rows<const float>(s.in(0)),
          .cache = s.cache(1),
          .block_table = s.in(2).as<int32_t>(),
          .block_table_stride = s.block_table_stride(1),
          .kv_len = s.in(4).as<int32_t>(),
          .sinks = a.has_sinks ? s.in(5).as<float>() : nullptr,
          .slopes = a.has_slopes ? s.in(a.has_sinks ? 6 : 5).as<float>() : nullptr,
          .biases = {},
          .scale = a.scale,
          .window = a.window,
          .softcap = a.softcap,
          .choice = a.choice,
          .out = rows<float>(s.out()),
          .workspace = s.memory().workspace};
}

Call bind_paged_attention(const StepResolver& s) {
  PagedAttentionArgs args = attention_args(s);
  if (s.attributes().has_ends) {
    const size_t at = place_of_ends(s.attributes());
    args.ends = s.cache(at);
    args.ends_table = s.in(at + 1).as<int32_t>();
    args.ends_table_stride = s.block_table_stride(at);
  }
  OffloadedLayer* layer = s.offloaded(1);
  if (!layer) return call(&KernelTable::paged_attention, args);
  return [args, layer](const RunContext& run) { layer->attend(args, run.kernels, run.pool); };
}

// The same, of keys that are divided among ranks -> [T, n, Dv], of the heads from first_head on
void verify_ring_attention(StepVerifier& v) {
  Attributes& a = v.attributes();
  const CacheGroup& cached = verify_attention(v);
  const int64_t heads = v.size(v.in(0), 1), own = v.size(v.out(), 1);
  a.heads_per_kv_head = heads / cached.kv_heads;
  v.require(heads % cached.kv_heads == 0,
            "operand " + shape_text(v.in(0)) + " doesn't fit cache group " + cached.name);
  v.require(v.ranks().count == a.ranks, "attribute ranks: " + std::to_string(a.ranks) + " aren't the " +
                                            std::to_string(v.ranks().count) + " ranks of the program");
  a.first_head = v.integer("first_head", 0, heads - 1);
  v.require(own <= heads - a.first_head, "operand " + shape_text(v.out()) + " has more heads than the " +
                                             std::to_string(heads) + " of the query, from " +
                                             std::to_string(a.first_head) + " on");
}

// Where results of splits lie, alternately.
constexpr int kRingRegions = Exchange::kRegions - 2;

struct Ring {
  Exchange* exchange;
  RankGroup ranks;
};

Call bind_ring_attention(const StepResolver& s) {
  RingAttentionArgs args{.attention = attention_args(s),
                         .ranks = s.attributes().ranks,
                         .rank = s.attributes().rank,
                         .head = s.attributes().first_head,
                         .heads = s.out().shape[1]};
  args.attention.first_head = 0;
  args.memory = [](void* ring, int place, int64_t bytes) {
    return static_cast<Ring*>(ring)->exchange->memory(kRingRegions + place, bytes);
  };
  args.meet = [](void* ring) { static_cast<Ring*>(ring)->exchange->meet(static_cast<Ring*>(ring)->ranks); };
  return [args, ranks = s.ranks()](const RunContext& run) {
    Ring ring = {run.exchange, ranks};
    int64_t pairs[kMostOwners] = {};
    RingAttentionArgs a = args;
    a.exchange = &ring;
    a.rounds = &run.ring->rounds;
    a.pairs = pairs;
    run.kernels.ring_attention(a, run.pool);
    for (int64_t rank = 0; rank < a.ranks; ++rank) run.ring->pairs[rank] += pairs[rank];
  };
}

constexpr Op kOps[] = {
    {.name = "rope_table", .verify = verify_rope_table, .bind = bind_rope_table},
    {.name = "rope", .verify = verify_rope, .bind = bind_rope, .in_place = true},
    {.name = "kv_write", .verify = verify_kv_write, .bind = bind_kv_write},
    {.name = "rope_kv_write", .verify = verify_rope_kv_write, .bind = bind_rope_kv_write},
    {.name = "paged_attention", .verify = verify_paged_attention, .bind = bind_paged_attention},
    {.name = "ring_attention", .verify = verify_ring_attention, .bind = bind_ring_attention, .meets = true},
};

}  // namespace

std::span<const Op> attention_ops() { return kOps; }

}  // namespace ew
