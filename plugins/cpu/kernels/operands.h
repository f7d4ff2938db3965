// What the arguments of all kernels are made of: views, caches, layouts, the kinds of what an op does.
#pragma once

#include <cstdint>

#include "elementwise_functions.h"
#include "exported.h"

namespace ew {

constexpr int64_t kPanel = 32;   // columns of a weight panel (layout panel32)
constexpr int64_t kBlock = 32;   // slots of a KV block, keys of an attention tile
constexpr int64_t kStep = 128;   // keys of a softmax step
constexpr int64_t kSplit = 512;  // keys of an attention split
constexpr int64_t kMaxRank = 4;
constexpr int64_t kLongestHead = 1024;  // key head size that rope_kv_write takes, and a cache of few bits

// A grow-only, 64-byte aligned piece of scratch memory. One owner, one kernel call at a time.
class EW_EXPORTED Workspace {
 public:
  Workspace() = default;
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  // At least `bytes` bytes, uninitialised; earlier pointers are void. Throws std::bad_alloc.
  void* reserve(int64_t bytes);

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// Rows of a tensor of rank <= 3: element (i, j, c) is data[i * stride0 + j * stride1 + c].
// Rank 2: the second dimension has size 1 (the args' `inner`) and any stride.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t stride0 = 0, stride1 = 0;
};

// A tensor of rank 4 at any strides, 0 where it is broadcast; missing leading dimensions have size 1.
// The args give the shape. data points to f32 or i32.
struct View {
  void* data = nullptr;
  int64_t stride[kMaxRank] = {0, 0, 0, 0};
};

// How keys and values are kept: floats, bf16, or codes (int8, or e4m3fn) times an f32 scale of each token and
// kv head; or rotated, as integers of few bits times an f16 scale. kv_format.h and few_bits.h write and read
// them.
enum class KvFormat { f32, bf16, i8, fp8, k8v8, k8v4, k6v4, k5v4, k4v4 };
enum class Side { keys, values };

// How a weight [N, K] lies in memory; docs/inside/stored-weights.md draws them. Rows past N are zero, and so
// are k past K.
//   rows       row-major
//   panel32    [ceil(N/32)][K][32]
//   panel32x2  [ceil(N/32)][ceil(K/2)][32][2]   bf16
//   panel32x4  [ceil(N/32)][ceil(K/4)][32][4]   int8, stored as value + 128 in a byte without sign
//   panel32x8  [ceil(N/32)][ceil(K/8)][32][4]   bytes of two int4, each stored as value + 8, of two uint4, or
//   of
//                                              two places in a table
//   planes32   [ceil(N/32)][ceil(K/16)] pieces: the low halves of 5 or 6 bits as panel32x8 has them, and the
//              other bits behind them; or 2 or 3 bits, four values to a byte. See linear_int4.h
//   blocks8, blocks16   scales of integers, in blocks of so many groups: see group_scales.h
//   sparse32   [ceil(N/32)][ceil(K/32)] blocks: the places of what is kept of every four k, then its values.
//   See
//              linear_sparse.h
enum class WeightLayout {
  rows,
  panel32,
  panel32x2,
  panel32x4,
  panel32x8,
  planes32,
  blocks8,
  blocks16,
  sparse32
};

// The values of attributes. A name here is the name in programs too (registry.cpp).
#define EW_ACTIVATIONS(value) value(silu) value(gelu) value(gelu_tanh) value(relu) value(sigmoid)
#define EW_LINEAR_ACTIVATIONS(value) EW_ACTIVATIONS(value) value(relu2) value(tanh)  // relu2: relu^2
#define EW_REDUCE_KINDS(value) value(sum) value(mean) value(max)
#define EW_POOL_KINDS(value) value(mean) value(cls) value(last) value(max) value(weighted)

#define EW_ENUMERATOR(name, ...) name,
enum class Activation { EW_ACTIVATIONS(EW_ENUMERATOR) };
enum class LinearActivation { none, EW_LINEAR_ACTIVATIONS(EW_ENUMERATOR) };
enum class ReduceKind { EW_REDUCE_KINDS(EW_ENUMERATOR) };
enum class PoolKind { EW_POOL_KINDS(EW_ENUMERATOR) };
enum class ElementwiseFn { EW_ELEMENTWISE_FUNCTIONS(EW_ENUMERATOR, EW_ENUMERATOR, EW_ENUMERATOR) };
#undef EW_ENUMERATOR

// Integers that a weight's 4 bits stand for, each + 128: those of GGUF's IQ4, and twice those of e2m1 (FP4).
// runtime/shared/weight_formats.py has them without the 128.
inline constexpr uint8_t kIq4Codes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                          129, 141, 153, 166, 181, 197, 217, 241};
inline constexpr uint8_t kFp4Codes[16] = {116, 120, 122, 124, 125, 126, 127, 128,
                                          129, 130, 131, 132, 134, 136, 140, 140};

// What becomes of a linear's sum, its bias included: y = activation(sum) + residual.
struct Epilogue {
  LinearActivation activation = LinearActivation::none;
  const float* residual = nullptr;  // [M, N] or null; may be y itself. Grouped linears have none
  int64_t residual_stride = 0;
};

namespace {  // no symbols: these are also compiled for wider instruction sets (see kernels.h)

#define EW_OPERANDS(name, operands, ...) operands,
constexpr int operands_of(ElementwiseFn fn) {
  constexpr int kOperands[] = {EW_ELEMENTWISE_FUNCTIONS(EW_OPERANDS, EW_OPERANDS, EW_OPERANDS)};
  return kOperands[static_cast<int>(fn)];
}
#undef EW_OPERANDS

struct KvFormatEntry {
  const char* name;  // in lowered programs
  KvFormat value;
  int key_bits, value_bits;  // of an element
  int scale_bytes;           // of a token's head; 2: elements are rotated (few_bits.h)
  float largest_code;        // what the largest magnitude of a token's head becomes in a code of a byte
};
// In the order of KvFormat.
constexpr KvFormatEntry kKvFormats[] = {
    {"f32", KvFormat::f32, 32, 32, 0, 0}, {"bf16", KvFormat::bf16, 16, 16, 0, 0},
    {"i8", KvFormat::i8, 8, 8, 4, 127},   {"fp8", KvFormat::fp8, 8, 8, 4, 448},
    {"k8v8", KvFormat::k8v8, 8, 8, 2, 0}, {"k8v4", KvFormat::k8v4, 8, 4, 2, 0},
    {"k6v4", KvFormat::k6v4, 6, 4, 2, 0}, {"k5v4", KvFormat::k5v4, 5, 4, 2, 0},
    {"k4v4", KvFormat::k4v4, 4, 4, 2, 0},
};
constexpr const KvFormatEntry& entry_of(KvFormat format) { return kKvFormats[static_cast<int>(format)]; }
constexpr float largest_code(KvFormat format) { return entry_of(format).largest_code; }
constexpr bool has_scales(KvFormat format) { return entry_of(format).scale_bytes != 0; }
constexpr bool has_few_bits(KvFormat format) { return entry_of(format).scale_bytes == 2; }
constexpr int bits_of(KvFormat format, Side side) {
  return side == Side::keys ? entry_of(format).key_bits : entry_of(format).value_bits;
}

// The bytes of the 32 keys, or values, of one block and kv head, `size` elements each: without scales, and
// with them.
constexpr int64_t element_bytes(KvFormat format, Side side, int64_t size) {
  return kBlock / 8 * size * bits_of(format, side);
}
constexpr int64_t kv_piece_bytes(KvFormat format, Side side, int64_t size) {
  return element_bytes(format, side, size) + kBlock * entry_of(format).scale_bytes;
}
// Whether elements of few bits fill their bytes for heads of `size`, without sharing one with another token.
constexpr bool takes_head(KvFormat format, Side side, int64_t size) {
  if (!has_few_bits(format)) return true;
  const int high = bits_of(format, side) - 4, shared = high == 0 ? 2 : high == 4 ? 1 : 8 / high;
  return 0 < size && size <= kLongestHead && size % (side == Side::keys ? 2 * shared : shared) == 0;
}
// Channels of a summary: 0 past those of the key.
constexpr int64_t summary_channels(int64_t key_size) { return (key_size + 15) / 16 * 16; }
constexpr bool compares(ElementwiseFn fn) { return ElementwiseFn::lt <= fn && fn <= ElementwiseFn::ne; }

}  // namespace

#define EW_ALWAYS [[gnu::always_inline]]  // no symbols, as above

// The tokens of a step by request: request b has the tokens begin(b) .. end(b) - 1 of total().
struct Spans {
  int64_t requests = 0;
  const int32_t* q_start = nullptr;  // [B + 1]

  EW_ALWAYS constexpr int64_t begin(int64_t b) const { return q_start[b]; }
  EW_ALWAYS constexpr int64_t end(int64_t b) const { return q_start[b + 1]; }
  EW_ALWAYS constexpr int64_t tokens(int64_t b) const { return end(b) - begin(b); }
  EW_ALWAYS constexpr int64_t total() const { return q_start[requests]; }
};

// The shape of keys and values: what all that counts bytes of a cache, or finds a place in it, asks.
struct KvShape {
  int64_t kv_heads = 0, key_size = 0, value_size = 0;
  KvFormat format = KvFormat::f32;
  bool summaries = false;  // behind the keys of a block and head: the least and the greatest of each channel
  bool values_in_keys = false;  // a value is the first value_size channels of its key: only keys are stored
  int64_t state_size = 0;       // floats of a block that holds a state in place of keys and values; else 0

  // Where an array [.., Nkv] has row n of a head: a block's piece, or a token's choice.
  EW_ALWAYS constexpr int64_t at(int64_t n, int64_t head) const { return n * kv_heads + head; }
  EW_ALWAYS constexpr int64_t pieces(int64_t blocks) const { return blocks * kv_heads; }
  EW_ALWAYS constexpr int64_t query_group(int64_t query_heads) const { return query_heads / kv_heads; }

  EW_ALWAYS constexpr bool between(int64_t least, int64_t most) const {
    return least <= kv_heads && kv_heads <= most && least <= key_size && key_size <= most &&
           least <= value_size && value_size <= most;
  }

  // Bytes of the piece of a block and head.
  EW_ALWAYS constexpr int64_t summary_bytes() const { return 4 * summary_channels(key_size); }
  EW_ALWAYS constexpr int64_t key_bytes() const {
    if (state_size > 0) return 4 * state_size;
    return kv_piece_bytes(format, Side::keys, key_size) + (summaries ? summary_bytes() : 0);
  }
  EW_ALWAYS constexpr int64_t value_bytes() const {
    return state_size > 0 || values_in_keys ? 0 : kv_piece_bytes(format, Side::values, value_size);
  }
};

// A layer's KV cache: the pieces [P][Nkv] of its keys and those of its values, which kv_format.h draws.
struct KvCache : KvShape {
  void* k = nullptr;
  void* v = nullptr;
  // Where a layer has memory for some blocks alone (offload.h): their summaries, [P, Nkv, 2, channels], and
  // the place of each block that is in memory. Else null: block b is at b.
  char* apart = nullptr;
  const int32_t* places = nullptr;
};

#undef EW_ALWAYS

}  // namespace ew
