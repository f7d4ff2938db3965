#include "linear.h"

#include <optional>

#include "session_threads.h"

namespace ew::ort {
namespace {

enum Input : size_t { kX, kWeight, kScales, kOffsets, kBias };

PanelLinear::Description described(const Api& api, const OrtKernelInfo* info) {
  return {.n = api.integer(info, "n"),
          .k = api.integer(info, "k"),
          .weight_group = api.integer(info, "weight_group"),
          .activation_group = api.integer(info, "activation_group"),
          .storage = api.text(info, "storage"),
          .activation = api.text(info, "activation"),
          .sparse = api.integer(info, "sparse") != 0};
}

}  // namespace

Linear::Linear(const Api& api, const OrtKernelInfo* info, const KernelTable& kernels, int threads)
    : api_(api),
      kernels_(kernels),
      threads_(threads),
      product_(described(api, info)),
      inputs_(api.inputs(info)) {
  const auto given = [&](Input index, const char* name, int64_t bytes) {
    const std::optional<int64_t> found = api.constant_bytes(info, index);
    if (!found || *found == bytes) return found.has_value();
    throw BadArgument{std::string(name) + " has " + std::to_string(*found) + " bytes, and not " +
                      std::to_string(bytes)};
  };
  if (!given(kWeight, "weight", product_.weight_bytes()))
    throw BadArgument{"weight must be the file's, and not computed"};
  if (given(kScales, "scales", product_.scale_bytes()) != product_.scaled()) {
    throw BadArgument{"scales: int8, int4 and fp8 have some of the file's, others none"};
  }
  has_offsets_ = given(kOffsets, "offsets", product_.scale_bytes());
  if (has_offsets_ && !product_.may_have_offsets()) {
    throw BadArgument{"offsets: only int4 that isn't sparse has any"};
  }
}

void Linear::run(OrtKernelContext* context) const {
  Tensor x = api_.input(context, kX);
  if (x.shape.empty() || x.shape.back() != product_.k()) {
    throw BadArgument{"x: its last dimension is not " + std::to_string(product_.k())};
  }
  PanelLinear::Call call = {.m = x.count() / product_.k(),
                            .x = static_cast<const float*>(x.data),
                            .weight = api_.data(context, kWeight)};
  if (inputs_ > kScales) call.scales = static_cast<const uint16_t*>(api_.data(context, kScales));
  if (inputs_ > kOffsets) call.offsets = static_cast<const uint16_t*>(api_.data(context, kOffsets));
  if (has_offsets_ != (call.offsets != nullptr))
    throw BadArgument{"offsets must be the file's, and not computed"};
  if (inputs_ > kBias) {
    const Tensor bias = api_.input(context, kBias);
    if (bias.data && bias.count() != product_.n())
      throw BadArgument{"bias: it has not " + std::to_string(product_.n()) + " elements"};
    call.bias = static_cast<const float*>(bias.data);
  }
  x.shape.back() = product_.n();
  call.y = static_cast<float*>(api_.output(context, 0, x.shape));
  if (call.m == 0) return;
  SessionThreads pool(api_, context, threads_);
  product_.run(kernels_, call, pool);
}

}  // namespace ew::ort
