// The operator `Linear` of domain `enginewright`: a product with a weight in panels, by the CPU kernels.
//
//   x            f32 [.., K]
//   weight       as the bundle stores it for these kernels (docs/inside/stored-weights.md)
//   scales       f16 [N, G] in panel32: int8, int4 and fp8
//   offsets      as scales: int4 with offsets
//   bias         f32 [N], or left out
//   y            f32 [.., N]
//
// Weight, scales and offsets are the file's, and not computed. Attributes, each of which must be given, are
// what
// ../../native/panel_linear.h describes, `sparse` as 0 or 1.
#pragma once

#include "../../native/panel_linear.h"
#include "api.h"

namespace ew::ort {

class Linear {
 public:
  // Checks attributes and the sizes of weights. Throws Refused or BadArgument.
  Linear(const Api& api, const OrtKernelInfo* info, const KernelTable& kernels, int threads);

  // May be called from several threads at a time. Throws Refused, BadArgument or std::bad_alloc.
  void run(OrtKernelContext* context) const;

  const Api& api() const { return api_; }

 private:
  const Api api_;
  const KernelTable& kernels_;
  const int threads_;
  const PanelLinear product_;
  const size_t inputs_;
  bool has_offsets_ = false;
};

}  // namespace ew::ort
