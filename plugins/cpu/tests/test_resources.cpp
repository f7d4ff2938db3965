// Programs that share caches, arena and threads: one of any size, and others for steps of one size each.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "small_model.h"

namespace {

using namespace ew;
using namespace ew::testing;

std::vector<int32_t> sequence(int length, int seed) {
  return ew::testing::sequence(length, seed, static_cast<int>(Model::kVocab));
}

std::shared_ptr<Resources> resources_of(const Model& model, int threads, const std::string& isa) {
  return std::make_shared<Resources>(model.program, std::vector<int64_t>{16}, threads, isa);
}

StepData prompts(std::initializer_list<int> lengths) {
  StepData step;
  int seed = 0;
  for (const int length : lengths) {
    step.add(4 * seed, 0, sequence(length, seed));
    ++seed;
  }
  return step;
}

StepData decodes(std::initializer_list<int> past) {
  StepData step;
  int seed = 0;
  for (const int length : past) {
    step.add(4 * seed, length, {seed + 5});
    ++seed;
  }
  return step;
}

// What one writes to the caches the others read: the bits are those of the program of any size alone.
void programs_share_caches() {
  const Model any;
  const Model prompt(any, {72, 2, 2}), two(any, {2, 2, 2}), one(any, {1, 1, 1});
  for (const std::string& isa : available_isas()) {
    for (const int threads : {1, 3}) {
      const auto shared = resources_of(any, threads, isa);
      Executor dynamic(any.program, shared), first(prompt.program, shared), second(two.program, shared),
          third(one.program, shared);
      Executor alone(any.program, {16}, 1, isa);
      const auto same = [&](Executor& executor, const StepData& step) {
        CHECK(run(executor, step) == run(alone, step)) << isa << " " << threads;
      };
      same(first, prompts({40, 32}));
      same(second, decodes({40, 32}));
      same(third, decodes({41}));
      same(dynamic, prompts({3, 50, 20}));  // its arena is larger, and elsewhere
      same(second, decodes({3, 50}));
      same(first, prompts({71, 1}));
      same(dynamic, decodes({71, 1, 20}));
      same(third, decodes({72}));
    }
  }
}

void the_largest_arena_is_everybodys() {
  const Model any;
  const Model large(any, {200, 3, 3}), small(any, {2, 2, 2});
  const int64_t bytes = large.program.arena_bytes().constant;
  CHECK(small.program.arena_bytes().constant < bytes);
  const auto shared = resources_of(any, 1, "portable");
  Executor dynamic(any.program, shared);
  CHECK(shared->arena_bytes() == 0);
  Executor first(large.program, shared), second(small.program, shared);
  CHECK(shared->arena_bytes() == bytes);
  const void* const arena = shared->arena().data();
  const StepData step = prompts({100, 60, 40});
  const std::vector<float> expected = run(first, step);
  run(second, decodes({100, 60}));
  run(dynamic, decodes({101, 61, 40}));
  CHECK(shared->arena().data() == arena && shared->arena_bytes() == bytes);
  CHECK(run(first, step) == expected);
}

void resources_live_as_long_as_the_last_executor() {
  const Model any, fixed(any, {1, 1, 1});
  std::unique_ptr<Executor> last;
  std::vector<float> expected;
  {
    const auto shared = resources_of(any, 2, "portable");
    Executor first(any.program, shared);
    last = std::make_unique<Executor>(fixed.program, shared);
    run(first, prompts({40}));
    expected = run(first, decodes({40}));
    CHECK(shared.use_count() == 3);
  }
  CHECK(last->resources().use_count() == 1);
  CHECK(run(*last, decodes({40})) == expected);
}

void other_sizes_and_other_caches_are_refused() {
  const Model any, fixed(any, {4, 2, 2});
  const auto shared = resources_of(any, 1, "portable");
  Executor executor(fixed.program, shared);
  const std::vector<float> expected = run(executor, prompts({3, 1}));
  CHECK_THROWS(executor.run(prompts({3, 2}).arrays()), std::invalid_argument);
  CHECK_THROWS(executor.run(decodes({3, 2, 5}).arrays()), std::invalid_argument);
  CHECK(run(executor, prompts({3, 1})) == expected);

  const auto with = [&](const CacheGroup& group) {
    Program program;
    program.add_cache_group(group, kBlock);
    CHECK_THROWS(shared->check(program), std::invalid_argument);
  };
  const CacheGroup& group = any.program.groups()[0];
  shared->check(any.program);
  with({"other", group.layers, group.kv_heads, group.key_size, group.value_size, -1});
  with({group.name, {4}, group.kv_heads, group.key_size, group.value_size, -1});
  with({group.name, group.layers, 1, group.key_size, group.value_size, -1});
  with({group.name, group.layers, group.kv_heads, 16, group.value_size, -1});
  with({group.name, group.layers, group.kv_heads, group.key_size, 16, -1});
  CHECK_THROWS(shared->check(Program()), std::invalid_argument);
  CHECK_THROWS(Executor(Program(), shared), std::invalid_argument);
}

void threads_take_turns() {
  const Model any, fixed(any, {30, 1, 1});
  const auto shared = resources_of(any, 2, "portable");
  const std::vector<float> expected = [&] {
    Executor alone(any.program, {16}, 1, "portable");
    return run(alone, prompts({30}));
  }();
  std::vector<std::thread> threads;
  std::vector<float> results[2];
  for (size_t i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      Executor executor(i == 0 ? any.program : fixed.program, shared);
      for (int round = 0; round < 10; ++round) {
        const std::lock_guard<std::mutex> lock(shared->mutex());
        results[i] = run(executor, prompts({30}));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(results[0] == expected && results[1] == expected);
}

}  // namespace

int main() {
  RUN(programs_share_caches);
  RUN(the_largest_arena_is_everybodys);
  RUN(resources_live_as_long_as_the_last_executor);
  RUN(other_sizes_and_other_caches_are_refused);
  RUN(threads_take_turns);
  return ew::check::result();
}
