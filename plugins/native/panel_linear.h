// A product with a weight in panels, of any format, as a graph's operator or call says of it: checked, and
// run.
//
//   n, k                            the weight is [N, K]
//   storage                         of the weight: f32, bf16, fp8, int8 or int4
//   sparse                          the weight is in sparse32
//   weight_group, activation_group  values along K of a scale, 0: all. x is rounded to int8 where the
//                                   weight has integers, and to bf16 where it has bf16
//   activation                      of the sums: "" or a name of runtime/shared/lowered_program.py
//
// It is in the kernels' library. Each library that calls it brings threads of its own (kernels/parallel.h).
#pragma once

#include <string>

#include "../cpu/kernels/kernels.h"

namespace ew {

// What can't be taken; who runs the graph tells its caller.
struct EW_EXPORTED BadArgument {
  std::string problem;
};

class EW_EXPORTED PanelLinear {
 public:
  struct Description {
    int64_t n, k, weight_group, activation_group;
    std::string storage, activation;
    bool sparse;
  };

  // Where the values of a call are; M rows of x.
  struct Call {
    int64_t m = 0;
    const float* x = nullptr;
    const void* weight = nullptr;
    const uint16_t* scales = nullptr;   // f16 [N, G] in panel32: int8, int4 and fp8
    const uint16_t* offsets = nullptr;  // or null; as scales: int4 with offsets
    const float* bias = nullptr;        // or null
    float* y = nullptr;
  };

  // Throws BadArgument.
  explicit PanelLinear(const Description& description);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int64_t weight_bytes() const;
  int64_t scale_bytes() const;  // of offsets too
  bool scaled() const;
  bool may_have_offsets() const;

  // May be called from several threads at a time. Throws std::bad_alloc.
  void run(const KernelTable& kernels, const Call& call, Workers& pool) const;

 private:
  enum class Storage { f32, bf16, fp8, int8, int4 };
  struct Format;

  static const Format kFormats[];
  static Storage storage_of(const std::string& name);
  bool is_integer() const { return storage_ == Storage::int8 || storage_ == Storage::int4; }
  void check_sizes() const;
  template <class Args>
  Args arguments(const Call& call) const;
  template <class Args>
  Args rounded(const KernelTable& kernels, const Call& call, Workers& pool) const;

  const int64_t n_, k_, weight_group_, activation_group_;
  const Storage storage_;
  const bool sparse_;
  Epilogue epilogue_;
};

}  // namespace ew
