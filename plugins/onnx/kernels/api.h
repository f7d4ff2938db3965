// onnxruntime's functions with C++ types: what fails throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../../native/panel_linear.h"  // BadArgument
#include "onnxruntime_api.h"

namespace ew::ort {

constexpr uint32_t kApiVersion = 17;  // the first whose operators may use the session's threads

// onnxruntime's own error. Whoever catches it gives the status back to onnxruntime, which owns it then.
struct Refused {
  OrtStatus* status;
};

struct Tensor {
  const void* data = nullptr;
  std::vector<int64_t> shape;

  int64_t count() const;  // of elements
};

// The functions, which throw Refused where nothing else is said.
class Api {
 public:
  explicit Api(const OrtApi* table) : table_(reinterpret_cast<void* const*>(table)) {}

  // A new one, which the caller owns. Throws nothing.
  OrtStatus* status(OrtErrorCode code, const char* text) const;

  OrtCustomOpDomain* new_domain(const char* name) const;
  void add(OrtCustomOpDomain* domain, const OrtCustomOp* op) const;
  void add(OrtSessionOptions* options, OrtCustomOpDomain* domain) const;
  // An entry of the session's options; "" if there is none.
  std::string config(const OrtSessionOptions* options, const char* key) const;

  int64_t integer(const OrtKernelInfo* info, const char* attribute) const;
  std::string text(const OrtKernelInfo* info, const char* attribute) const;
  size_t inputs(const OrtKernelInfo* info) const;  // those at the end that are left out don't count
  // Bytes of an input that is the file's; none where it is left out, or computed.
  std::optional<int64_t> constant_bytes(const OrtKernelInfo* info, size_t input) const;

  Tensor input(const OrtKernelContext* context, size_t index) const;
  const void* data(const OrtKernelContext* context, size_t index) const;  // null where it is left out
  void* output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape) const;
  // fn(data, i) for every i in 0 .. count-1, on the session's threads.
  void parallel_for(const OrtKernelContext* context, void (*fn)(void* data, size_t i), size_t count,
                    void* data) const;

 private:
  struct Info;

  template <class Function>
  Function* at(int place) const {
    return reinterpret_cast<Function*>(table_[place]);
  }
  static void check(OrtStatus* status);
  void* data_of(const OrtValue* value) const;
  const OrtValue* value(const OrtKernelContext* context, size_t index) const;

  void* const* table_;
};

}  // namespace ew::ort
