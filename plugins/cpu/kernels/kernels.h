// The CPU kernels: one argument struct a lowered op, and a table of functions for each instruction set.
//
// Build, all with -O3 -ffp-contract=off (only explicit fma is used, so that a result is the same at any place
// in a vector):
//   avx2.cpp           -mavx2 -mfma -mf16c                                      (x86-64 only, all six)
//   avx512.cpp         as avx2.cpp, -mavx512f -mavx512bw -mavx512dq -mavx512vl
//   avx2_vnni.cpp      as avx2.cpp, -mavxvnni      what these four hold takes the place of the same kernels
//   avx512_vnni.cpp    as avx512.cpp, -mavx512vnni       in a copy of the table that they extend
//   avx512_bf16.cpp    as avx512.cpp, -mavx512bf16
//   avx512_amx.cpp     as avx512.cpp, -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16
//   portable.cpp, registry.cpp     no further flags
// None of them includes ../../native/thread_pool.h: inline functions of a header that is compiled with
// AVX-512 flags could be picked by the linker for everybody. Threads are reached by the class Workers
// (parallel.h).
//
// The package has the kernels once, in libenginewright_kernels.so. The extension and the libraries for
// onnxruntime and XLA load it, and see what is EW_EXPORTED.
//
// Shape letters as in runtime/shared/contracts.py: T tokens, B requests, R sampled rows, P blocks of the KV
// pool, Nq query heads, Nkv key/value heads, D key head size, Dv value head size, V vocabulary. A KV block
// has 32 slots. Sizes and strides count elements. Unless an argument is a View, the innermost stride is 1. No
// alignment is needed.
//
// Every result is independent of threads and of the other rows of the call: docs/inside/numerics.md has the
// order of every sum. An output may be the very same view as an input of the same shape in elementwise,
// norms, rope and copy (a norm's `sum` may be x or residual, `normed` too, if it isn't `sum`), and a linear's
// y its residual; partial overlaps are never allowed, nor any overlap elsewhere. The kernels trust their
// arguments: ids, rows, slots and block tables are checked by who calls them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "exported.h"
#include "operands.h"
#include "packed_args.h"
#include "routing_args.h"

namespace ew {

class Workers;

// out[t, :] = weight[ids[t], :]
struct EmbeddingArgs {
  int64_t tokens = 0, hidden = 0;
  const int32_t* ids = nullptr;   // [T], each in 0 .. V-1
  const float* weight = nullptr;  // [V, H] in `layout`
  WeightLayout layout = WeightLayout::rows;
  float* out = nullptr;  // [T, H]
  int64_t out_stride = 0;
};

// y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], and what the epilogue makes of it
struct LinearArgs {
  int64_t m = 0, n = 0, k = 0;
  const float* x = nullptr;  // [M, K]
  int64_t x_stride = 0;
  const float* weight = nullptr;  // panel32: [ceil(N/32)][K][32], rows past N are zero; or sparse32
  const float* bias = nullptr;    // [N] or null
  float* y = nullptr;             // [M, N]
  int64_t y_stride = 0;
  Epilogue epilogue = {};
  bool sparse = false;  // the weight is in sparse32, and K a multiple of 4
};

// rms_norm, layer_norm, add_rms_norm, add_layer_norm over the last dimension. Without add_: residual and sum
// are unused.
struct NormArgs {
  int64_t outer = 0, inner = 1, size = 0;  // [outer, inner, size]
  Rows<const float> x, residual;
  const float* weight = nullptr;  // [size] or null
  const float* bias = nullptr;    // [size] or null; layer norms alone
  float eps = 0;
  Rows<float> normed, sum;
};

// out[t, f] = cos(positions[t] * inv_freq[f]) * scale, out[t, F + f] = sin(...) * scale
struct RopeTableArgs {
  int64_t tokens = 0, freqs = 0;
  const int32_t* positions = nullptr;  // [T]
  const float* inv_freq = nullptr;     // [F]
  float scale = 1;
  float* out = nullptr;  // [T, 2F]
  int64_t out_stride = 0;
};

// Rotates the first 2F of D by the table: pairs (i, i + F), interleaved (2i, 2i + 1); the rest passes
// through.
struct RopeArgs {
  int64_t tokens = 0, heads = 0, size = 0, freqs = 0;
  Rows<const float> x;           // [T, N, D]
  const float* table = nullptr;  // [T, 2F]
  int64_t table_stride = 0;
  bool interleaved = false;
  Rows<float> out;  // [T, N, D]
};

// out[r, i] = activation(gate[r, i]) * up[r, i]
struct GatedActivationArgs {
  int64_t outer = 0, inner = 1, size = 0;  // size = I
  Rows<const float> gate, up;              // [outer, inner, I] each; mostly the halves of one [.., 2I]
  Activation kind = Activation::silu;
  Rows<float> out;  // [outer, inner, I]
};

// A norm whose result is quantized and goes nowhere else: `normed` and then.x are unused. Rows are
// `outer * inner` = then.m.
struct NormQuantizeArgs {
  NormArgs first;
  QuantizeActivationArgs then;
  Workspace* workspace = nullptr;  // never null: a row for each thread
};

// Stores token t's keys and values in the cache at slots[t] = block * 32 + place.
struct KvWriteArgs {
  int64_t tokens = 0;
  Rows<const float> k, v;          // [T, Nkv, D], [T, Nkv, Dv]
  const int32_t* slots = nullptr;  // [T]
  KvCache cache;
  int64_t ranks = 1, rank = 0;  // only tokens are stored whose block is one with block % ranks == rank
  // A second cache, which stores the same tokens. Both are of few bits; without memory, there is none.
  KvCache ends = {};
  const int32_t* ends_slots = nullptr;  // [T]
  bool owns(int64_t block) const { return ranks == 1 || block % ranks == rank; }
};

// rope of queries and of keys, and kv_write of the keys as they are then.
struct RopeKvWriteArgs {
  RopeArgs query, key;  // with one table; key.out is unused
  KvWriteArgs write;    // write.k is unused
};

// Of the whole blocks of 32 keys before its own, a query at `from` or behind sees the `first` ones, the
// `last` ones and the `best` of the others; best 0: all.
struct BlockChoice {
  int64_t first = 0, last = 0, best = 0, from = 0;
};

// A head adds data[head * stride + reach + d] to the score of a key, where d is key position - query
// position, or the nearest of -reach .. reach.
struct Biases {
  const float* data = nullptr;  // null: nothing
  int64_t stride = 0, reach = 0;
};

// Causal attention of each request's tokens over its whole past in the cache (kv_write of this step comes
// before). A query at p sees keys max(0, p - window + 1) .. p; window 0: 0 .. p. softcap 0: off.
//
// Query head h meets kv head (h + first_head) / group of the cache: of a whole model group is Nq / Nkv, while
// a part of the heads may begin, and end, within a kv head's group.
struct PagedAttentionArgs {
  Spans spans;
  int64_t query_heads = 0;
  int64_t group = 0, first_head = 0;  // group 0: Nq / Nkv; first_head < group
  Rows<const float> q;                // [T, Nq, D]
  KvCache cache;
  const int32_t* block_table = nullptr;  // [B, blocks]; places past kv_len aren't read
  int64_t block_table_stride = 0;
  // The ends of each request once more, in another format with rotated keys: the first step of kStep keys,
  // and a query's own step and the one before it, are read there. Without memory: there are none.
  KvCache ends = {};
  const int32_t* ends_table = nullptr;  // [B, blocks]; places of other steps aren't read
  int64_t ends_table_stride = 0;
  const int32_t* kv_len = nullptr;  // [B], with this step's tokens
  const float* sinks = nullptr;     // [Nq] or null
  const float* slopes = nullptr;  // [Nq] or null: slope * (key position - query position) is added to a score
  Biases biases;                  // of attention without a cache
  float scale = 1;
  int64_t window = 0;
  float softcap = 0;
  BlockChoice choice;  // with it, the cache has summaries, and all heads of each group are here
  // [T, Nkv, words]: bits of the blocks that each row sees. choose_blocks sets them; paged_attention takes
  // them, or chooses itself where this is null.
  uint64_t* chosen = nullptr;
  int64_t chosen_words = 0;
  Rows<float> out;                 // [T, Nq, Dv]
  Workspace* workspace = nullptr;  // never null
};

// The same with the keys divided among ranks, of whom each has the blocks with block % ranks == rank; all
// blocks of a split of 512 keys have one owner. Each rank attends to its own splits, for all query heads, and
// merges those of all ranks for its own heads: attention.out is [T, heads, Dv]. Ranks give the same
// arguments, but for the cache, `rank`, what they give and where it goes.
struct RingAttentionArgs {
  PagedAttentionArgs attention;  // of all query heads
  int64_t ranks = 1, rank = 0;
  int64_t head = 0, heads = 0;  // the first that this rank gives, and how many
  int64_t* rounds = nullptr;    // how often the ranks have met in this way before, the same number on all
  int64_t* pairs = nullptr;     // [ranks]: what each has attended to is added, in (token, split)
  // Memory that all ranks see, one of two, and a place where they meet.
  void* exchange = nullptr;
  char* (*memory)(void* exchange, int place, int64_t bytes) = nullptr;
  void (*meet)(void* exchange) = nullptr;
};

// Attention of each request's tokens over its tokens of this step, of which query i sees keys
// max(0, i - window + 1) .. i, or, if not causal, up to i + window - 1; window 0: all of these.
struct AttentionArgs {
  Spans spans;
  int64_t query_heads = 0, kv_heads = 0;  // Nq a multiple of Nkv
  int64_t key_size = 0, value_size = 0;
  Rows<const float> q, k, v;      // [T, Nq, D], [T, Nkv, D], [T, Nkv, Dv]
  const float* sinks = nullptr;   // [Nq] or null
  const float* slopes = nullptr;  // [Nq] or null: slope * |key position - query position| leaves a score
  Biases biases;                  // joins a score
  float scale = 1;
  int64_t window = 0;
  float softcap = 0;
  bool causal = true;
  KvFormat format = KvFormat::f32;  // of keys and values: f32 or bf16
  Rows<float> out;                  // [T, Nq, Dv]
  Workspace* workspace = nullptr;   // never null
};

// Makes one row of each request's rows: out[b, :] is their mean, the first, the last, the largest of each
// column, or the sum of (i + 1) * row i over that of i + 1. A request without tokens has zeros.
struct PoolArgs {
  Spans spans;
  int64_t size = 0;
  Rows<const float> x;  // [T, size]
  PoolKind kind = PoolKind::mean;
  Rows<float> out;  // [B, size]
};

// The part of a cache of states [P, stride] that a recurrent op goes on from: `stride` floats a block, of
// which its own begin at `first`. A request's block is the first one of its row of the table. The state after
// token t is stored in block slots[t] / slot_tokens too, unless slots[t] is negative.
struct StateArgs {
  Spans spans;
  float* state = nullptr;
  int64_t stride = 0, first = 0;
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0;
  const int32_t* kv_len = nullptr;  // [B], with this step's tokens
  const int32_t* slots = nullptr;   // [T]
  int64_t slot_tokens = 1;
};

// Each channel's sum over its last W inputs, plus bias, activated.
struct StoredConvolutionArgs {
  int64_t channels = 0, taps = 0;  // C, and W up to 16
  Rows<const float> x;             // [T, C]
  const float* weight = nullptr;   // [C, W], the last of a row for the token itself
  int64_t weight_stride = 0;
  const float* bias = nullptr;  // [C] or null
  bool activated = false;
  Activation activation = Activation::silu;
  Rows<float> out;  // [T, C]
  StateArgs state;
};

// The recurrence of Mamba and Mamba-2, of heads of P channels with S values of state each.
struct StoredScanArgs {
  int64_t heads = 0, head_channels = 0, groups = 0, size = 0;  // N, P, G, and S up to 1024
  Rows<const float> x;                                         // [T, N, P]
  Rows<const float> dt;                                        // [T, N]
  const float* a = nullptr;                                    // [N], or [N, S]
  int64_t a_stride = 0;
  bool rates_of_state = false;  // a is [N, S]
  Rows<const float> b, c;       // [T, G, S]
  Rows<float> out;              // [T, N, P]
  StateArgs state;
};

// The gated delta rule, and Kimi delta attention.
struct StoredDeltaRuleArgs {
  int64_t heads = 0, key_heads = 0, key_size = 0, value_size = 0;  // N, Nk, D up to 1024, Dv
  Rows<const float> q, k;                                          // [T, Nk, D]
  Rows<const float> v;                                             // [T, N, Dv]
  Rows<const float> decay;                                         // [T, N], or [T, N, D]
  bool decay_of_rows = false;                                      // decay is [T, N, D]
  Rows<const float> beta;                                          // [T, N]
  float scale = 1;
  bool normalize = false;  // q and k are divided by their lengths
  Rows<float> out;         // [T, N, Dv]
  StateArgs state;
};

// out[r, ...] = x[rows[r], ...]
struct TakeRowsArgs {
  int64_t count = 0, inner = 1, size = 0;  // out is [count, inner, size]
  Rows<const float> x;
  const int32_t* rows = nullptr;  // [count]
  Rows<float> out;
};

// out = fn(in[0], in[1], in[2]), each broadcast by strides to `shape`.
struct ElementwiseArgs {
  ElementwiseFn fn = ElementwiseFn::add;
  int64_t shape[kMaxRank] = {1, 1, 1, 1};
  View in[3];
  View out;
  bool integer = false;       // all operands i32, but a comparison's result (cast: this stays false)
  bool has_scalar = false;    // a function of 2 operands has one only: in[0]; the other is the number
  bool scalar_first = false;  // fn(number, in[0])
  double scalar = 0;          // rounded to f32, or to i32 if integer
};

// out = in, elements of 4 bytes
struct CopyArgs {
  int64_t shape[kMaxRank] = {1, 1, 1, 1};
  View in, out;
};

// out[..., 0] = kind of in[..., 0 : C]; the stride of in's last dimension is 1
struct ReduceArgs {
  ReduceKind kind = ReduceKind::sum;
  int64_t shape[kMaxRank] = {1, 1, 1, 1};  // of the input; shape[3] = C > 0
  View in, out;
};

// The kernels of every instruction set, one line each: the name in the table, the arguments, and what
// families.h fills it with.
// clang-format off
#define EW_KERNELS(kernel)                                                                           \
  kernel(embedding, EmbeddingArgs, embedding)                                                       \
  kernel(linear, LinearArgs, linear)                                                                \
  kernel(embedding_bf16, EmbeddingBf16Args, embedding_bf16)                                         \
  kernel(cast_bf16, CastBf16Args, cast_bf16)                                                        \
  kernel(linear_bf16, LinearBf16Args, linear_bf16)                                                  \
  kernel(embedding_int8, EmbeddingInt8Args, embedding_int8)                                         \
  kernel(embedding_int4, EmbeddingInt4Args, embedding_int4)                                         \
  kernel(embedding_fp8, EmbeddingFp8Args, embedding_fp8)                                            \
  kernel(linear_fp8, LinearFp8Args, linear_fp8)                                                     \
  kernel(quantize_activation, QuantizeActivationArgs, quantize_activation)                          \
  kernel(linear_int8, LinearInt8Args, linear_int8)                                                  \
  kernel(linear_int4, LinearInt4Args, linear_int4)                                                  \
  kernel(rms_norm, NormArgs, norm<false, false>)                                                    \
  kernel(layer_norm, NormArgs, norm<true, false>)                                                   \
  kernel(add_rms_norm, NormArgs, norm<false, true>)                                                 \
  kernel(add_layer_norm, NormArgs, norm<true, true>)                                                \
  kernel(rope_table, RopeTableArgs, rope_table)                                                     \
  kernel(rope, RopeArgs, rope)                                                                      \
  kernel(gated_activation, GatedActivationArgs, gated_activation)                                   \
  kernel(rms_norm_quantize, NormQuantizeArgs, norm_quantize<false, false>)                          \
  kernel(layer_norm_quantize, NormQuantizeArgs, norm_quantize<true, false>)                         \
  kernel(add_rms_norm_quantize, NormQuantizeArgs, norm_quantize<false, true>)                       \
  kernel(add_layer_norm_quantize, NormQuantizeArgs, norm_quantize<true, true>)                      \
  kernel(kv_write, KvWriteArgs, kv_write)                                                           \
  kernel(rope_kv_write, RopeKvWriteArgs, rope_kv_write)                                             \
  kernel(choose_blocks, PagedAttentionArgs, choose_blocks)                                          \
  kernel(paged_attention, PagedAttentionArgs, paged_attention)                                      \
  kernel(ring_attention, RingAttentionArgs, ring_attention)                                         \
  kernel(attention, AttentionArgs, attention)                                                       \
  kernel(pool, PoolArgs, pool_rows)                                                                 \
  kernel(stored_convolution, StoredConvolutionArgs, stored_convolution)                             \
  kernel(stored_scan, StoredScanArgs, stored_scan)                                                  \
  kernel(stored_delta_rule, StoredDeltaRuleArgs, stored_delta_rule)                                 \
  kernel(take_rows, TakeRowsArgs, take_rows)                                                        \
  kernel(elementwise, ElementwiseArgs, elementwise)                                                 \
  kernel(copy, CopyArgs, copy)                                                                      \
  kernel(reduce, ReduceArgs, reduce)                                                                \
  kernel(route_experts, RouteExpertsArgs, route_experts)                                            \
  kernel(combine_experts, CombineExpertsArgs, combine_experts)                                      \
  kernel(grouped_linear, Grouped<LinearArgs>, grouped_linear<LinearArgs, linear>)                   \
  kernel(grouped_linear_bf16, Grouped<LinearBf16Args>, grouped_linear<LinearBf16Args, linear_bf16>) \
  kernel(grouped_linear_fp8, Grouped<LinearFp8Args>, grouped_linear<LinearFp8Args, linear_fp8>)     \
  kernel(grouped_linear_int8, Grouped<LinearInt8Args>, grouped_linear<LinearInt8Args, linear_int8>) \
  kernel(grouped_linear_int4, Grouped<LinearInt4Args>, grouped_linear<LinearInt4Args, linear_int4>) \
  kernel(top_k, TopKArgs, top_k)                                                                    \
  kernel(gather, GatherArgs, gather)                                                                \
  kernel(scatter, ScatterArgs, scatter)
// clang-format on

struct KernelTable {
  const char* isa;  // avx512_amx (with BF16 and VNNI), avx512_bf16 (with VNNI), avx512_vnni, avx512, ..
#define EW_SLOT(name, args, ...) void (*name)(const args&, Workers&);
  EW_KERNELS(EW_SLOT)
#undef EW_SLOT
  // Rounds of a loop in registers alone, on the calling thread: how many multiply-adds they were. See peak.h
  int64_t (*peak_int8)(int64_t rounds);
  int64_t (*peak_bf16)(int64_t rounds);
  int64_t (*peak_f32)(int64_t rounds);
  uint64_t (*read)(const void* data, int64_t bytes);  // their sum, or nearly: a loop that only reads
};

// What this processor can run, best first; the last is "portable".
EW_EXPORTED std::vector<std::string> available_isas();

// The table of an instruction set; null if this build or this processor doesn't have it.
EW_EXPORTED const KernelTable* kernels_for(const char* isa);

// By the names of runtime/shared/lowered_program.py. False, and no change, for an unknown name.
EW_EXPORTED bool parse_activation(const char* name, Activation* out);
EW_EXPORTED bool parse_linear_activation(const char* name, LinearActivation* out);
EW_EXPORTED bool parse_reduce(const char* name, ReduceKind* out);
EW_EXPORTED bool parse_pool(const char* name, PoolKind* out);
EW_EXPORTED bool parse_kv_format(const char* name, KvFormat* out);
EW_EXPORTED bool parse_elementwise(const char* name, ElementwiseFn* out);

}  // namespace ew
