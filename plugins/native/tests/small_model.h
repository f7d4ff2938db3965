// A small model with every kind of operand.
#pragma once

#include "plan.h"

namespace ew::testing {

// ids -> embedding -> kv_write, paged_attention -> linear -> add_rms_norm -> take_rows -> logits
struct Model : Plan {
  static constexpr int64_t kHidden = 16, kHeads = 2, kSize = 8, kVocab = 37;

  Program program;

  Model() {
    groups.push_back({{kHeads, kSize, kSize}, "full", {3}});
    const Operand table = weight(Dtype::f32, {kVocab, kHidden}, WeightLayout::rows);
    const Operand project = weight(Dtype::f32, {kHidden, kHidden}, WeightLayout::panel32);
    const Operand head = weight(Dtype::f32, {kVocab, kHidden}, WeightLayout::panel32);
    const Operand x = tokens(), mixed = tokens(), projected = tokens(), normed = tokens(), sum = tokens();
    const Operand last = buffer({kRows, constant(kHidden)});
    logits = buffer({kRows, constant(kVocab)});
    step("embedding", {input(kIds, {kTokens}), table}, {x});
    step("kv_write", {heads(x), heads(x), input(slots_input(0), {kTokens}), cache(0)}, {});
    step("paged_attention",
         {heads(x), cache(0), input(table_input(0), {kRequests, constant(1)}), input(kQStart, {{1, 0, 1, 0}}),
          input(kKvLen, {kRequests})},
         {heads(mixed)}, {{"scale", 0.35}, {"softcap", 0.0}, {"window", int64_t{0}}, {"has_sinks", false}});
    step("linear", {mixed, project}, {projected});
    step("add_rms_norm", {projected, x}, {normed, sum}, {{"eps", 1e-5}, {"has_weight", false}});
    step("take_rows", {normed, input(kRowsInput, {kRows})}, {last});
    step("linear", {last, head}, {logits});
    build(&program);
  }

  Operand tokens() { return buffer({kTokens, constant(kHidden)}); }

  static Operand heads(const Operand& operand) {  // [T, H] as [T, heads, size]
    return view(operand, {kTokens, constant(kHeads), constant(kSize)});
  }

  Operand late() {  // a buffer that is added to the built program
    const Operand operand = tokens();
    program.add_buffer(buffers.back());
    return operand;
  }
};

}  // namespace ew::testing
