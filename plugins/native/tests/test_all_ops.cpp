// A program with every op and dtype: its results depend neither on the batch nor on threads, and however it
// is changed, it is refused or runs without touching memory that isn't its own (this runs under ASan and
// UBSan).
#include <cmath>
#include <new>
#include <random>
#include <stdexcept>

#include "check.h"
#include "plan_of_all.h"

namespace {

using namespace ew;
using namespace ew::testing;

constexpr int kVocab = static_cast<int>(PlanOfAll::kVocab);

StepData empty_step(int64_t width) {
  StepData step;
  step.width = width;
  step.has_states = true;
  return step;
}

void results_do_not_depend_on_company_or_threads() {
  for (const bool grouped : {false, true}) {
    const PlanOfAll plan(grouped);
    Program program;
    plan.build(&program);
    for (const std::string& isa : available_isas()) {
      Executor alone(program, {16, 16}, 1, isa);
      std::vector<float> expected;
      for (int seed = 0; seed < 3; ++seed) {
        StepData step = empty_step(4);
        step.add(4 * seed, 0, sequence(40 + seed, seed, kVocab));
        const std::vector<float> logits = run(alone, step);
        for (const float value : logits) CHECK(std::isfinite(value)) << isa;
        expected.insert(expected.end(), logits.begin(), logits.end());
      }
      for (const int threads : {1, 2, 4}) {
        Executor executor(program, {16, 16}, threads, isa);
        StepData whole = empty_step(4), most = empty_step(4), rest = empty_step(4), resumed = empty_step(4);
        for (int seed = 0; seed < 3; ++seed) {
          const std::vector<int32_t> ids = sequence(40 + seed, seed, kVocab);
          whole.add(4 * seed, 0, ids);
          most.add(4 * seed, 0, {ids.begin(), ids.end() - 1}, false);
          rest.add(4 * seed, 39 + seed, {ids.end() - 1, ids.end()});
          // The step without last tokens also stores the states after 30 tokens, each in a block of its own.
          const int32_t snapshot = 4 * seed + 1, stored = 30;
          most.state_slots[most.state_slots.size() - ids.size() + 1 + stored - 1] =
              snapshot * static_cast<int32_t>(PlanOfAll::kStateTokens) + stored - 1;
          resumed.add(4 * seed, stored, {ids.begin() + stored, ids.end()});
          resumed.state_table.back() = snapshot;
        }
        CHECK(run(executor, whole) == expected) << isa << " " << threads;
        CHECK(run(executor, most).empty());  // R = 0
        CHECK(run(executor, rest) == expected) << isa << " " << threads;
        CHECK(run(executor, resumed) == expected) << isa << " " << threads;
      }
    }
  }
}

// Changes one thing of a plan, somewhere.
class Mutation {
 public:
  explicit Mutation(unsigned seed) : generator_(seed) {}

  void apply(Plan* plan) {
    switch (pick(12)) {
      case 0:
        return change(&plan->buffers[pick(plan->buffers.size())].size);
      case 1:
        return change(&plan->buffers[pick(plan->buffers.size())].offset);
      case 2:
        return change(&plan->arena);
      case 3:
        return attributes(&plan->steps[pick(plan->steps.size())].attributes);
      case 4:
        std::swap(plan->steps[pick(plan->steps.size())].op, plan->steps[pick(plan->steps.size())].op);
        return;
      case 5: {
        StepPlan& step = plan->steps[pick(plan->steps.size())];
        std::vector<Operand>& list = pick(2) == 0 || step.outputs.empty() ? step.inputs : step.outputs;
        list[pick(list.size())] = any(plan);
        return;
      }
      default:
        return operand(plan, &any(plan));
    }
  }

 private:
  size_t pick(size_t count) { return generator_() % count; }

  Operand& any(Plan* plan) {
    StepPlan& step = plan->steps[pick(plan->steps.size())];
    std::vector<Operand>& list = pick(2) == 0 || step.outputs.empty() ? step.inputs : step.outputs;
    return list[pick(list.size())];
  }

  int64_t number() {
    constexpr int64_t kNumbers[] = {
        -1, 0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 33, 64, 4096, int64_t{1} << 31};
    return kNumbers[pick(std::size(kNumbers))];
  }

  void change(Affine* a) {
    int64_t* const parts[] = {&a->constant, &a->t, &a->b, &a->r};
    int64_t& part = *parts[pick(4)];
    part = pick(3) == 0 ? number() : part + number() - 4;
  }

  void attributes(AttributeMap* attributes) {
    if (attributes->empty()) return;
    auto it = attributes->begin();
    std::advance(it, pick(attributes->size()));
    if (auto* value = std::get_if<int64_t>(&it->second)) {
      *value = number();
    } else if (auto* text = std::get_if<std::string>(&it->second)) {
      constexpr const char* kNames[] = {"add", "lt",   "round", "where", "cast",
                                        "max", "relu", "relu2", "none"};
      *text = kNames[pick(std::size(kNames))];
    } else if (auto* flag = std::get_if<bool>(&it->second)) {
      *flag = !*flag;
    } else {
      attributes->erase(it);
    }
  }

  void operand(Plan* plan, Operand* o) {
    switch (pick(6)) {
      case 0:
        if (!o->shape.empty()) change(&o->shape[pick(o->shape.size())]);
        return;
      case 1:
        if (!o->strides.empty()) change(&o->strides[pick(o->strides.size())]);
        return;
      case 2:
        return change(&o->offset);
      case 3:
        o->dtype = static_cast<Dtype>(pick(7));
        return;
      case 4:
        o->kind = static_cast<OperandKind>(pick(4));
        return;
      default:
        o->index = static_cast<int>(pick(plan->buffers.size()));
    }
  }

  std::mt19937 generator_;
};

void changed_programs_are_refused_or_harmless() {
  const PlanOfAll sound(true);
  StepData step = empty_step(1);
  step.add(0, 0, sequence(3, 1, kVocab));
  step.add(1, 0, sequence(2, 2, kVocab));
  step.state_slots[1] = 2 * static_cast<int32_t>(PlanOfAll::kStateTokens) + 1;  // a snapshot in a third block
  int refused = 0, failed = 0, ran = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    Plan plan = sound;
    Mutation mutation(seed);
    for (unsigned i = 0; i < 1 + seed % 2; ++i) mutation.apply(&plan);
    Program program;
    try {
      plan.build(&program);
    } catch (const std::invalid_argument&) {
      ++refused;
      continue;
    }
    if (program.arena_bytes().at({5, 2, 2}) > (int64_t{1} << 24)) continue;  // sound, but too slow to run
    const std::vector<std::string> isas = available_isas();
    Executor executor(program, {4, 4}, 1, isas[seed % isas.size()]);
    try {
      executor.run(step.arrays());
      ++ran;
    } catch (const std::invalid_argument&) {
      ++failed;
    }
  }
  std::printf("%d refused, %d failed at run, %d ran\n", refused, failed, ran);
  CHECK(refused > 400 && failed > 100 && ran > 100) << refused << " " << failed << " " << ran;
}

// What a step computes is looked at before a kernel follows it.
void computed_indices_are_checked() {
  const auto message = [](const auto& change) {
    PlanOfAll plan(true);
    change(plan);
    Program program;
    plan.build(&program);
    Executor executor(program, {4, 4}, 1, available_isas().back());
    StepData step = empty_step(1);
    step.add(0, 0, sequence(5, 1, kVocab));
    try {
      executor.run(step.arrays());
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("nothing");
  };
  const auto index_of = [](const Plan& plan, const std::string& op) {
    size_t i = 0;
    while (plan.steps[i].op != op) ++i;
    return i;
  };
  const auto says = [](const std::string& text, const std::string& part) {
    CHECK(text.find(part) != std::string::npos) << text;
  };
  CHECK(message([](Plan&) {}) == "nothing");
  // In the place of the indices: those of an elementwise step before, which are out of range.
  const auto spoil = [&](const std::string& op, size_t operand, const std::string& fn, int64_t scalar) {
    return [&, operand, fn, scalar](Plan& plan) {
      const size_t at = index_of(plan, op);
      Operand& indices = plan.steps[at].inputs[operand];
      const Operand before = indices;
      indices = plan.buffer(before.shape, Dtype::i32);
      StepPlan spoiler{"elementwise", {before}, {indices}, {{"fn", fn}, {"scalar", scalar}}};
      plan.steps.insert(plan.steps.begin() + static_cast<int64_t>(at), spoiler);
    };
  };
  says(message(spoil("quantized_embedding", 0, "add", kVocab)), "ids[0] = ");
  says(message(spoil("quantized_embedding", 0, "sub", kVocab)), "is not in [0, 37)");
  says(message(spoil("scatter", 1, "add", 5)), "indices[0] = ");
  says(message(spoil("gather", 1, "sub", 5)), "is not in [0, 5)");
  says(message(spoil("route_experts", 0, "add", 5)), "ids[0] = ");
  says(message(spoil("take_rows", 1, "add", 1)), "rows[");
  says(message(spoil("take_rows", 1, "sub", 1)), "is not in [0, 5)");
  says(message(spoil("grouped_linear", 1, "add", 1)), "starts[5] = 11 is not an ascending start in [0, 10]");
  says(message(spoil("grouped_linear", 1, "sub", 1)), "starts[0] = -1 is not an ascending start in [0, 10]");
  CHECK(message(spoil("grouped_linear", 1, "minimum", 3)) == "nothing");  // rows of experts that others have
  says(message(spoil("quantized_grouped_linear", 3, "mul", -1)), "is not an ascending start in [0, 10]");
  says(message(spoil("combine_experts", 1, "maximum", 4)), "= 4 is there twice");
  says(message(spoil("combine_experts", 1, "add", 1)), "order[");
  // Of one expert a token: then a step input has the shape of an order.
  const auto ordered_by = [](int input) {
    return [input](Plan& plan) {
      const Operand y = plan.buffer({kTokens, constant(4)}), out = plan.buffer({kTokens, constant(4)});
      const Operand factors = plan.buffer({kTokens, constant(1)});
      const StepPlan step{"combine_experts", {y, Plan::input(input, {kTokens}), factors}, {out}, {}};
      plan.steps.insert(plan.steps.begin(), step);
    };
  };
  CHECK(message(ordered_by(kPositions)) == "nothing");
  says(message(ordered_by(kIds)), "order[1] = 8 is not in [0, 5)");
}

// A kernel that follows indices must not find others in their place while it runs.
void indices_and_results_do_not_share_memory() {
  for (const char* op : {"quantized_embedding", "gather", "scatter", "route_experts", "combine_experts"}) {
    PlanOfAll plan(true);
    for (StepPlan& step : plan.steps) {
      if (step.op != op) continue;
      const size_t index = step.op == "quantized_embedding" || step.op == "route_experts" ? 0 : 1;
      step.outputs[0].index = step.inputs[index].index;
    }
    Program program;
    plan.build(&program);
    Executor executor(program, {4, 4}, 1, available_isas().back());
    StepData step = empty_step(1);
    step.add(0, 0, sequence(5, 1, kVocab));
    CHECK_THROWS(executor.run(step.arrays()), std::invalid_argument);
  }
}

}  // namespace

int main() {
  RUN(results_do_not_depend_on_company_or_threads);
  RUN(computed_indices_are_checked);
  RUN(indices_and_results_do_not_share_memory);
  RUN(changed_programs_are_refused_or_harmless);
  return ew::check::result();
}
