// A lowered program as the interpreter holds it. The fields mirror runtime/shared/lowered_program.py;
// executable.py fills one from the JSON. Everything that doesn't depend on the sizes of a step is verified
// while it is built, so that a run has only sizes, and the values of the step's inputs, left to check.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "../cpu/kernels/kernels.h"
#include "exchange.h"

namespace ew {

// The symbols of a step: T tokens, B requests, R sampled rows.
struct Sizes {
  int64_t tokens = 0, requests = 0, rows = 0;
  bool operator==(const Sizes&) const = default;
};

// constant + t*T + b*B + r*R
struct Affine {
  int64_t constant = 0, t = 0, b = 0, r = 0;
  bool operator==(const Affine&) const = default;
  bool is(int64_t value) const { return *this == Affine{value}; }
  int64_t at(const Sizes& s) const { return constant + t * s.tokens + b * s.requests + r * s.rows; }
  std::string text() const;
};

inline constexpr Affine kTokens{0, 1, 0, 0}, kRequests{0, 0, 1, 0}, kRows{0, 0, 0, 1};

enum class OperandKind : uint8_t { buffer, weight, input, cache };
enum class Dtype : uint8_t { f32, bf16, f16, i32, i8, i4, u4, fp8, i5, u5, i6, iq4, fp4, i3, u3, i2, u2 };
// Of integers below 8 bits, which only weights in panels have; 0 for the others.
constexpr int64_t few_bits(Dtype dtype) {
  return dtype == Dtype::i4 || dtype == Dtype::u4 || dtype == Dtype::iq4 || dtype == Dtype::fp4 ? 4
         : dtype == Dtype::i5 || dtype == Dtype::u5                                             ? 5
         : dtype == Dtype::i6                                                                   ? 6
         : dtype == Dtype::i3 || dtype == Dtype::u3                                             ? 3
         : dtype == Dtype::i2 || dtype == Dtype::u2                                             ? 2
                                                                                                : 0;
}
// Of 4 bits that are places in a table: the integers they stand for, + 128.
constexpr const uint8_t* codes_of(Dtype dtype) {
  return dtype == Dtype::iq4 ? kIq4Codes : dtype == Dtype::fp4 ? kFp4Codes : nullptr;
}
// Whether they are stored as they are, and have offsets.
constexpr bool without_sign(Dtype dtype) {
  return dtype == Dtype::u4 || dtype == Dtype::u5 || dtype == Dtype::u3 || dtype == Dtype::u2;
}
// e4m3fn, which is a weight's too.
constexpr bool only_of_weights(Dtype dtype) { return few_bits(dtype) > 0 || dtype == Dtype::fp8; }
constexpr int64_t element_bytes(Dtype dtype) {  // and 1 for what takes less
  return dtype == Dtype::i8 || only_of_weights(dtype)  ? 1
         : dtype == Dtype::bf16 || dtype == Dtype::f16 ? 2
                                                       : 4;
}
const char* name_of(Dtype dtype);
const char* name_of(WeightLayout layout);
bool parse_dtype(const char* name, Dtype* out);  // false, and no change, for an unknown name
bool parse_layout(const char* name, WeightLayout* out);
std::map<std::string, int64_t> layout_depths();  // by name: how many values along K lie side by side

// What the values of a step's array must be; runtime/shared/step_schema.py says what each means.
enum class PortCheck : uint8_t { none, index, row, starts, lengths, segments, slots, table };
bool parse_check(const char* name, PortCheck* out);  // false, and no change, for an unknown name

// One of the arrays that a step brings, i32 or f32. Which there are is declared in step_schema.py.
struct Port {
  std::string name;
  std::vector<Affine> shape;  // of a block table [B]: its width is each step's own
  Dtype dtype = Dtype::i32;
  PortCheck check = PortCheck::none;
  int group = -1;                    // the cache group that it is of
  int64_t limit = int64_t{1} << 31;  // of an index: its values are below, because embeddings look them up
};

// A strided view; strides and offset count elements. Of kind cache: `index` is the layer's place in
// Program::caches, and there is no shape. Of kind input: in Program::ports.
struct Operand {
  OperandKind kind = OperandKind::buffer;
  int index = 0;
  Dtype dtype = Dtype::f32;
  std::vector<Affine> shape, strides;
  Affine offset;
  std::string name;  // for messages

  int rank() const { return static_cast<int>(shape.size()); }
};

struct Op;  // ops/op.h

using AttributeValue = std::variant<bool, int64_t, double, std::string>;
using AttributeMap = std::map<std::string, AttributeValue>;

// The attributes of all ops, those that a step's op has being set.
struct Attributes {
  float eps = 0, scale = 1, softcap = 0;
  double scalar = 0;
  int64_t window = 0, group_size = 0, weight_group = 0, activation_group = 0, scale_block = 0, experts = 0,
          k = 0;
  int64_t heads_per_kv_head = 0, first_head = 0;  // of paged_attention
  BlockChoice choice;                             // of paged_attention
  bool has_weight = false, has_bias = false, has_sinks = false, has_slopes = false, has_biases = false,
       has_ends = false;
  bool has_offsets = false, has_residual = false, has_scalar = false, scalar_first = false;
  bool interleaved = false;
  int64_t first = 0;                          // of a recurrence: where its state begins in a block
  bool normalize = false, activated = false;  // of a delta rule, and of a convolution
  RankGroup others;                           // whom a message goes to, or comes from
  int64_t to = -1;                            // who alone needs what is gathered; -1: all of the group
  std::vector<std::vector<int64_t>>
      cuts;                     // of each operand that ranks have parts of, where the parts begin and end
  int64_t ranks = 1, rank = 0;  // that keys are divided among: see CacheGroup::owners
  bool sparse = false;          // of a linear: its weight is in sparse32
  Activation activation = Activation::silu;
  LinearActivation linear_activation = LinearActivation::none;
  ReduceKind reduce = ReduceKind::sum;
  PoolKind pool = PoolKind::mean;
  bool causal = true;                  // of attention without a cache
  KvFormat kv_format = KvFormat::f32;  // the same
  ElementwiseFn fn = ElementwiseFn::add;
};

struct Step {
  const Op* op = nullptr;
  std::vector<Operand> inputs, outputs;
  Attributes attributes;
  std::string op_name, where;
};

struct Weight {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<int64_t> shape;
  WeightLayout layout = WeightLayout::rows;
  const void* data = nullptr;  // 64-byte aligned; owned by the caller, who keeps it alive

  // Panels round N up, and K too where they interleave. Throws std::invalid_argument if it overflows.
  int64_t elements() const;
  // As stored: of sparse ones half the elements, and 4 bits for every four.
  int64_t bytes() const {
    const int64_t count = elements();
    const bool sparse = layout == WeightLayout::sparse32;
    const int64_t bits = few_bits(dtype) > 0 ? few_bits(dtype) : 8 * element_bytes(dtype);
    return (sparse ? count / 2 : count) * bits / 8 + (sparse ? count / 8 : 0);
  }
};

struct Buffer {
  std::string name;
  Affine size, offset;  // bytes
  int region = 0;       // of the exchange with other ranks; 0: in the arena
};

inline constexpr int64_t kMostOwners = 64;  // ranks that a cache is divided among

struct CacheGroup : KvShape {
  std::string name;
  std::vector<int> layers;
  int64_t attention_window = -1;  // widest window of the group's attention steps; 0 full, -1 no attention yet
  int64_t first_tokens = 0;  // at the beginning of a request, which these steps read besides their window
  // Ranks that the blocks are divided among, of whom each has those with block % owners == rank; all blocks
  // of a split of 512 keys have one owner. 0: no step has said yet.
  int64_t owners = 0;
  int64_t block_tokens = kBlock;  // of a state: those of the longest sequence
};

struct CacheLayer {
  int group = 0;
  int layer = 0;
};

// A value that a step gives besides its logits: an output of one of its steps, [T, width], [R, width] or
// [B, width], whose rows, of the last one all, are taken as soon as they are there.
struct Tap {
  std::string name;
  size_t step = 0;  // behind which they are taken; as many as there are steps: at the end
  Operand operand;
};

// All add_ functions throw std::invalid_argument that names the thing and what is wrong with it. Add groups,
// then ports, weights and buffers before the steps that use them.
class Program {
 public:
  int add_cache_group(CacheGroup group, int64_t block_size);
  int add_port(Port port);
  int add_weight(Weight weight, int64_t bytes);
  int add_buffer(Buffer buffer);
  void set_arena(Affine bytes);
  void set_region(int region, Affine bytes);  // of the exchange, what buffers need there
  void set_ranks(RankGroup group);            // who computes these steps together; this rank is one of them
  void add_step(const std::string& op, std::vector<Operand> inputs, std::vector<Operand> outputs,
                const AttributeMap& attributes, const std::string& where);
  void set_logits(Operand logits);                                    // [R, V]
  void add_tap(const std::string& name, size_t step, size_t output);  // after its step
  void add_output(const std::string& name, Operand operand);          // after all steps
  void finish();  // throws if it gives nothing, as one of several ranks may

  int find_cache(const std::string& group, int layer) const;  // -1 if there is none

  const std::vector<CacheGroup>& groups() const { return groups_; }
  const std::vector<CacheLayer>& caches() const { return caches_; }
  const std::vector<Port>& ports() const { return ports_; }
  const std::vector<Tap>& taps() const { return taps_; }
  const std::vector<Weight>& weights() const { return weights_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }
  const std::vector<Step>& steps() const { return steps_; }
  const Operand& logits() const { return logits_; }
  const Affine& arena_bytes() const { return arena_bytes_; }
  const std::map<int, Affine>& regions() const { return regions_; }
  RankGroup ranks() const { return ranks_; }
  bool of_several_ranks() const { return of_several_ranks_; }  // it has steps in which ranks meet
  int64_t vocab_size() const { return logits_.shape.empty() ? 0 : logits_.shape[1].constant; }
  bool finished() const { return finished_; }
  int find_port(PortCheck check, int group = -1) const;  // -1 if there is none

 private:
  friend class StepVerifier;
  void verify_operand(const Operand& operand, const std::string& subject) const;
  void keep_tap(Tap tap);

  std::vector<CacheGroup> groups_;
  std::vector<CacheLayer> caches_;
  std::vector<Port> ports_;
  std::vector<Tap> taps_;
  std::vector<Weight> weights_;
  std::vector<Buffer> buffers_;
  std::vector<Step> steps_;
  Affine arena_bytes_;
  std::map<int, Affine> regions_;
  RankGroup ranks_;
  bool of_several_ranks_ = false;
  Operand logits_;
  bool finished_ = false;
};

std::string step_title(size_t index, const Step& step);  // "step 3 linear (model.layers.0.mlp)"

}  // namespace ew
