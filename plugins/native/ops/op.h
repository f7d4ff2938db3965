// The ops of the CPU target: one entry an op, in the table of its family's file. A new op is an entry there;
// a new family is a file here, a line below and one in table.cpp. Its operands, attributes and
// cost are declared in runtime/shared/op_schema.py.
#pragma once

#include <atomic>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "index_check.h"
#include "program.h"

namespace ew {

class Exchange;
class StepResolver;
class StepVerifier;

// What ring_attention counts.
struct RingCounts {
  int64_t rounds = 0;  // of this step
  // By rank, what it has attended to since the program was opened, in (token, split of keys) of a layer.
  // Every rank counts all, and any thread may read them.
  std::atomic<int64_t> pairs[kMostOwners] = {};
};

// The declaration of an op in runtime/shared/op_schema.py; write_declarations.py makes the table.
enum class AttributeKind { number, flag, integer, string };
struct InputDeclaration {
  const char* name;
  const char* when;  // "": always; "?": as other operands ask; else the attribute that says so
};
struct AttributeDeclaration {
  const char* name;
  AttributeKind kind;
  bool needed;
};
struct OpDeclaration {
  const char* name;
  std::span<const InputDeclaration> inputs;
  std::span<const AttributeDeclaration> attributes;
  size_t outputs;
  bool any_number;  // of inputs, and as many outputs
};

// What a step runs with.
struct RunContext {
  const KernelTable& kernels;
  Workers& pool;
  const int32_t* inverse;  // of the permutation that the step's IndexCheck looked at
  Exchange* exchange;      // with the other ranks; null where there are none
  RingCounts* ring;
};
using Call = std::function<void(const RunContext&)>;

template <class Args>
Call call(void (*KernelTable::*kernel)(const Args&, Workers&), const Args& args) {
  return [kernel, args](const RunContext& run) { (run.kernels.*kernel)(args, run.pool); };
}

// The input that holds indices which the kernel follows, and what they must be.
struct Indices {
  int input = -1;         // none
  const char* name = "";  // for messages
  IndexRule rule = IndexRule::range;
  int64_t (*limit)(const StepResolver&) = nullptr;
  bool checked_with_inputs = false;  // if it is a step input: by Executor::check
};

struct Op {
  const char* name = "";
  // What the op asks of operands and attributes besides its declaration, whatever the sizes of a step; sets
  // the step's attributes.
  void (*verify)(StepVerifier&) = nullptr;
  // The kernel with its arguments, for one set of sizes.
  Call (*bind)(const StepResolver&) = nullptr;
  Indices indices = {};
  bool in_place = false;          // an output may be the very view of an input
  bool separate_outputs = false;  // outputs may not be slices of one buffer
  bool meets = false;             // ranks wait for each other
  bool padded_rows = true;        // rows of bf16 and i8 are read and written to a multiple of 2 and 4 values
};

std::span<const Op> attention_ops();
std::span<const Op> collective_ops();
std::span<const Op> elementwise_ops();
std::span<const Op> gated_activation_ops();
std::span<const Op> linear_ops();
std::span<const Op> norm_ops();
std::span<const Op> packed_ops();
std::span<const Op> quantize_ops();
std::span<const Op> recurrence_ops();
std::span<const Op> routing_ops();

const Op* find_op(const std::string& name);  // null if there is none
const OpDeclaration* find_declaration(const std::string& name);
std::vector<std::string> op_names();

}  // namespace ew
