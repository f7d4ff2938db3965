#include "panel_linear.h"

#include <iterator>

namespace ew {
namespace {

constexpr int64_t pieces(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }
constexpr int64_t padded(int64_t size, int64_t multiple) { return pieces(size, multiple) * multiple; }
constexpr int64_t groups_of(int64_t k, int64_t group) { return group ? pieces(k, group) : 1; }

constexpr int64_t kLine = 64;
// Of N, K and groups, so that no number of bytes overflows: a file could have any, and few bytes for it.
constexpr int64_t kMostSize = int64_t{1} << 28;

// Scratch of the calling thread, which runs one product at a time: x as rounded, and what the kernels need.
Workspace& rounded_memory() {
  thread_local Workspace memory;
  return memory;
}
Workspace& kernel_memory() {
  thread_local Workspace memory;
  return memory;
}

}  // namespace

struct PanelLinear::Format {
  const char* name;
  int64_t bits;        // of an element
  int64_t interleave;  // elements along K that are adjacent in a panel
};
constexpr PanelLinear::Format PanelLinear::kFormats[] = {
    {"f32", 32, 1}, {"bf16", 16, 2}, {"fp8", 8, 1}, {"int8", 8, 4}, {"int4", 4, 8}};

PanelLinear::Storage PanelLinear::storage_of(const std::string& name) {
  for (size_t i = 0; i < std::size(kFormats); ++i) {
    if (name == kFormats[i].name) return static_cast<Storage>(i);
  }
  throw BadArgument{"storage: there is no " + name};
}

PanelLinear::PanelLinear(const Description& d)
    : n_(d.n),
      k_(d.k),
      weight_group_(d.weight_group),
      activation_group_(d.activation_group),
      storage_(storage_of(d.storage)),
      sparse_(d.sparse) {
  if (!d.activation.empty() && !parse_linear_activation(d.activation.c_str(), &epilogue_.activation)) {
    throw BadArgument{"activation: there is no " + d.activation};
  }
  check_sizes();
}

void PanelLinear::check_sizes() const {
  if (n_ < 1 || n_ > kMostSize || k_ < 1 || k_ > kMostSize) throw BadArgument{"n and k: 1 to 2^28"};
  for (const int64_t group : {weight_group_, activation_group_}) {
    if (group < 0 || group > kMostSize) throw BadArgument{"groups: 0 to 2^28"};
  }
  if (sparse_ && (k_ % 4 != 0 || storage_ == Storage::fp8)) {
    throw BadArgument{"sparse: k is a multiple of 4, and fp8 has no such layout"};
  }
  if (storage_ == Storage::int4) {
    if (weight_group_ == 0 || weight_group_ != activation_group_ || weight_group_ % 8 != 0 ||
        k_ % weight_group_ != 0) {
      throw BadArgument{"int4: weight and x are in the same groups, a multiple of 8 that divides k"};
    }
  } else if (storage_ == Storage::int8) {
    const bool apart = weight_group_ && activation_group_ && weight_group_ != activation_group_;
    if (apart || weight_group_ % 4 != 0 || activation_group_ % 4 != 0) {
      throw BadArgument{"int8: groups are multiples of 4, and the same where weight and x have some"};
    }
  }
}

// As runtime/bundle/weights.py and sparse_panels.py have it.
int64_t PanelLinear::weight_bytes() const {
  const Format& format = kFormats[static_cast<size_t>(storage_)];
  if (!sparse_) return padded(n_, kPanel) * padded(k_, format.interleave) * format.bits / 8;
  constexpr int64_t depth = 32;  // of a block: places in words, and half of the values
  return pieces(n_, kPanel) * pieces(k_, depth) * kPanel * (4 + depth / 2 * format.bits / 8);
}

int64_t PanelLinear::scale_bytes() const { return padded(n_, kPanel) * groups_of(k_, weight_group_) * 2; }

bool PanelLinear::scaled() const { return storage_ == Storage::fp8 || is_integer(); }

bool PanelLinear::may_have_offsets() const { return storage_ == Storage::int4 && !sparse_; }

template <class Args>
Args PanelLinear::arguments(const Call& call) const {
  Args args;
  args.m = call.m, args.n = n_, args.k = k_;
  args.weight = static_cast<decltype(args.weight)>(call.weight);
  args.bias = call.bias;
  args.y = call.y;
  args.y_stride = n_;
  args.epilogue = epilogue_;
  if constexpr (requires { args.weight_scales; }) args.weight_scales = call.scales;
  if constexpr (requires { args.group; }) args.group = weight_group_;
  if constexpr (requires { args.sparse; }) args.sparse = sparse_;
  if constexpr (requires { args.workspace; }) args.workspace = &kernel_memory();
  if constexpr (requires { args.x = call.x; }) args.x = call.x, args.x_stride = k_;
  return args;
}

// With x rounded to int8, in the scratch of this thread.
template <class Args>
Args PanelLinear::rounded(const KernelTable& kernels, const Call& call, Workers& pool) const {
  const int64_t stride = padded(k_, kLine), groups = groups_of(k_, activation_group_);
  const int64_t scale_bytes = padded(call.m * groups * 4, kLine);
  char* memory = static_cast<char*>(rounded_memory().reserve(call.m * stride + 2 * scale_bytes));
  char* scales = memory + call.m * stride;
  const QuantizeActivationArgs quantize = {.m = call.m,
                                           .k = k_,
                                           .group_size = activation_group_,
                                           .x = call.x,
                                           .x_stride = k_,
                                           .values = reinterpret_cast<int8_t*>(memory),
                                           .values_stride = stride,
                                           .scales = reinterpret_cast<float*>(scales),
                                           .scales_stride = groups,
                                           .sums = reinterpret_cast<int32_t*>(scales + scale_bytes),
                                           .sums_stride = groups};
  kernels.quantize_activation(quantize, pool);
  Args args = arguments<Args>(call);
  args.values = quantize.values, args.values_stride = stride;
  args.scales = quantize.scales, args.scales_stride = groups;
  args.sums = quantize.sums, args.sums_stride = groups;
  return args;
}

void PanelLinear::run(const KernelTable& kernels, const Call& call, Workers& pool) const {
  switch (storage_) {
    case Storage::f32:
      return kernels.linear(arguments<LinearArgs>(call), pool);
    case Storage::bf16: {
      const int64_t stride = padded(k_, kLine / 2);
      auto* narrow = static_cast<uint16_t*>(rounded_memory().reserve(call.m * stride * 2));
      kernels.cast_bf16(
          {.m = call.m, .k = k_, .x = call.x, .x_stride = k_, .out = narrow, .out_stride = stride}, pool);
      auto args = arguments<LinearBf16Args>(call);
      args.x = narrow, args.x_stride = stride;
      return kernels.linear_bf16(args, pool);
    }
    case Storage::fp8:
      return kernels.linear_fp8(arguments<LinearFp8Args>(call), pool);
    case Storage::int8: {
      auto args = rounded<LinearInt8Args>(kernels, call, pool);
      args.weight_group = weight_group_;
      args.activation_group = activation_group_;
      return kernels.linear_int8(args, pool);
    }
    case Storage::int4: {
      auto args = rounded<LinearInt4Args>(kernels, call, pool);
      args.weight_offsets = call.offsets;
      return kernels.linear_int4(args, pool);
    }
  }
}

}  // namespace ew
