// The operator `Linear` of domain `enginewright`: a product with a weight in panels, by the CPU kernels.
//
//   x            f32 [.., K]
//   weight       as the bundle stores it for these kernels (docs/inside/bundle-format.md)
//   scales       f16 [N, G] in panel32: int8, int4 and fp8
//   offsets      as scales: int4 with offsets
//   bias         f32 [N], or left out
//   y            f32 [.., N]
//
// Weight, scales and offsets are the file's, and not computed. Attributes, each of which must be given:
//
//   n, k                            the weight is [N, K]
//   storage                         of the weight: f32, bf16, fp8, int8 or int4
//   sparse                          1: the weight is in sparse32
//   weight_group, activation_group  values along K of a scale, 0: all. x is rounded to int8 where the
//                                   weight has integers, and to bf16 where it has bf16
//   activation                      of the sums: "" or a name of plugins/shared/lowered_program.py
#pragma once

#include <string>

#include "../cpu/kernels/kernels.h"
#include "api.h"

namespace ew::ort {

enum class Storage { f32, bf16, fp8, int8, int4 };

class Linear {
 public:
  // Checks attributes and the sizes of weights. Throws Refused or BadArgument.
  Linear(const Api& api, const OrtKernelInfo* info, const KernelTable& kernels, int threads);

  // May be called from several threads at a time. Throws Refused, BadArgument or std::bad_alloc.
  void run(OrtKernelContext* context) const;

  const Api& api() const { return api_; }

 private:
  struct Call;

  void check_sizes() const;
  int64_t weight_bytes() const;
  template <class Args>
  Args arguments(const Call& call) const;
  template <class Args>
  Args rounded(const Call& call, ThreadPool& pool) const;

  const Api api_;
  const KernelTable& kernels_;
  const int threads_;
  const int64_t n_, k_, weight_group_, activation_group_;
  const Storage storage_;
  const bool sparse_;
  const size_t inputs_;
  Epilogue epilogue_;
  bool has_offsets_ = false;
};

}  // namespace ew::ort
