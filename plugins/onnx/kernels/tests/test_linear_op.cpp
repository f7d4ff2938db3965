// The operator's results: bit for bit those of the scalar reference, however a session runs it.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>

#include "../../../native/tests/check.h"
#include "linear_problem.h"
#include "session.h"

using namespace ew;
using namespace ew::testing;

namespace {

const std::vector<Form> kForms = {{"f32"},
                                  {"bf16"},
                                  {"fp8"},
                                  {"fp8", 32},
                                  {"int8"},
                                  {"int8", 32, 0},
                                  {"int8", 0, 32},
                                  {"int8", 32, 32},
                                  {"int8", 12, 12},
                                  {"int4", 32, 32},
                                  {"int4", 32, 32, true},
                                  {"int4", 8, 8},
                                  {"int4", 8, 8, true},
                                  {"f32", 0, 0, false, true},
                                  {"bf16", 0, 0, false, true},
                                  {"int8", 0, 0, false, true},
                                  {"int8", 32, 0, false, true},
                                  {"int8", 0, 32, false, true},
                                  {"int8", 32, 32, false, true},
                                  {"int4", 32, 32, false, true}};

// A depth near `k` that the format takes: odd ones where nothing is in fours or groups.
int64_t depth(const Form& form, int64_t k) {
  const int64_t unit = form.storage == "int4" ? form.weight_group : form.sparse ? 4 : 1;
  return (k + unit - 1) / unit * unit;
}

bool same(const OrtValue& value, const std::vector<float>& expected) {
  return value.bytes.size() == expected.size() * sizeof(float) &&
         std::memcmp(value.bytes.data(), expected.data(), value.bytes.size()) == 0;
}

// Runs the problem as a session with so many threads does. Of what is checked, the words are `what`.
OrtKernelContext run(const Problem& problem, const std::string& isa, int threads, bool at_once,
                     const std::string& what) {
  const Kernel kernel(op_of(isa, threads), problem.info());
  OrtKernelContext context = problem.context();
  context.threads = at_once;
  CHECK(kernel.made().good() && kernel.exists()) << what << kernel.made().text();
  if (!kernel.exists()) return context;
  const Outcome outcome(kernel.run(context));
  CHECK(outcome.good()) << what << outcome.text();
  for (const size_t iterations : context.loops) {
    CHECK(iterations == static_cast<size_t>(threads)) << what << iterations << " iterations";
  }
  return context;
}

// With every instruction set and several numbers of threads, which work at once, or if below 0 in order.
void check(const Form& form, const Shape& shape, const Ends& ends) {
  Problem problem(form, shape, ends);
  for (const std::string& isa : available_isas()) {
    const std::vector<float>& expected = problem.expected(isa);
    for (const int threads : {1, 2, 4, -4}) {
      const std::string what =
          describe(form, shape, ends) + isa + ", " + std::to_string(threads) + " threads ";
      const OrtKernelContext context = run(problem, isa, std::abs(threads), threads > 0, what);
      CHECK(context.output.shape == problem.y_shape()) << what;
      CHECK(same(context.output, expected)) << what;
    }
  }
}

void equals_reference() {
  const std::vector<std::vector<int64_t>> rows = {{1}, {3}, {17}, {1, 3}, {17, 1}, {3, 2, 2}, {}};
  const char* const activations[] = {"", "relu", "relu2"};
  size_t i = 0;
  for (const Form& form : kForms) {
    for (const int64_t n : {1, 33, 70}) {
      for (const int64_t k : {5, 64, 131}) {
        for (int more = 0; more < 2; ++more, ++i) {
          check(form, {rows[i % rows.size()], n, depth(form, k)}, {activations[i % 3], i / 2 % 2 == 0});
        }
      }
    }
  }
}

// Enough for several tasks of every kernel, those that round x too.
void large_ones() {
  for (const Form& form : kForms) {
    for (const bool odd : {false, true}) {
      check(form, {{odd ? 17 : 48}, odd ? 161 : 96, depth(form, odd ? 901 : 1024)}, {odd ? "relu" : "", odd});
    }
  }
}

void activations() {
  for (const char* name : {"silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh"}) {
    check({"f32"}, {{3}, 40, 33}, {name, true});
    check({"int4", 32, 32, true}, {{17}, 70, 96}, {name, false});
  }
}

// A NaN and an infinity show in their rows and in no other.
void special_values() {
  for (const Form& form : kForms) {
    // These look at no value of x whose weight is not kept.
    if (form.sparse && (form.storage == "f32" || form.storage == "bf16")) continue;
    const Shape shape = {{5}, 33, depth(form, 37)};
    Problem problem(form, shape);
    for (const int64_t row : {1, 3}) {
      const float value =
          row == 1 ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
      for (const int64_t k : {int64_t{0}, shape.k - 1}) {
        std::memcpy(problem.x.bytes.data() + (row * shape.k + k) * 4, &value, sizeof value);
      }
    }
    for (const std::string& isa : available_isas()) {
      const OrtKernelContext context = run(problem, isa, 1, false, describe(form, shape) + isa);
      for (int64_t i = 0; i < 5 * 33; ++i) {
        float y = 0;
        std::memcpy(&y, context.output.bytes.data() + i * 4, sizeof y);
        const bool special = i / 33 == 1 || i / 33 == 3;
        CHECK(std::isfinite(y) != special) << describe(form, shape) << isa << " " << i << ": " << y;
      }
    }
  }
}

// The sum that isn't fused differs, so that the set that a session asks for shows.
void the_isa_is_the_sessions() {
  Problem problem({"f32"}, {{3}, 40, 65});
  for (const std::string& isa : available_isas()) {
    const OrtKernelContext context = run(problem, isa, 1, false, isa);
    CHECK(same(context.output, problem.expected("portable")) == (isa == "portable")) << isa;
  }
}

// What is large enough runs on the threads of the session, and what isn't stays on the caller's.
void threads_are_the_sessions() {
  const std::string isa = available_isas().front();
  for (const Form& form : kForms) {
    for (const int threads : {1, 2, 4}) {
      const std::string what = describe(form, {{64}, 96, 1024}) + std::to_string(threads) + " threads ";
      const bool rounds = form.storage != "f32" && form.storage != "fp8";
      const auto large = run(Problem(form, {{64}, 96, 1024}), isa, threads, true, what);
      CHECK(large.loops.size() == (threads == 1 ? 0u : rounds ? 2u : 1u)) << what << large.loops.size();
      const auto small = run(Problem(form, {{1}, 32, 32}), isa, threads, true, what);
      CHECK(small.loops.empty()) << what;
    }
  }
}

void no_rows() {
  for (const Form& form : kForms) {
    for (const std::vector<int64_t>& rows : {std::vector<int64_t>{0}, {2, 0}, {0, 3}}) {
      const Shape shape = {rows, 40, depth(form, 36)};
      Problem problem(form, shape, {"relu", true});
      const auto context = run(problem, available_isas().front(), 2, true, describe(form, shape));
      CHECK(context.output.shape == problem.y_shape() && context.output.bytes.empty())
          << describe(form, shape);
      CHECK(context.loops.empty());
    }
  }
}

// The bias alone of what may be left out at the end need not be the file's.
void a_computed_bias() {
  Problem problem({"int8"}, {{3}, 40, 36}, {"", true});
  Problem without({"int8"}, {{3}, 40, 36});
  const std::string isa = available_isas().front();
  const Kernel kernel(op_of(isa, 2), problem.info());
  OrtKernelContext given = problem.context(), left_out = problem.context();
  left_out.inputs.back() = nullptr;
  const Outcome with(kernel.run(given)), alone(kernel.run(left_out));
  CHECK(with.good() && same(given.output, problem.expected(isa))) << with.text();
  CHECK(alone.good() && same(left_out.output, without.expected(isa))) << alone.text();
}

// Kernels of one session at the same time, as its requests are, and of one size after the other on a thread,
// which keeps its scratch.
void at_the_same_time() {
  const std::string isa = available_isas().front();
  struct One {
    Problem problem;
    Kernel kernel;
    std::vector<float> expected;
    One(const Form& form, const Shape& shape, const std::string& isa)
        : problem(form, shape), kernel(op_of(isa, 2), problem.info()), expected(problem.expected(isa)) {}
  };
  const One ones[] = {{{"int8", 32, 0}, {{17}, 70, 1024}, isa},
                      {{"bf16"}, {{1}, 33, 65}, isa},
                      {{"int4", 32, 32}, {{64}, 96, 640}, isa},
                      {{"int8", 32, 32, false, true}, {{3}, 40, 36}, isa}};
  std::atomic<int> wrong{0};
  std::vector<std::thread> requests;
  for (int request = 0; request < 3; ++request) {
    requests.emplace_back([&, request] {
      for (int step = 0; step < 12; ++step) {
        const One& one = ones[(step * (request + 1) + request) % 4];
        OrtKernelContext context = one.problem.context();
        const Outcome outcome(one.kernel.run(context));
        if (!outcome.good() || !same(context.output, one.expected)) ++wrong;
      }
    });
  }
  for (std::thread& request : requests) request.join();
  CHECK(wrong == 0) << wrong;
}

void nothing_is_left() { CHECK(fake::counts().statuses == 0 && fake::counts().infos == 0); }

}  // namespace

int main() {
  RUN(equals_reference);
  RUN(large_ones);
  RUN(activations);
  RUN(special_values);
  RUN(the_isa_is_the_sessions);
  RUN(threads_are_the_sessions);
  RUN(no_rows);
  RUN(a_computed_bias);
  RUN(at_the_same_time);
  RUN(nothing_is_left);
  return check::result();
}
