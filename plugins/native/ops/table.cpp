// The families' tables as one.
#include "op.h"

namespace ew {
namespace {

#include "op_declarations.h"  // made of runtime/shared/op_schema.py: see CMakeLists.txt

template <class F>
void for_ops(const F& fn) {
  for (const std::span<const Op> family :
       {attention_ops(), collective_ops(), elementwise_ops(), gated_activation_ops(), linear_ops(),
        norm_ops(), packed_ops(), quantize_ops(), recurrence_ops(), routing_ops()}) {
    for (const Op& op : family) fn(op);
  }
}

}  // namespace

const Op* find_op(const std::string& name) {
  const Op* found = nullptr;
  for_ops([&](const Op& op) {
    if (name == op.name) found = &op;
  });
  return found;
}

const OpDeclaration* find_declaration(const std::string& name) {
  for (const OpDeclaration& declaration : kDeclarations) {
    if (name == declaration.name) return &declaration;
  }
  return nullptr;
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for_ops([&](const Op& op) { names.emplace_back(op.name); });
  return names;
}

}  // namespace ew
