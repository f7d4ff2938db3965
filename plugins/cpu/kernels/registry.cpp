// Which kernels this processor can run, the names of their options, and Workspace.
#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels.h"

namespace ew {

#if defined(__x86_64__)
extern const KernelTable avx512_kernels;
extern const KernelTable avx2_kernels;
#endif
extern const KernelTable portable_kernels;

Workspace::~Workspace() { std::free(data_); }

void* Workspace::reserve(int64_t bytes) {
  if (bytes <= size_) return data_;
  std::free(data_);
  data_ = nullptr;
  size_ = 0;
  const int64_t rounded = (bytes + 63) / 64 * 64;
  data_ = std::aligned_alloc(64, static_cast<size_t>(rounded));
  if (data_ == nullptr) throw std::bad_alloc();
  size_ = rounded;
  return data_;
}

const KernelTable* kernels_for(const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx512") == 0) {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has ? &avx512_kernels : nullptr;
  }
  if (std::strcmp(isa, "avx2") == 0) {
    const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has ? &avx2_kernels : nullptr;
  }
#endif
  return std::strcmp(isa, "portable") == 0 ? &portable_kernels : nullptr;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> isas;
  for (const char* isa : {"avx512", "avx2", "portable"}) {
    if (kernels_for(isa) != nullptr) isas.emplace_back(isa);
  }
  return isas;
}

namespace {

template <class E>
struct Name {
  const char* name;
  E value;
};

template <class E, size_t N>
bool parse(const Name<E> (&names)[N], const char* name, E* out) {
  for (const Name<E>& entry : names) {
    if (std::strcmp(entry.name, name) != 0) continue;
    *out = entry.value;
    return true;
  }
  return false;
}

constexpr Name<Activation> kActivations[] = {
    {"silu", Activation::silu}, {"gelu", Activation::gelu},       {"gelu_tanh", Activation::gelu_tanh},
    {"relu", Activation::relu}, {"sigmoid", Activation::sigmoid},
};

constexpr Name<ReduceKind> kReduceKinds[] = {
    {"sum", ReduceKind::sum}, {"mean", ReduceKind::mean}, {"max", ReduceKind::max}};

using Fn = ElementwiseFn;
constexpr Name<Fn> kFunctions[] = {
    {"add", Fn::add},
    {"sub", Fn::sub},
    {"mul", Fn::mul},
    {"div", Fn::div},
    {"pow", Fn::pow},
    {"maximum", Fn::maximum},
    {"minimum", Fn::minimum},
    {"lt", Fn::lt},
    {"le", Fn::le},
    {"gt", Fn::gt},
    {"ge", Fn::ge},
    {"eq", Fn::eq},
    {"ne", Fn::ne},
    {"logical_and", Fn::logical_and},
    {"logical_or", Fn::logical_or},
    {"neg", Fn::neg},
    {"abs", Fn::abs},
    {"exp", Fn::exp},
    {"log", Fn::log},
    {"sqrt", Fn::sqrt},
    {"rsqrt", Fn::rsqrt},
    {"tanh", Fn::tanh},
    {"sigmoid", Fn::sigmoid},
    {"silu", Fn::silu},
    {"gelu", Fn::gelu},
    {"gelu_tanh", Fn::gelu_tanh},
    {"relu", Fn::relu},
    {"sin", Fn::sin},
    {"cos", Fn::cos},
    {"erf", Fn::erf},
    {"floor", Fn::floor},
    {"round", Fn::round},
    {"logical_not", Fn::logical_not},
    {"where", Fn::where},
    {"cast", Fn::cast},
};

}  // namespace

bool parse_activation(const char* name, Activation* out) { return parse(kActivations, name, out); }
bool parse_reduce(const char* name, ReduceKind* out) { return parse(kReduceKinds, name, out); }
bool parse_elementwise(const char* name, ElementwiseFn* out) { return parse(kFunctions, name, out); }

}  // namespace ew
