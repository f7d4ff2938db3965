// A program with every op and dtype that the interpreter has: attention and recurrences, then experts in
// bf16, int8 and int4 behind a router, with heads in bf16, int8 and int4.
#pragma once

#include "plan.h"

namespace ew::testing {

class PlanOfAll : public Plan {
 public:
  static constexpr int64_t kVocab = 37, kHidden = 18, kHeads = 3, kSize = 6, kExperts = 5, kChoices = 2,
                           kWide = 13, kPart = 16,  // as many of kHidden as make two groups of 8
      kTaps = 4, kTile = 16, kStateTokens = 128;

  // Activations of the int8 head are in groups of 8 (`grouped`) or not.
  explicit PlanOfAll(bool grouped) {
    groups.push_back({{kHeads, kSize, kSize}, "full", {0, 1}});
    groups.push_back({{1, 1, 1}, "state", {0}});
    groups.back().block_tokens = kStateTokens;
    const Operand x = embed();
    const Operand attended = attend_fused(attend(x));
    const Operand mixed = mix(recur(attended));
    head(mixed, grouped);
  }

 private:
  struct Quantized {
    Operand values, scales, sums;
  };
  Quantized quantized(const Affine& rows, int64_t width, int64_t group) {
    const int64_t count = group > 0 ? (width + group - 1) / group : 1;
    return {buffer({rows, constant(width)}, Dtype::i8), buffer({rows, constant(count)}),
            buffer({rows, constant(count)}, Dtype::i32)};
  }

  static Affine places() { return times(kTokens, kChoices); }

  Operand embed() {
    const Operand x = buffer({kTokens, constant(kHidden)}), y = buffer({kTokens, constant(kHidden)});
    const Operand sum = buffer({kTokens, constant(kHidden)});
    step("embedding",
         {input(kIds, {kTokens}), weight(Dtype::bf16, {kVocab, kHidden}, WeightLayout::panel32x2)}, {x});
    const Operand shifted = buffer({kTokens}, Dtype::i32);
    step("elementwise", {input(kIds, {kTokens})}, {shifted},
         {{"fn", std::string("minimum")}, {"scalar", int64_t{kVocab - 2}}});
    step("quantized_embedding",
         {shifted, weight(Dtype::i8, {kVocab, kHidden}, WeightLayout::panel32x4),
          weight(Dtype::f16, {kVocab, 3}, WeightLayout::panel32)},
         {y}, {{"group_size", int64_t{8}}});
    step("elementwise", {x, y}, {sum}, {{"fn", std::string("add")}});
    const Operand z = buffer({kTokens, constant(kPart)});
    step("quantized_embedding",
         {shifted, weight(Dtype::u4, {kVocab, kPart}, WeightLayout::panel32x8),
          weight(Dtype::f16, {kVocab, 2}, WeightLayout::panel32),
          weight(Dtype::f16, {kVocab, 2}, WeightLayout::panel32)},
         {z}, {{"group_size", int64_t{8}}, {"has_offsets", true}});
    step("elementwise", {part(sum), z}, {part(sum)}, {{"fn", std::string("add")}});
    return sum;
  }

  Operand attend(const Operand& x) {
    const std::vector<Affine> heads = {kTokens, constant(kHeads), constant(kSize)};
    const Operand out = buffer(heads), rotated = buffer(heads), table = buffer({kTokens, constant(4)});
    const Operand sinks = weight(Dtype::f32, {kHeads}, WeightLayout::rows);
    const Operand slopes = weight(Dtype::f32, {kHeads}, WeightLayout::rows);
    step("rope_table", {input(kPositions, {kTokens}), weight(Dtype::f32, {2}, WeightLayout::rows)}, {table},
         {{"scale", 1.0}});
    step("rope", {view(x, heads), table}, {rotated}, {{"interleaved", false}});
    step("kv_write", {rotated, view(x, heads), input(slots_input(0), {kTokens}), cache(0)}, {});
    step("paged_attention",
         {rotated, cache(0), input(table_input(0), {kRequests, constant(1)}), input(kQStart, {{1, 0, 1, 0}}),
          input(kKvLen, {kRequests}), sinks, slopes},
         {out},
         {{"scale", 0.4},
          {"softcap", 3.0},
          {"window", int64_t{20}},
          {"has_sinks", true},
          {"has_slopes", true}});
    const Operand normed = buffer({kTokens, constant(kHidden)}), sum = buffer({kTokens, constant(kHidden)});
    step("add_layer_norm", {view(out, {kTokens, constant(kHidden)}), x}, {normed, sum},
         {{"eps", 1e-5}, {"has_weight", false}, {"has_bias", false}});
    return normed;
  }

  // The same with fused steps, and what lies around it in a layer of 8 bits.
  Operand attend_fused(const Operand& x) {
    const std::vector<Affine> heads = {kTokens, constant(kHeads), constant(kSize)};
    const Operand out = buffer(heads), rotated = buffer(heads), table = buffer({kTokens, constant(4)});
    step("rope_table", {input(kPositions, {kTokens}), weight(Dtype::f32, {2}, WeightLayout::rows)}, {table},
         {{"scale", 0.9}});
    step("rope_kv_write",
         {view(x, heads), view(x, heads), view(x, heads), table, input(slots_input(0), {kTokens}), cache(1)},
         {rotated}, {{"interleaved", true}});
    step("paged_attention",
         {rotated, cache(1), input(table_input(0), {kRequests, constant(1)}), input(kQStart, {{1, 0, 1, 0}}),
          input(kKvLen, {kRequests})},
         {out}, {{"scale", 0.4}, {"softcap", 0.0}, {"window", int64_t{0}}, {"has_sinks", false}});
    const Operand sum = buffer({kTokens, constant(kHidden)}), y = buffer({kTokens, constant(kHidden)});
    const Quantized normed = quantized(kTokens, kHidden, 8);
    step("add_rms_norm_quantize",
         {view(out, {kTokens, constant(kHidden)}), x, weight(Dtype::f32, {kHidden}, WeightLayout::rows)},
         {normed.values, normed.scales, normed.sums, sum},
         {{"eps", 1e-5}, {"has_weight", true}, {"group_size", int64_t{8}}});
    multiply(normed, kHidden, y, {});
    const Quantized gated = quantized(kTokens, kHidden / 2, 8);
    const Operand floats = buffer({kTokens, constant(kHidden / 2)});
    step("gated_activation", {y}, {floats}, {{"kind", std::string("gelu")}});
    step("quantize_activation", {floats}, {gated.values, gated.scales, gated.sums},
         {{"group_size", int64_t{8}}});
    multiply(gated, kHidden / 2, sum, {{"has_residual", true}});
    const Quantized last = quantized(kTokens, kHidden, 8);
    step("layer_norm_quantize", {sum}, {last.values, last.scales, last.sums},
         {{"eps", 1e-5}, {"has_weight", false}, {"has_bias", false}, {"group_size", int64_t{8}}});
    multiply(last, kHidden, y, {});
    return y;
  }

  // Every recurrence, with both forms of a scan's rates and of a delta rule's decay.
  Operand recur(const Operand& x) {
    const std::vector<Affine> hidden = {kTokens, constant(kHidden)};
    const std::vector<Affine> heads = {kTokens, constant(kHeads), constant(kSize)};
    Operand y = buffer(hidden);
    recurrence("stored_convolution",
               {x, weight(Dtype::f32, {kHidden, kTaps}, WeightLayout::rows),
                weight(Dtype::f32, {kHidden}, WeightLayout::rows)},
               y, (kTaps - 1) * kHidden, {{"activation", std::string("silu")}, {"has_bias", true}});
    for (const bool of_rows : {false, true}) {
      const Operand scanned = buffer(heads), ruled = buffer(heads), normed = buffer(hidden),
                    sum = buffer(hidden);
      const Operand step_sizes = gates(y, kHeads), opened = gates(y, of_rows ? kHidden : kHeads);
      const Operand decay = buffer(opened.shape);
      std::vector<int64_t> rates = {kHeads};
      if (of_rows) rates.push_back(kSize);
      recurrence("stored_scan",
                 {view(y, heads), step_sizes, weight(Dtype::f32, rates, WeightLayout::rows), view(x, heads),
                  view(y, heads)},
                 scanned, 2 * kTile * kSize, {});
      step("elementwise", {opened}, {decay}, {{"fn", std::string("mul")}, {"scalar", -1.0}});
      recurrence("stored_delta_rule",
                 {view(x, heads), view(y, heads), scanned, of_rows ? view(decay, heads) : decay, step_sizes},
                 ruled, kHeads * kTile * kSize, {{"scale", 0.5}, {"normalize", !of_rows}});
      step("add_layer_norm", {view(ruled, hidden), y}, {normed, sum},
           {{"eps", 1e-5}, {"has_weight", false}, {"has_bias", false}});
      y = normed;
    }
    return y;
  }

  // A step with a state of `size` values, behind those of the steps before.
  void recurrence(const std::string& op, std::vector<Operand> inputs, const Operand& out, int64_t size,
                  AttributeMap attributes) {
    CacheGroup& states = groups.back();
    attributes.insert({{"first", states.state_size}});
    states.state_size += (size + kTile - 1) / kTile * kTile;
    inputs.insert(inputs.end(),
                  {cache(2), input(table_input(1), {kRequests, constant(1)}), input(kQStart, {{1, 0, 1, 0}}),
                   input(kKvLen, {kRequests}), input(slots_input(1), {kTokens})});
    step(op, std::move(inputs), {out}, std::move(attributes));
  }

  // Numbers between 0 and 1, [T, count].
  Operand gates(const Operand& x, int64_t count) {
    const Operand y = buffer({kTokens, constant(count)});
    step("linear", {x, weight(Dtype::f32, {count, kHidden}, WeightLayout::panel32)}, {y},
         {{"activation", std::string("sigmoid")}});
    return y;
  }

  // Rows of 8-bit values times a weight, over y if that is a residual too.
  void multiply(const Quantized& x, int64_t width, const Operand& y, AttributeMap attributes) {
    std::vector<Operand> inputs = {x.values, x.scales, x.sums,
                                   weight(Dtype::i8, {kHidden, width}, WeightLayout::panel32x4),
                                   weight(Dtype::f16, {kHidden, (width + 7) / 8}, WeightLayout::panel32)};
    if (!attributes.empty()) inputs.push_back(y);
    attributes.insert({{"weight_group", int64_t{8}}, {"activation_group", int64_t{8}}});
    step("quantized_linear", inputs, {y}, attributes);
  }

  // The router's choice, in all the ways that routers have, and the experts that it chose.
  Operand mix(const Operand& x) {
    const Operand scores = buffer({kTokens, constant(kExperts)}), best = buffer({kTokens, constant(1)});
    const Operand first = buffer({kTokens, constant(1)}, Dtype::i32);
    const Operand rest = buffer({kTokens, constant(kExperts)}),
                  chosen = buffer({kTokens, constant(kChoices)});
    const Operand ids = buffer({kTokens, constant(kChoices)}, Dtype::i32);
    const Operand above = buffer({kTokens, constant(kChoices)}),
                  factors = buffer({kTokens, constant(kChoices)});
    step("linear",
         {x, weight(Dtype::f32, {kExperts, kHidden}, WeightLayout::panel32),
          weight(Dtype::f32, {kExperts}, WeightLayout::rows)},
         {scores});
    step("top_k", {scores}, {best, first}, {{"k", int64_t{1}}});
    step("scatter", {scores, first}, {rest}, {{"value", -1e30}});
    step("top_k", {rest}, {chosen, ids}, {{"k", int64_t{kChoices}}});
    step("gather", {scores, ids}, {chosen});
    step("elementwise", {chosen}, {above}, {{"fn", std::string("gt")}, {"scalar", 0.1}});
    step("elementwise", {above, chosen, best}, {factors}, {{"fn", std::string("where")}});

    const Operand order = buffer({places()}, Dtype::i32), rows = buffer({places()}, Dtype::i32);
    const Operand starts = buffer({constant(kExperts + 1)}, Dtype::i32);
    const Operand taken = buffer({places(), constant(kHidden)});
    const Operand narrow = buffer({places(), constant(kHidden)}, Dtype::bf16);
    const Operand up = buffer({places(), constant(2 * kWide)}), acted = buffer({places(), constant(kWide)});
    const Operand down = buffer({places(), constant(kHidden)}), out = buffer({kTokens, constant(kHidden)});
    step("route_experts", {ids}, {order, rows, starts}, {{"experts", int64_t{kExperts}}});
    step("take_rows", {x, rows}, {taken});
    step("cast_bf16", {taken}, {narrow});
    step("grouped_linear",
         {narrow, starts, weight(Dtype::bf16, {kExperts, 2 * kWide, kHidden}, WeightLayout::panel32x2),
          weight(Dtype::f32, {kExperts, 2 * kWide}, WeightLayout::rows)},
         {up});
    step("gated_activation", {up}, {acted}, {{"kind", std::string("silu")}});
    const auto [values, scales, sums] = quantize(acted, places(), kWide, 8);
    step(
        "quantized_grouped_linear",
        {values, scales, sums, starts, weight(Dtype::i8, {kExperts, kHidden, kWide}, WeightLayout::panel32x4),
         weight(Dtype::f16, {kExperts, kHidden, 2}, WeightLayout::panel32)},
        {down}, {{"weight_group", int64_t{8}}, {"activation_group", int64_t{8}}});
    const Operand more = buffer({places(), constant(kHidden)}), all = buffer({places(), constant(kHidden)});
    step("grouped_linear",
         {taken, starts, weight(Dtype::f32, {kExperts, kHidden, kHidden}, WeightLayout::panel32)}, {more});
    step("elementwise", {down, more}, {all}, {{"fn", std::string("add")}});
    const auto [some, some_scales, some_sums] = quantize(part(taken), places(), kPart, 8);
    step("quantized_grouped_linear",
         {some, some_scales, some_sums, starts,
          weight(Dtype::i4, {kExperts, kHidden, kPart}, WeightLayout::panel32x8),
          weight(Dtype::f16, {kExperts, kHidden, 2}, WeightLayout::panel32),
          weight(Dtype::f32, {kExperts, kHidden}, WeightLayout::rows)},
         {down}, {{"weight_group", int64_t{8}}, {"activation_group", int64_t{8}}});
    step("elementwise", {down, all}, {all}, {{"fn", std::string("add")}});
    step("combine_experts", {all, order, factors}, {out});
    return out;
  }

  // The first columns of x.
  static Operand part(Operand x) {
    x.shape[1] = constant(kPart);
    return x;
  }

  Quantized quantize(const Operand& x, const Affine& rows, int64_t width, int64_t group) {
    const Quantized q = quantized(rows, width, group);
    step("quantize_activation", {x}, {q.values, q.scales, q.sums}, {{"group_size", group}});
    return q;
  }

  void head(const Operand& x, bool grouped) {
    const Operand last = buffer({kRows, constant(kHidden)}),
                  narrow = buffer({kRows, constant(kHidden)}, Dtype::bf16);
    const Operand mean = buffer({kRows, constant(1)}), first = buffer({kRows, constant(kVocab)});
    const Operand second = buffer({kRows, constant(kVocab)});
    step("take_rows", {x, input(kRowsInput, {kRows})}, {last});
    step("reduce", {last}, {mean}, {{"kind", std::string("mean")}});
    step("cast_bf16", {last}, {narrow});
    step("linear", {narrow, weight(Dtype::bf16, {kVocab, kHidden}, WeightLayout::panel32x2)}, {first},
         {{"activation", std::string("tanh")}});
    const int64_t group = grouped ? 8 : 0;
    const auto [values, scales, sums] = quantize(last, kRows, kHidden, group);
    step("quantized_linear",
         {values, scales, sums, weight(Dtype::i8, {kVocab, kHidden}, WeightLayout::panel32x4),
          weight(Dtype::f16, {kVocab, 3}, WeightLayout::panel32),
          weight(Dtype::f32, {kVocab}, WeightLayout::rows), first},
         {first},  // over its residual
         {{"weight_group", int64_t{8}},
          {"activation_group", group},
          {"has_bias", true},
          {"has_residual", true},
          {"activation", std::string("gelu")}});
    const auto [some, some_scales, some_sums] = quantize(part(last), kRows, kPart, 8);
    step("quantized_linear",
         {some, some_scales, some_sums, weight(Dtype::u4, {kVocab, kPart}, WeightLayout::panel32x8),
          weight(Dtype::f16, {kVocab, 2}, WeightLayout::panel32),
          weight(Dtype::f16, {kVocab, 2}, WeightLayout::panel32),
          weight(Dtype::f32, {kVocab}, WeightLayout::rows), first},
         {first},
         {{"weight_group", int64_t{8}},
          {"activation_group", int64_t{8}},
          {"has_offsets", true},
          {"has_residual", true}});
    Operand repeated = mean;
    repeated.shape[1] = constant(kVocab);
    repeated.strides[1] = constant(0);
    step("copy", {repeated}, {second});
    logits = buffer({kRows, constant(kVocab)});
    step("elementwise", {second, first}, {logits}, {{"fn", std::string("sub")}});
  }
};

}  // namespace ew::testing
