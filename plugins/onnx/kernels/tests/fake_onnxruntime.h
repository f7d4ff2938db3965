// As much of onnxruntime as the library asks for, for tests without it: a table with functions at their
// places, and the structs behind them, which a test fills and reads. Any call can be refused, and what the
// library must give back is counted.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../onnxruntime_api.h"

namespace ew::fake {

// Of all threads; operators may run on several.
struct Counts {
  std::atomic<int> statuses{0}, infos{0}, domains{0};  // that exist
  std::atomic<int> calls{0};                           // of functions that can fail
  std::atomic<int> refused{-1};                        // the number of the call that fails, or -1
  std::atomic<OrtStatus*> refusal{nullptr};            // what that call returned
};
inline Counts& counts() {
  static Counts all;
  return all;
}

// Counts the objects of a class that exist.
template <std::atomic<int> Counts::* which>
struct Counted {
  Counted() { ++(counts().*which); }
  ~Counted() { --(counts().*which); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
};

}  // namespace ew::fake

struct OrtStatus {
  OrtErrorCode code;
  std::string text;
  ew::fake::Counted<&ew::fake::Counts::statuses> counted = {};
};
struct OrtValue {
  int element = 0;  // its type, by its number in the interface
  std::vector<int64_t> shape;
  std::vector<char> bytes;  // no more than it has, so that AddressSanitizer sees what is read behind it
};
struct OrtTensorTypeAndShapeInfo {
  const OrtValue& of;
  ew::fake::Counted<&ew::fake::Counts::infos> counted = {};
};
struct OrtCustomOpDomain {
  std::string name;
  std::vector<const OrtCustomOp*> ops = {};
  ew::fake::Counted<&ew::fake::Counts::domains> counted = {};
};
struct OrtSessionOptions {
  std::map<std::string, std::string> entries;
  std::vector<const OrtCustomOpDomain*> domains = {};
};
struct OrtKernelInfo {
  struct Input {
    const OrtValue* value = nullptr;  // null: left out
    bool constant = false;
  };
  std::map<std::string, int64_t> integers;
  std::map<std::string, std::string> texts;
  std::vector<Input> inputs;
};
struct OrtKernelContext {
  std::vector<const OrtValue*> inputs;  // null: left out
  bool threads = true;  // that loops run on, all iterations at once; else the caller's, in order
  OrtValue output = {};
  mutable std::vector<size_t> loops = {};  // the iterations of each loop
};
struct OrtApi {
  void* functions[275];
};

namespace ew::fake {

inline OrtStatus* failed(OrtErrorCode code, const std::string& text) { return new OrtStatus{code, text}; }

// As onnxruntime gives texts out: without memory for it, the size alone.
inline OrtStatus* give(const std::string& text, char* out, size_t* size) {
  const size_t needed = text.size() + 1, room = std::exchange(*size, needed);
  if (!out) return nullptr;
  if (room < needed) return failed(kOrtInvalidArgument, "too little room for a text");
  std::memcpy(out, text.c_str(), needed);
  return nullptr;
}

inline OrtStatus* create_status(OrtErrorCode code, const char* text) { return failed(code, text); }
inline OrtStatus* create_domain(const char* name, OrtCustomOpDomain** out) {
  *out = new OrtCustomOpDomain{name};
  return nullptr;
}
inline OrtStatus* add_op(OrtCustomOpDomain* domain, const OrtCustomOp* op) {
  domain->ops.push_back(op);
  return nullptr;
}
inline OrtStatus* add_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) {
  options->domains.push_back(domain);
  return nullptr;
}
inline OrtStatus* has_entry(const OrtSessionOptions* options, const char* key, int* out) {
  *out = options->entries.contains(key);
  return nullptr;
}
inline OrtStatus* get_entry(const OrtSessionOptions* options, const char* key, char* out, size_t* size) {
  const auto found = options->entries.find(key);
  if (found == options->entries.end()) return failed(kOrtFail, "no such entry");
  return give(found->second, out, size);
}

inline OrtStatus* integer(const OrtKernelInfo* info, const char* name, int64_t* out) {
  const auto found = info->integers.find(name);
  if (found == info->integers.end()) return failed(kOrtFail, std::string("no attribute ") + name);
  *out = found->second;
  return nullptr;
}
inline OrtStatus* text(const OrtKernelInfo* info, const char* name, char* out, size_t* size) {
  const auto found = info->texts.find(name);
  if (found == info->texts.end()) return failed(kOrtFail, std::string("no attribute ") + name);
  return give(found->second, out, size);
}
inline OrtStatus* input_count(const OrtKernelInfo* info, size_t* out) {
  *out = info->inputs.size();
  return nullptr;
}
// Of an input that is computed the value is left open: one comes out.
inline OrtStatus* constant_input(const OrtKernelInfo* info, size_t index, int* is_constant,
                                 const OrtValue** out) {
  if (index >= info->inputs.size()) return failed(kOrtInvalidArgument, "no such input of a node");
  *is_constant = info->inputs[index].constant;
  *out = info->inputs[index].value;
  return nullptr;
}

inline OrtStatus* get_data(const OrtValue* value, void** out) {
  *out = const_cast<char*>(value->bytes.data());
  return nullptr;
}
inline OrtStatus* get_info(const OrtValue* value, OrtTensorTypeAndShapeInfo** out) {
  *out = new OrtTensorTypeAndShapeInfo{*value};
  return nullptr;
}
inline void release_info(OrtTensorTypeAndShapeInfo* info) { delete info; }
inline OrtStatus* element_type(const OrtTensorTypeAndShapeInfo* info, int* out) {
  *out = info->of.element;
  return nullptr;
}
inline OrtStatus* rank(const OrtTensorTypeAndShapeInfo* info, size_t* out) {
  *out = info->of.shape.size();
  return nullptr;
}
inline OrtStatus* dimensions(const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t count) {
  std::copy_n(info->of.shape.begin(), std::min(count, info->of.shape.size()), out);
  return nullptr;
}

inline OrtStatus* get_input(const OrtKernelContext* context, size_t index, const OrtValue** out) {
  if (index >= context->inputs.size()) return failed(kOrtInvalidArgument, "no such input of a call");
  *out = context->inputs[index];
  return nullptr;
}
// The output holds NaN, so that what nobody writes shows.
inline OrtStatus* get_output(OrtKernelContext* context, size_t index, const int64_t* shape, size_t rank,
                             OrtValue** out) {
  if (index > 0) return failed(kOrtInvalidArgument, "no such output");
  int64_t count = 1;
  for (size_t i = 0; i < rank; ++i) count *= shape[i];
  context->output = {kOrtFloat, {shape, shape + rank}, std::vector<char>(static_cast<size_t>(4 * count), -1)};
  *out = &context->output;
  return nullptr;
}
inline OrtStatus* parallel_for(const OrtKernelContext* context, void (*fn)(void*, size_t), size_t count,
                               size_t, void* data) {
  context->loops.push_back(count);
  std::vector<std::thread> threads;
  for (size_t i = 1; context->threads && i < count; ++i) threads.emplace_back(fn, data, i);
  for (size_t i = 0; i < (context->threads ? std::min<size_t>(count, 1) : count); ++i) fn(data, i);
  for (std::thread& thread : threads) thread.join();
  return nullptr;
}

// `Function` but for the one call that is to be refused.
template <auto Function>
struct Refusable;
template <class... Args, OrtStatus* (*Function)(Args...)>
struct Refusable<Function> {
  static OrtStatus* call(Args... args) {
    if (counts().calls++ != counts().refused) return Function(args...);
    return counts().refusal = failed(kOrtFail, "refused");
  }
};
template <auto Function>
void* refusable() {
  return reinterpret_cast<void*>(&Refusable<Function>::call);
}

inline OrtApi make_table() {
  OrtApi table;
  std::fill(std::begin(table.functions), std::end(table.functions), reinterpret_cast<void*>(+[] {
              std::fputs("a function that the library has no use for\n", stderr);
              std::abort();
            }));
  table.functions[0] = reinterpret_cast<void*>(&create_status);
  table.functions[26] = refusable<&create_domain>();
  table.functions[27] = refusable<&add_op>();
  table.functions[28] = refusable<&add_domain>();
  table.functions[51] = refusable<&get_data>();
  table.functions[60] = refusable<&element_type>();
  table.functions[61] = refusable<&rank>();
  table.functions[62] = refusable<&dimensions>();
  table.functions[65] = refusable<&get_info>();
  table.functions[86] = refusable<&integer>();
  table.functions[87] = refusable<&text>();
  table.functions[90] = refusable<&get_input>();
  table.functions[91] = refusable<&get_output>();
  table.functions[99] = reinterpret_cast<void*>(&release_info);
  table.functions[230] = refusable<&input_count>();
  table.functions[237] = refusable<&has_entry>();
  table.functions[238] = refusable<&get_entry>();
  table.functions[249] = refusable<&constant_input>();
  table.functions[274] = refusable<&parallel_for>();
  return table;
}

// The table of the `Which`-th onnxruntime in the process.
template <int Which = 0>
const OrtApi* table() {
  static const OrtApi all = make_table();
  return &all;
}
// What that one hands out, up to a version of the interface.
template <int Which = 0, uint32_t Newest = 17>
const OrtApiBase* base() {
  static const OrtApiBase all = {
      [](uint32_t version) -> const OrtApi* { return version <= Newest ? table<Which>() : nullptr; },
      [] { return "fake"; }};
  return &all;
}

}  // namespace ew::fake
