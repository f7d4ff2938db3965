// Small programs for the interpreter's tests: what executable.py would read from a file, made by hand, and
// the inputs of a step.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "executor.h"

namespace ew::testing {

inline Affine constant(int64_t value) { return {value}; }
inline Affine times(const Affine& a, int64_t factor) {
  return {a.constant * factor, a.t * factor, a.b * factor, a.r * factor};
}

inline std::vector<Affine> dense(const std::vector<Affine>& shape) {
  std::vector<Affine> strides(shape.size(), constant(1));
  for (size_t i = shape.size() - 1; i-- > 0;)
    strides[i] = constant(strides[i + 1].constant * shape[i + 1].constant);
  return strides;
}

// The arrays of every step, in the order of step_schema.py: these, then slots and block table of each cache
// group.
enum StepInputIndex : int { kIds, kPositions, kQStart, kKvLen, kRowsInput, kFirstGroup };
inline int slots_input(int group) { return kFirstGroup + 2 * group; }
inline int table_input(int group) { return kFirstGroup + 2 * group + 1; }

inline void add_ports(Program* program) {
  const auto add = [program](const std::string& name, const Affine& size, PortCheck check, int group = -1) {
    program->add_port({name, {size}, Dtype::i32, check, group});
  };
  add("ids", kTokens, PortCheck::index);
  add("positions", kTokens, PortCheck::index);
  add("q_start", {1, 0, 1, 0}, PortCheck::starts);
  add("kv_len", kRequests, PortCheck::lengths);
  add("rows", kRows, PortCheck::row);
  for (size_t g = 0; g < program->groups().size(); ++g) {
    add("slots:" + program->groups()[g].name, kTokens, PortCheck::slots, static_cast<int>(g));
    add("block_table:" + program->groups()[g].name, kRequests, PortCheck::table, static_cast<int>(g));
  }
}

inline std::string numbered(std::string name, size_t number) { return name.append(std::to_string(number)); }

struct StepPlan {
  std::string op;
  std::vector<Operand> inputs, outputs;
  AttributeMap attributes;
};

// A program as data, so that a test can change it before it is built. Buffers lie one behind the other.
struct Plan {
  struct FreeMemory {
    void operator()(void* p) const { std::free(p); }
  };

  std::vector<CacheGroup> groups;
  std::vector<Weight> weights;
  std::vector<std::shared_ptr<void>> memory;  // of the weights
  std::vector<Buffer> buffers;
  std::vector<StepPlan> steps;
  Operand logits;
  Affine arena;

  void build(Program* program) const {
    for (const CacheGroup& group : groups) program->add_cache_group(group, group.block_tokens);
    add_ports(program);
    for (const Weight& weight : weights) program->add_weight(weight, weight.bytes());
    for (const Buffer& buffer : buffers) program->add_buffer(buffer);
    program->set_arena(arena);
    for (const StepPlan& step : steps) {
      program->add_step(step.op, step.inputs, step.outputs, step.attributes, "w");
    }
    program->set_logits(logits);
    program->finish();
  }

  // Of random values around 0; the bytes of int8 and int4 are random, and f16 is from 2^-7 to 2^-5, as scales
  // are.
  Operand weight(Dtype dtype, const std::vector<int64_t>& shape, WeightLayout layout) {
    Weight weight{numbered("w", weights.size()), dtype, shape, layout, nullptr};
    const int64_t count = few_bits(dtype) > 0 ? weight.bytes() : weight.elements();
    void* data = std::aligned_alloc(64, static_cast<size_t>((weight.bytes() + 63) / 64 * 64));
    memory.emplace_back(data, FreeMemory());
    weight.data = data;
    std::mt19937 generator(static_cast<unsigned>(weights.size()));
    std::normal_distribution<float> normal(0, 0.3f);
    for (int64_t i = 0; i < count; ++i) {
      if (dtype == Dtype::f32) {
        static_cast<float*>(data)[i] = normal(generator);
      } else if (dtype == Dtype::bf16) {
        const float value = normal(generator);
        std::memcpy(static_cast<uint16_t*>(data) + i, reinterpret_cast<const char*>(&value) + 2, 2);
      } else if (dtype == Dtype::f16) {
        static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>((8 << 10) + generator() % (2 << 10));
      } else if (element_bytes(dtype) == 1) {
        static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(generator());
      } else {
        static_cast<int32_t*>(data)[i] = static_cast<int32_t>(generator() % 4);
      }
    }
    Operand operand{OperandKind::weight, static_cast<int>(weights.size()), dtype, {}, {}, {}, weight.name};
    for (const int64_t size : shape) operand.shape.push_back(constant(size));
    operand.strides = dense(operand.shape);
    weights.push_back(std::move(weight));
    return operand;
  }

  // Rows of a multiple of 64 bytes at any offset but the first dimension's; a vector has no rows.
  Operand buffer(const std::vector<Affine>& shape, Dtype dtype = Dtype::f32) {
    int64_t row = element_bytes(dtype);
    for (size_t i = 1; i < shape.size(); ++i) row *= shape[i].constant;
    // int8 and bf16 rows have room for what pads them.
    const bool narrow = dtype == Dtype::i8 || dtype == Dtype::bf16;
    if (narrow) row = (row + 3) / 4 * 4;
    Affine size = times(shape[0], row);
    for (int64_t* bytes : {&size.constant, &size.t, &size.b, &size.r}) *bytes = (*bytes + 63) / 64 * 64;
    Operand operand{
        OperandKind::buffer,          static_cast<int>(buffers.size()), dtype, shape, dense(shape), {},
        numbered("b", buffers.size())};
    if (narrow) operand.strides[0] = constant(row / element_bytes(dtype));
    buffers.push_back({operand.name, size, arena});
    arena = {arena.constant + size.constant, arena.t + size.t, arena.b + size.b, arena.r + size.r};
    return operand;
  }

  static Operand input(int index, const std::vector<Affine>& shape) {
    return {OperandKind::input, index, Dtype::i32, shape, dense(shape), {}, "input"};
  }
  static Operand cache(int index) { return {OperandKind::cache, index, Dtype::f32, {}, {}, {}, "cache"}; }

  void step(const std::string& op, std::vector<Operand> inputs, std::vector<Operand> outputs,
            AttributeMap attributes = {}) {
    steps.push_back({op, std::move(inputs), std::move(outputs), std::move(attributes)});
  }
};

// The same memory under another shape.
inline Operand view(Operand operand, const std::vector<Affine>& shape) {
  operand.shape = shape;
  operand.strides = dense(shape);
  return operand;
}

// One step's arrays; request b has its own blocks.
struct StepData {
  std::vector<int32_t> ids, positions, q_start{0}, kv_len, rows, slots, table, state_slots, state_table;
  int64_t width = 4;
  bool has_states = false;  // in a second cache group; a request's state is in its first block there

  void add(int32_t first_block, int32_t past, const std::vector<int32_t>& tokens, bool sample = true) {
    for (int64_t i = 0; i < width; ++i) table.push_back(first_block + static_cast<int32_t>(i));
    state_table.push_back(first_block);
    state_slots.resize(state_slots.size() + tokens.size(), -1);  // no snapshots
    for (size_t i = 0; i < tokens.size(); ++i) {
      const int32_t position = past + static_cast<int32_t>(i);
      ids.push_back(tokens[i]);
      positions.push_back(position);
      slots.push_back(first_block * 32 + position);
    }
    q_start.push_back(static_cast<int32_t>(ids.size()));
    kv_len.push_back(past + static_cast<int32_t>(tokens.size()));
    if (sample) rows.push_back(static_cast<int32_t>(ids.size()) - 1);
  }

  StepArrays arrays() const {
    StepArrays all{{{ids}, {positions}, {q_start}, {kv_len}, {rows}, {slots}, {table, width}}};
    if (has_states) all.ports.insert(all.ports.end(), {{state_slots}, {state_table, 1}});
    return all;
  }
};

inline std::vector<int32_t> sequence(int length, int seed, int vocab) {
  std::vector<int32_t> ids;
  for (int i = 0; i < length; ++i) ids.push_back((seed + 7 * i) % vocab);
  return ids;
}

inline std::vector<float> logits_of(const Executor& executor) {
  std::vector<float> logits;
  for (int64_t r = 0; r < executor.rows(); ++r) {
    const float* row = executor.logits() + r * executor.logits_stride();
    logits.insert(logits.end(), row, row + executor.program().vocab_size());
  }
  return logits;
}

inline std::vector<float> run(Executor& executor, const StepData& step) {
  executor.run(step.arrays());
  return logits_of(executor);
}

}  // namespace ew::testing
