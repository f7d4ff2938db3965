// RegisterCustomOps: what a session gets for its entries, and what the operator says of itself.
#include "../../../cpu/kernels/kernels.h"
#include "../../../native/cores.h"
#include "../../../native/tests/check.h"
#include "linear_problem.h"
#include "session.h"

using namespace ew;
using namespace ew::testing;

namespace {

// The domain that a session with the entries gets; null if it gets none.
const OrtCustomOpDomain* domain_of(const std::map<std::string, std::string>& entries,
                                   const OrtApiBase* base = fake::base()) {
  OrtSessionOptions options{entries};
  const Outcome outcome(RegisterCustomOps(&options, base));
  CHECK(outcome.good() && options.domains.size() == 1) << outcome.text();
  return options.domains.empty() ? nullptr : options.domains[0];
}

void the_operator() {
  const OrtCustomOpDomain* domain = domain_of({});
  CHECK(domain->name == "enginewright" && domain->ops.size() == 1);
  const OrtCustomOp& op = *domain->ops[0];
  CHECK(op.version == 17 && op.GetStartVersion(&op) == 1 && op.GetEndVersion(&op) == 1);
  CHECK(op.GetName(&op) == std::string("Linear"));
  CHECK(op.GetExecutionProviderType(&op) == std::string("CPUExecutionProvider"));
  constexpr OrtElementType types[] = {kOrtFloat, kOrtAnyType, kOrtFloat16, kOrtFloat16, kOrtFloat};
  CHECK(op.GetInputTypeCount(&op) == 5 && op.GetOutputTypeCount(&op) == 1);
  for (size_t i = 0; i < 5; ++i) {
    CHECK(op.GetInputType(&op, i) == types[i]) << i;
    CHECK(op.GetInputCharacteristic(&op, i) == (i < 2 ? kOrtRequired : kOrtOptional)) << i;
    CHECK(op.GetInputMemoryType(&op, i) == kOrtDefaultMemory) << i;
  }
  CHECK(op.GetOutputType(&op, 0) == kOrtFloat && op.GetOutputCharacteristic(&op, 0) == kOrtRequired);
  // What version 17 calls without a look at whether it is there.
  CHECK(op.CreateKernelV2 && op.KernelComputeV2 && op.KernelDestroy);
  CHECK(op.GetVariadicInputMinArity(&op) == 1 && op.GetVariadicInputHomogeneity(&op) == 1);
  CHECK(op.GetVariadicOutputMinArity(&op) == 1 && op.GetVariadicOutputHomogeneity(&op) == 1);
}

void without_entries_it_is_the_best() {
  const std::string cores = std::to_string(usable_cores().size()), best = available_isas().front();
  const OrtCustomOpDomain* domain = domain_of({});
  CHECK(domain == domain_of({{"enginewright.threads", cores}, {"enginewright.isa", best}}));
  CHECK(domain == domain_of({{"enginewright.threads", ""}, {"enginewright.isa", ""}}));
}

// Sessions that ask for the same share a domain, of one onnxruntime: a process may have loaded two.
void domains() {
  const OrtCustomOpDomain* first = domain_of({{"enginewright.threads", "3"}});
  CHECK(first == domain_of({{"enginewright.threads", "3"}}));
  CHECK(first != domain_of({{"enginewright.threads", "5"}}));
  CHECK(first != domain_of({{"enginewright.threads", "3"}}, fake::base<1>()));
  for (const std::string& isa : available_isas()) {
    const bool best = isa == available_isas().front();
    CHECK((first == domain_of({{"enginewright.threads", "3"}, {"enginewright.isa", isa}})) == best) << isa;
  }
}

void wrong_entries() {
  const auto check = [](const std::string& key, const std::string& value) {
    OrtSessionOptions options{{{key, value}}};
    const Outcome outcome(RegisterCustomOps(&options, fake::base()));
    CHECK(outcome.blames(key) && outcome.blames(value)) << key << "=" << value << ": " << outcome.text();
    CHECK(options.domains.empty()) << key << "=" << value;
  };
  for (const char* count : {"0", "-1", "1025", "99999999999", "two", "4 ", " 4", "+4", "4.0", "0x4"}) {
    check("enginewright.threads", count);
  }
  for (const char* isa : {"avx", "AVX2", "portable ", "best"}) check("enginewright.isa", isa);
  CHECK(domain_of({{"enginewright.threads", "1"}}) && domain_of({{"enginewright.threads", "1024"}}));
}

void an_older_onnxruntime() {
  OrtSessionOptions options;
  const Outcome outcome(RegisterCustomOps(&options, fake::base<0, 16>()));
  CHECK(outcome.status() && outcome.status()->code == kOrtFail);
  CHECK(outcome.text().find("need onnxruntime 1.17") != std::string::npos) << outcome.text();
  CHECK(options.domains.empty());
}

void nothing_is_left() { CHECK(fake::counts().statuses == 0 && fake::counts().infos == 0); }

}  // namespace

int main() {
  RUN(the_operator);
  RUN(without_entries_it_is_the_best);
  RUN(domains);
  RUN(wrong_entries);
  RUN(an_older_onnxruntime);
  RUN(nothing_is_left);
  return check::result();
}
