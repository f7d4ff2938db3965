// Program, resolver and executor: a small model with every kind of operand, in changing sizes and on several
// threads, and what must be refused. Numbers are tested against numpy in tests/plugins/native; this runs
// under ASan, UBSan and TSan.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "executor.h"
#include "small_model.h"

namespace {

using namespace ew;
using namespace ew::testing;

std::vector<int32_t> sequence(int length, int seed) {
  return ew::testing::sequence(length, seed, static_cast<int>(Model::kVocab));
}

void results_do_not_depend_on_company_or_threads() {
  const Model model;
  for (const std::string& isa : available_isas()) {
    Executor alone(model.program, {16}, 1, isa);
    std::vector<float> expected;
    for (int seed = 0; seed < 3; ++seed) {
      StepData step;
      step.add(4 * seed, 0, sequence(40 + seed, seed));
      const std::vector<float> logits = run(alone, step);
      for (const float value : logits) CHECK(std::isfinite(value)) << isa;
      expected.insert(expected.end(), logits.begin(), logits.end());
    }
    for (const int threads : {1, 2, 4}) {
      Executor executor(model.program, {16}, threads, isa);
      StepData whole;
      for (int seed = 0; seed < 3; ++seed) whole.add(4 * seed, 0, sequence(40 + seed, seed));
      CHECK(run(executor, whole) == expected) << isa << " " << threads;
      StepData most, rest;
      for (int seed = 0; seed < 3; ++seed) {
        const std::vector<int32_t> ids = sequence(40 + seed, seed);
        most.add(4 * seed, 0, {ids.begin(), ids.end() - 1}, false);
        rest.add(4 * seed, 39 + seed, {ids.end() - 1, ids.end()});
      }
      CHECK(run(executor, most).empty());  // R = 0
      CHECK(run(executor, rest) == expected) << isa << " " << threads;
    }
  }
}

void sizes_change_all_the_time() {
  const Model model;
  const std::string isa = available_isas()[0];
  Executor executor(model.program, {32}, 2, isa);
  for (int round = 0; round < 3; ++round) {
    for (int length = 1; length < 50; length += 3) {
      StepData step;
      step.width = 2 + length % 3;
      step.add(0, 0, sequence(length, 1));
      step.add(8, 0, sequence(length / 2 + 1, 2));
      Executor fresh(model.program, {32}, 1, isa);
      CHECK(run(executor, step) == run(fresh, step)) << length;
    }
  }
}

void options_watch_and_time() {
  const Model model;
  Executor executor(model.program, {16}, 2, "portable");
  StepData step;
  step.add(0, 0, {1, 2, 3});
  std::vector<double> seconds;
  std::vector<size_t> seen;
  std::vector<Place> written;
  executor.run(step.arrays(), {&seconds, [&](size_t index, bool before) {
                                 seen.push_back(2 * index + !before);
                                 if (index == 4 && !before) written = executor.places(index, false);
                               }});
  CHECK(seconds.size() == model.program.steps().size() && seconds[0] > 0);
  CHECK(seen.size() == 2 * seconds.size() && std::is_sorted(seen.begin(), seen.end()));
  CHECK(written.size() == 2 && written[1].shape == (std::vector<int64_t>{3, Model::kHidden}));
  CHECK(written[0].bytes == 3 * Model::kHidden * static_cast<int64_t>(sizeof(float)));
  int32_t token = -1;
  const RowSampling greedy;
  executor.sample(&greedy, {.tokens = &token});
  const std::vector<float> logits = logits_of(executor);
  CHECK(token == std::max_element(logits.begin(), logits.end()) - logits.begin());
}

void executors_run_at_the_same_time() {
  const Model model;
  StepData step;
  step.add(0, 0, sequence(30, 3));
  std::vector<float> results[2];
  {
    std::vector<std::thread> threads;
    for (std::vector<float>& result : results) {
      threads.emplace_back([&] {
        Executor executor(model.program, {4}, 2, "portable");
        for (int i = 0; i < 10; ++i) result = run(executor, step);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(!results[0].empty() && results[0] == results[1]);
}

template <class Change>
void refused(Executor& executor, const char* what, const Change& change) {
  StepData step;
  step.add(0, 31, {1, 2, 3});
  step.add(8, 0, {4});
  change(step);
  bool thrown = false;
  try {
    executor.run(step.arrays());
  } catch (const std::invalid_argument& e) {
    thrown = std::string(e.what()).find(what) != std::string::npos;
    CHECK(thrown) << e.what();
  }
  CHECK(thrown) << what;
}

void bad_steps_are_refused() {
  const Model model;
  Executor executor(model.program, {16}, 1, "portable");
  refused(executor, "ids[1]", [](StepData& s) { s.ids[1] = Model::kVocab; });
  refused(executor, "ids[0]", [](StepData& s) { s.ids[0] = -1; });
  refused(executor, "positions[0]", [](StepData& s) { s.positions[0] = -1; });
  refused(executor, "rows[1]", [](StepData& s) { s.rows[1] = 4; });
  refused(executor, "slots:full[2]", [](StepData& s) { s.slots[2] = 16 * 32; });
  refused(executor, "is not where block_table:full has it", [](StepData& s) { ++s.slots[0]; });
  refused(executor, "block_table:full[0, 1]", [](StepData& s) { s.table[1] = 16; });
  refused(executor, "block_table:full[0, 0]", [](StepData& s) { s.table[0] = INT32_MIN; });
  refused(executor, "too few for kv_len[0]", [](StepData& s) { s.kv_len[0] = INT32_MAX; });
  refused(executor, "kv_len[1]", [](StepData& s) { s.kv_len[1] = -1; });
  refused(executor, "q_start[2]", [](StepData& s) { s.q_start[1] = INT32_MAX; });
  refused(executor, "q_start[1]", [](StepData& s) { s.q_start[1] = INT32_MIN; });
  refused(executor, "q_start[0]", [](StepData& s) { s.q_start[0] = -1; });
  refused(executor, "q_start ends", [](StepData& s) { s.q_start[2] = 5; });
  refused(executor, "q_start has", [](StepData& s) { s.q_start.pop_back(); });
  refused(executor, "positions has", [](StepData& s) { s.positions.push_back(0); });
  refused(executor, "block_table:full has", [](StepData& s) { s.table.pop_back(); });
  refused(executor, "slots:full has", [](StepData& s) { s.slots.pop_back(); });
  refused(executor, "ids has 0", [](StepData& s) { s = StepData(); });
  StepData step;
  step.add(0, 0, {1});
  CHECK(run(executor, step).size() == Model::kVocab);
}

void bad_programs_are_refused() {
  const auto add = [](const std::string& op, auto inputs, auto outputs, const AttributeMap& attributes) {
    Model model;
    const Operand x = model.late();
    CHECK_THROWS(model.program.add_step(op, inputs(model, x), outputs(model, x), attributes, "w"),
                 std::invalid_argument);
  };
  using Operands = std::vector<Operand>;
  const auto same = [](Model&, const Operand& x) { return Operands{x}; };
  const auto none = [](Model&, const Operand&) { return Operands{}; };
  add("nothing", same, same, {});
  add("copy", none, same, {});
  add("copy", same, none, {});
  add("copy", same, same, {{"x", true}});
  add("copy",
      [](Model&, Operand x) {
        x.index = 99;
        return Operands{x};
      },
      same, {});
  add("copy",
      [](Model&, Operand x) {
        x.index = -1;
        return Operands{x};
      },
      same, {});
  add("copy",
      [](Model&, Operand x) {
        x.strides.pop_back();
        return Operands{x};
      },
      same, {});
  add("copy",
      [](Model&, Operand x) {
        x.shape.clear();
        x.strides.clear();
        return Operands{x};
      },
      same, {});
  add("copy",
      [](Model&, Operand x) {
        x.strides[0].t = INT64_MAX;
        return Operands{x};
      },
      same, {});
  add("copy", [](Model& m, const Operand&) { return Operands{m.cache(0)}; }, same, {});
  add("reduce", same, same, {{"kind", std::string("sum")}});
  CHECK_THROWS(Program().finish(), std::invalid_argument);
  const std::vector<std::vector<int64_t>> shapes = {{INT64_MAX, 1}, {1, INT64_MAX}, {1 << 21, 1 << 21}};
  for (const std::vector<int64_t>& shape : shapes) {
    const Weight large{"large", Dtype::i8, shape, WeightLayout::panel32x4, nullptr};
    CHECK_THROWS(Program().add_weight(large, 0), std::invalid_argument);
    const Weight larger{"larger", Dtype::i4, shape, WeightLayout::panel32x8, nullptr};
    CHECK_THROWS(Program().add_weight(larger, 0), std::invalid_argument);
  }
  CHECK_THROWS(Executor(Program(), {}, 1, "portable"), std::invalid_argument);
  CHECK_THROWS(Model().program.add_cache_group({{1, 1, 1}, "late", {0}}, kBlock), std::invalid_argument);
  const Model model;
  CHECK_THROWS(Executor(model.program, {0}, 1, "portable"), std::invalid_argument);
  CHECK_THROWS(Executor(model.program, {}, 1, "portable"), std::invalid_argument);
  CHECK_THROWS(Executor(model.program, {1}, 0, "portable"), std::invalid_argument);
  CHECK_THROWS(Executor(model.program, {1}, 1, "none"), std::invalid_argument);
}

// Strides and offsets that lead out of a buffer, or whose product overflows, must be seen before a kernel
// runs.
void operands_stay_inside_their_buffers() {
  const auto refused_at_run = [](auto change) {
    Model model;
    Operand x = model.late();
    Operand y = model.late();
    change(x, y);
    model.program.add_step("copy", {x}, {y}, {}, "w");
    Executor executor(model.program, {16}, 1, "portable");
    StepData step;
    step.add(0, 0, {1, 2, 3});
    CHECK_THROWS(executor.run(step.arrays()), std::invalid_argument);
  };
  refused_at_run([](Operand&, Operand&) {});  // the buffers were added behind what the arena has
  refused_at_run([](Operand& x, Operand& y) {
    x.index = y.index = 0;
    y.offset = constant(1);
  });
  refused_at_run([](Operand& x, Operand& y) {
    x.index = y.index = 0;
    x.offset = constant(-1);
  });
  refused_at_run([](Operand& x, Operand& y) {
    x.index = y.index = 0;
    x.strides[0] = constant(int64_t{1} << 40);
  });
  refused_at_run([](Operand& x, Operand& y) {
    x.index = y.index = 0;
    x.shape[1] = y.shape[1] = constant(int64_t{1} << 40);
    x.strides[1] = constant(int64_t{1} << 40);
  });
  refused_at_run([](Operand& x, Operand& y) {
    x.index = y.index = 0;
    y.strides[0] = {0, -1, 0, 0};
  });
}

}  // namespace

int main() {
  RUN(results_do_not_depend_on_company_or_threads);
  RUN(sizes_change_all_the_time);
  RUN(options_watch_and_time);
  RUN(executors_run_at_the_same_time);
  RUN(bad_steps_are_refused);
  RUN(bad_programs_are_refused);
  RUN(operands_stay_inside_their_buffers);
  return ew::check::result();
}
