// What the library rejects: a status says why, no kernel is made, and nothing is left behind.
#include <functional>
#include <limits>

#include "../../../cpu/kernels/kernels.h"
#include "../../../native/tests/check.h"
#include "linear_problem.h"
#include "session.h"

using namespace ew;
using namespace ew::testing;

namespace {

const OrtCustomOp& op() { return op_of(available_isas().front(), 2); }

// A node like the problem's but for what `change` does: no kernel, and words of the reason.
void check_node(const Form& form, const Shape& shape, const std::string& words,
                const std::function<void(OrtKernelInfo&)>& change) {
  const Problem problem(form, shape);
  CHECK(Kernel(op(), problem.info()).exists()) << describe(form, shape);
  OrtKernelInfo info = problem.info();
  change(info);
  const Kernel kernel(op(), info);
  CHECK(kernel.made().blames(words)) << describe(form, shape) << words << ": " << kernel.made().text();
  CHECK(!kernel.exists()) << words;
}

void check_integer(const Form& form, const Shape& shape, const std::string& words, const std::string& name,
                   std::initializer_list<int64_t> values) {
  for (const int64_t value : values) {
    check_node(form, shape, words, [&](OrtKernelInfo& info) { info.integers.at(name) = value; });
  }
}

void names() {
  for (const char* name : {"f16", "", "int8 ", "Float"}) {
    check_node({"f32"}, {{1}, 33, 5}, "storage", [&](auto& info) { info.texts["storage"] = name; });
  }
  for (const char* name : {"swish", "RELU", " "}) {
    check_node({"f32"}, {{1}, 33, 5}, "activation", [&](auto& info) { info.texts["activation"] = name; });
  }
}

// Sizes whose number of bytes would be past 64 bits too, which an empty weight must not pass for.
void sizes() {
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  for (const char* size : {"n", "k"}) {
    check_integer({"f32"}, {{1}, 33, 5}, "n and k", size, {0, -1, (int64_t{1} << 28) + 1, most});
  }
  check_node({"f32"}, {{1}, 33, 5}, "bytes", [](auto& info) {
    info.integers["n"] = info.integers["k"] = int64_t{1} << 28;  // the largest there are
  });
  const OrtValue empty = {kOrtFloat, {0}, {}};
  check_node({"f32"}, {{1}, 33, 5}, "n and k", [&](auto& info) {
    info.integers["n"] = info.integers["k"] = int64_t{1} << 31;  // 2^64 bytes
    info.inputs[1].value = &empty;
  });
  for (const char* group : {"weight_group", "activation_group"}) {
    check_integer({"fp8"}, {{1}, 33, 64}, "groups", group, {-1, -32, (int64_t{1} << 28) + 4, most, most - 3});
  }
}

void groups() {
  const Form int8 = {"int8", 32, 32}, int4 = {"int4", 32, 32};
  check_integer(int8, {{1}, 33, 64}, "int8: groups", "activation_group", {64, 4, 2});
  check_integer(int8, {{1}, 33, 64}, "int8: groups", "weight_group", {64, 30});
  check_integer({"int8", 32, 0}, {{1}, 33, 64}, "int8: groups", "weight_group", {2, 33});
  check_integer({"int8", 0, 32}, {{1}, 33, 64}, "int8: groups", "activation_group", {2, 33});
  check_integer(int4, {{1}, 33, 64}, "int4: weight and x", "activation_group", {0, 64});
  check_integer(int4, {{1}, 33, 64}, "int4: weight and x", "weight_group", {0, 16});
  check_integer(int4, {{1}, 33, 64}, "int4: weight and x", "k", {32 + 8, 1});
  for (const int64_t both : {0, 12}) {
    check_node({"int4", 8, 8}, {{1}, 33, 24}, "int4: weight and x",
               [&](auto& info) { info.integers["weight_group"] = info.integers["activation_group"] = both; });
  }
}

void sparse_ones() {
  check_integer({"f32", 0, 0, false, true}, {{1}, 33, 36}, "sparse: k", "k", {35, 34, 1});
  check_node({"int8", 0, 0, false, true}, {{1}, 33, 36}, "sparse: k",
             [](auto& info) { info.texts["storage"] = "fp8"; });
}

// Of parts of the file, whose bytes kernels read without looking.
void bytes() {
  for (const Form& form : {Form{"f32"},
                           {"bf16"},
                           {"fp8"},
                           {"int8"},
                           {"int4", 8, 8},
                           {"f32", 0, 0, false, true},
                           {"bf16", 0, 0, false, true},
                           {"int8", 0, 0, false, true},
                           {"int4", 32, 32, false, true}}) {
    const Shape shape = {{1}, 33, 64};
    const Problem problem(form, shape);
    for (const int64_t more : {-1, 1}) {
      OrtValue other = problem.weight;
      other.shape = {static_cast<int64_t>(other.bytes.size()) + more};
      other.element = 2;
      check_node(form, shape, "weight has ", [&](auto& info) { info.inputs[1].value = &other; });
    }
    if (problem.scales.shape.empty()) continue;
    OrtValue fewer = problem.scales;
    --fewer.shape[0];
    check_node(form, shape, "scales has ", [&](auto& info) { info.inputs[2].value = &fewer; });
  }
  const Form form = {"int4", 32, 32, true};
  OrtValue twice = Problem(form, {{1}, 33, 64}).offsets;
  twice.shape.push_back(2);
  check_node(form, {{1}, 33, 64}, "offsets has ", [&](auto& info) { info.inputs[3].value = &twice; });
  // A weight of text, say, has no bytes that could be counted.
  OrtValue text = Problem({"f32"}, {{1}, 33, 5}).weight;
  text.element = 8;
  check_node({"f32"}, {{1}, 33, 5}, "elements of type 8", [&](auto& info) { info.inputs[1].value = &text; });
}

void what_is_not_the_files() {
  const Shape shape = {{1}, 33, 64};
  const auto computed = [](size_t index) {
    return [index](OrtKernelInfo& info) { info.inputs.at(index).constant = false; };
  };
  check_node({"f32"}, shape, "weight must be the file's", computed(1));
  check_node({"int4", 32, 32, true}, shape, "scales", computed(2));
  for (const Form& form : {Form{"fp8"}, {"int8"}, {"int4", 8, 8}, {"int8", 0, 0, false, true}}) {
    check_node(form, shape, "scales: int8, int4 and fp8", [](auto& info) { info.inputs.pop_back(); });
    check_node(form, shape, "scales: int8, int4 and fp8", [](auto& info) { info.inputs[2] = {}; });
  }
  const Problem scaled({"int8"}, shape), with_offsets({"int4", 32, 32, true}, shape);
  for (const Form& form : {Form{"f32"}, {"bf16"}, {"f32", 0, 0, false, true}}) {
    check_node(form, shape, "scales: int8, int4 and fp8",
               [&](auto& info) { info.inputs.push_back({&scaled.scales, true}); });
  }
  for (const Form& form : {Form{"int8", 32, 32}, {"fp8", 32}, {"int4", 32, 32, false, true}}) {
    check_node(form, shape, "offsets: only int4",
               [&](auto& info) { info.inputs.push_back({&with_offsets.offsets, true}); });
  }
}

// A call like the problem's but for what `change` does.
void check_call(const Problem& problem, const OrtKernelInfo& info, const std::string& words,
                const std::function<void(OrtKernelContext&)>& change) {
  const Kernel kernel(op(), info);
  OrtKernelContext context = problem.context();
  change(context);
  const Outcome outcome(kernel.run(context));
  CHECK(outcome.blames(words)) << words << ": " << outcome.text();
  CHECK(context.loops.empty()) << words;
}

void calls() {
  const Problem problem({"int4", 32, 32, true}, {{3}, 33, 64}, {"", true});
  for (const std::vector<int64_t>& x_shape :
       {std::vector<int64_t>{3, 63}, {64, 3}, {}, {3, 64, 0}, {192, 1}}) {
    OrtValue x = problem.x;
    x.shape = x_shape;
    check_call(problem, problem.info(), "x: its last dimension is not 64",
               [&](auto& context) { context.inputs[0] = &x; });
  }
  for (const std::vector<int64_t>& bias_shape : {std::vector<int64_t>{32}, {1}, {0}, {33, 2}}) {
    OrtValue bias = problem.bias;
    bias.shape = bias_shape;
    check_call(problem, problem.info(), "bias: it has not 33",
               [&](auto& context) { context.inputs[4] = &bias; });
  }
  OrtKernelInfo computed = problem.info();
  computed.inputs[3].constant = false;
  check_call(problem, computed, "offsets must be the file's", [](auto&) {});
  check_call(problem, problem.info(), "offsets must be the file's",
             [](auto& context) { context.inputs[3] = nullptr; });
}

// Whatever the library asks of onnxruntime may be refused. It gives that very status back, and it is the only
// one. Returns how many calls there are.
int check_refusals(const std::string& what, const std::function<OrtStatus*()>& run) {
  for (int call = 0;; ++call) {
    fake::counts().calls = 0, fake::counts().refused = call, fake::counts().refusal = nullptr;
    const Outcome outcome(run());
    fake::counts().refused = -1;
    if (!fake::counts().refusal) {
      CHECK(outcome.good()) << what << ": " << outcome.text();
      return call;
    }
    CHECK(outcome.status() == fake::counts().refusal) << what << " call " << call << ": " << outcome.text();
    CHECK(fake::counts().statuses == 1 && fake::counts().infos == 0) << what << " call " << call;
  }
}

void refusals() {
  const std::string isa = available_isas().front();
  const Problem problem({"int4", 32, 32, true}, {{64}, 96, 1024}, {"relu", true});
  const OrtKernelInfo info = problem.info();
  const OrtCustomOp& own = op();
  void* made = nullptr;
  // 5 numbers, 2 texts in two calls each, the inputs' count 4 times, and the three parts' values, each of
  // which has 4 calls for its shape.
  const int create = check_refusals("create", [&] {
    CHECK(made == nullptr);
    return own.CreateKernelV2(&own, fake::table(), &info, &made);
  });
  CHECK(create == 5 + 4 + 4 + 3 * 5) << create;
  // The values of 5 inputs, their data, two shapes of 3 calls, the output and its data, and two loops.
  const int compute = check_refusals("compute", [&] {
    OrtKernelContext context = problem.context();
    return own.KernelComputeV2(made, &context);
  });
  CHECK(compute == 5 + 5 + 2 * 3 + 2 + 2) << compute;
  own.KernelDestroy(made);
  // Two entries of 3 calls, the domain and its operator, which a refusal keeps for the next time, and its
  // place. A number of threads that no other test has: the domain is made here.
  const int domains = fake::counts().domains;
  const auto register_it = [&] {
    OrtSessionOptions options = options_of(isa, 77);
    OrtStatus* status = RegisterCustomOps(&options, fake::base());
    CHECK(options.domains.size() == (status ? 0u : 1u) && (status || options.domains[0]->ops.size() == 1));
    return status;
  };
  const int first = check_refusals("register", register_it), second = check_refusals("again", register_it);
  CHECK(first == 2 * 3 + 2 && second == 2 * 3 + 1) << first << " " << second;
  CHECK(fake::counts().domains == domains + 1) << "one domain is made";
}

void nothing_is_left() { CHECK(fake::counts().statuses == 0 && fake::counts().infos == 0); }

}  // namespace

int main() {
  RUN(names);
  RUN(sizes);
  RUN(groups);
  RUN(sparse_ones);
  RUN(bytes);
  RUN(what_is_not_the_files);
  RUN(calls);
  RUN(refusals);
  RUN(nothing_is_left);
  return check::result();
}
