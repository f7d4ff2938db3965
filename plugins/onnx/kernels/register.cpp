// What onnxruntime calls when the library is registered with a session's options: SessionOptions of any
// language has a function for it. Session entries that are read, if they were set before:
//
//   enginewright.threads   as many as the session has (its intra_op_num_threads), which operators can't ask
//                          for. By default the cores that the process may use
//   enginewright.isa       one of available_isas() in the place of the best
#include <charconv>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>

#include "../../native/cores.h"
#include "linear.h"

namespace ew::ort {
namespace {

constexpr char kDomain[] = "enginewright";
constexpr int kMostThreads = 1024;

struct LinearOp : OrtCustomOp {
  const KernelTable* kernels;
  int threads;

  LinearOp(const KernelTable* table, int count);
};

// What `run` throws, as a status.
template <class F>
OrtStatus* status_of(const Api& api, const F& run) {
  try {
    run();
    return nullptr;
  } catch (const Refused& e) {
    return e.status;
  } catch (const BadArgument& e) {
    return api.status(kOrtInvalidArgument, ("enginewright: " + e.problem).c_str());
  } catch (const std::exception& e) {
    return api.status(kOrtFail, e.what());
  }
}

LinearOp::LinearOp(const KernelTable* table, int count) : OrtCustomOp{}, kernels(table), threads(count) {
  version = kApiVersion;
  GetName = [](const OrtCustomOp*) { return "Linear"; };
  GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 5; };
  GetInputType = [](const OrtCustomOp*, size_t index) {
    constexpr OrtElementType types[] = {kOrtFloat, kOrtAnyType, kOrtFloat16, kOrtFloat16, kOrtFloat};
    return types[index];
  };
  GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
    return index < 2 ? kOrtRequired : kOrtOptional;
  };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kOrtDefaultMemory; };
  GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  GetOutputType = [](const OrtCustomOp*, size_t) { return kOrtFloat; };
  GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kOrtRequired; };
  GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  GetStartVersion = GetEndVersion = [](const OrtCustomOp*) { return 1; };
  CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* table, const OrtKernelInfo* info, void** kernel) {
    const Api api(table);
    return status_of(api, [&] {
      const auto& own = *static_cast<const LinearOp*>(op);
      *kernel = new Linear(api, info, *own.kernels, own.threads);
    });
  };
  KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const auto& own = *static_cast<const Linear*>(kernel);
    return status_of(own.api(), [&] { own.run(context); });
  };
  KernelDestroy = [](void* kernel) { delete static_cast<Linear*>(kernel); };
}

int threads_of(const std::string& given) {
  if (given.empty()) return static_cast<int>(usable_cores().size());
  int count = 0;
  const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), count);
  if (error != std::errc() || *end != 0 || count < 1 || count > kMostThreads) {
    throw BadArgument{"enginewright.threads: " + given + " isn't a number from 1 to " +
                      std::to_string(kMostThreads)};
  }
  return count;
}

const KernelTable* kernels_of(std::string isa) {
  if (isa.empty()) isa = available_isas().front();
  if (const KernelTable* kernels = kernels_for(isa.c_str())) return kernels;
  throw BadArgument{"enginewright.isa: " + isa + " is not available: this processor or this build lacks it"};
}

// The domain with its operator, which sessions use as long as they live: nothing is ever removed. A process
// may have more than one onnxruntime, each with domains of its own.
OrtCustomOpDomain* domain_of(const OrtApi* table, const KernelTable* kernels, int threads) {
  struct Domain {
    OrtCustomOpDomain* domain = nullptr;
    std::unique_ptr<LinearOp> op;  // null until the domain has it
  };
  static std::mutex mutex;
  static auto& domains = *new std::map<std::tuple<const OrtApi*, const KernelTable*, int>, Domain>();
  const Api api(table);
  const std::lock_guard lock(mutex);
  Domain& found = domains[{table, kernels, threads}];
  if (!found.domain) found.domain = api.new_domain(kDomain);
  if (!found.op) {
    auto op = std::make_unique<LinearOp>(kernels, threads);
    api.add(found.domain, op.get());
    found.op = std::move(op);
  }
  return found.domain;
}

}  // namespace
}  // namespace ew::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  using namespace ew::ort;
  const OrtApi* table = base->GetApi(kApiVersion);
  if (!table) return Api(base->GetApi(1)).status(kOrtFail, "enginewright's operators need onnxruntime 1.17");
  const Api api(table);
  return status_of(api, [&] {
    const int threads = threads_of(api.config(options, "enginewright.threads"));
    api.add(options, domain_of(table, kernels_of(api.config(options, "enginewright.isa")), threads));
  });
}
