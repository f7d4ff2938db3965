// Which kernels this processor can run, the names of their options, Workers and Workspace.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <string_view>

#include "kernels.h"
#include "parallel.h"

namespace ew {

// Which of these there are is for the build to say: a build for the thread sanitizer does without AVX-512,
// since kernels divide work alike in all sets, and one with EW_NATIVE has the kernels of one processor alone.
extern const KernelTable native_kernels, avx2_kernels, avx512_kernels, portable_kernels;
void use_avx2_vnni(KernelTable* table);
void use_avx512_vnni(KernelTable* table);
void use_avx512_bf16(KernelTable* table);
void use_avx512_amx(KernelTable* table);

Workers::~Workers() = default;

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

namespace {

#if defined(__x86_64__)
// The builtin knows what the operating system saves of the registers, not only what the processor has.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx2_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Tiles are saved for a process that asks for them alone, by Linux's arch_prctl: for all of its threads, and
// for good. (The builtin of GCC 12 doesn't know AMX.)
bool may_use_tiles() {
#if defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, kBf16 = 1u << 22, kSavesExtended = 1u << 27;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  constexpr unsigned kTileState = 3u << 17;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (kTile | kInt8 | kBf16)) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kSavesExtended)) return false;
  unsigned saved = 0, high = 0;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (~saved & kTileState) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
bool has_avx512_amx() {
  static const bool has = has_avx512_bf16() && may_use_tiles();
  return has;
}

// A table with some kernels exchanged for those of an extension. Only for a processor that has it: what
// exchanges them is compiled for it too.
[[maybe_unused]] KernelTable extended(const KernelTable& base, const char* isa,
                                      std::initializer_list<void (*)(KernelTable*)> extensions) {
  KernelTable table = base;
  table.isa = isa;
  for (const auto use : extensions) use(&table);
  return table;
}
#endif

// Sets of instructions, the best first.
struct Isa {
  std::string_view name;
  bool (*has)();
};
constexpr Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512_amx", has_avx512_amx},    {"avx512_bf16", has_avx512_bf16},
    {"avx512_vnni", has_avx512_vnni},  {"avx512", has_avx512},
    {"avx2_vnni", has_avx2_vnni},      {"avx2", has_avx2},
#endif
    {"portable", [] { return true; }},
};

// The table of a set that this processor has; null where the build leaves it out.
const KernelTable* table_of(std::string_view isa) {
#if defined(EW_NATIVE)
#if defined(EW_NATIVE_AMX)
  if (isa == "avx512_amx") {
    static const KernelTable table = extended(native_kernels, "avx512_amx", {use_avx512_amx});
    return &table;
  }
#endif
  return isa == native_kernels.isa ? &native_kernels : nullptr;
#else
#if defined(EW_AVX512)
  if (isa == "avx512_amx") {
    static const KernelTable table =
        extended(avx512_kernels, "avx512_amx", {use_avx512_vnni, use_avx512_bf16, use_avx512_amx});
    return &table;
  }
  if (isa == "avx512_bf16") {
    static const KernelTable table =
        extended(avx512_kernels, "avx512_bf16", {use_avx512_vnni, use_avx512_bf16});
    return &table;
  }
  if (isa == "avx512_vnni") {
    static const KernelTable table = extended(avx512_kernels, "avx512_vnni", {use_avx512_vnni});
    return &table;
  }
  if (isa == "avx512") return &avx512_kernels;
  if (isa == "avx2_vnni") {
    static const KernelTable table = extended(avx2_kernels, "avx2_vnni", {use_avx2_vnni});
    return &table;
  }
#endif
#if defined(__x86_64__)
  if (isa == "avx2") return &avx2_kernels;
#endif
  return isa == "portable" ? &portable_kernels : nullptr;
#endif
}

}  // namespace

const KernelTable* kernels_for(const char* isa) {
  for (const Isa& one : kIsas) {
    if (one.name == isa) return one.has() ? table_of(isa) : nullptr;
  }
  return nullptr;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> isas;
  for (const Isa& one : kIsas) {
    if (one.has() && table_of(one.name) != nullptr) isas.emplace_back(one.name);
  }
  if (isas.empty())
    throw std::runtime_error("the kernels were built for another processor: build them again");
  return isas;
}

namespace {

template <class E>
struct Name {
  const char* name;
  E value;
};

template <class Entry, size_t N, class E>
bool parse(const Entry (&entries)[N], const char* name, E* out) {
  for (const Entry& entry : entries) {
    if (std::strcmp(entry.name, name) != 0) continue;
    *out = entry.value;
    return true;
  }
  return false;
}

}  // namespace

#define EW_NAME(name, ...) {#name, Kind::name},

bool parse_activation(const char* name, Activation* out) {
  using Kind = Activation;
  static constexpr Name<Kind> kNames[] = {EW_ACTIVATIONS(EW_NAME)};
  return parse(kNames, name, out);
}
bool parse_linear_activation(const char* name, LinearActivation* out) {
  using Kind = LinearActivation;
  static constexpr Name<Kind> kNames[] = {EW_LINEAR_ACTIVATIONS(EW_NAME)};
  return parse(kNames, name, out);
}
bool parse_reduce(const char* name, ReduceKind* out) {
  using Kind = ReduceKind;
  static constexpr Name<Kind> kNames[] = {EW_REDUCE_KINDS(EW_NAME)};
  return parse(kNames, name, out);
}
bool parse_pool(const char* name, PoolKind* out) {
  using Kind = PoolKind;
  static constexpr Name<Kind> kNames[] = {EW_POOL_KINDS(EW_NAME)};
  return parse(kNames, name, out);
}
bool parse_elementwise(const char* name, ElementwiseFn* out) {
  using Kind = ElementwiseFn;
  static constexpr Name<Kind> kNames[] = {EW_ELEMENTWISE_FUNCTIONS(EW_NAME, EW_NAME, EW_NAME)};
  return parse(kNames, name, out);
}
bool parse_kv_format(const char* name, KvFormat* out) { return parse(kKvFormats, name, out); }

#undef EW_NAME

}  // namespace ew
