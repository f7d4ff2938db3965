#include "api.h"

namespace ew::ort {
namespace {

// Where functions stand in the table; onnxruntime only adds to its end.
enum Place : int {
  kCreateStatus = 0,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelInfoGetAttributeString = 87,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseTensorTypeAndShapeInfo = 99,
  kKernelInfoGetInputCount = 230,
  kHasSessionConfigEntry = 237,
  kGetSessionConfigEntry = 238,
  kKernelInfoGetConstantInputTensor = 249,
  kKernelContextParallelFor = 274,
};

// Of an element, by its number in the interface: f32, u8, f16, bf16 and e4m3fn are what weights have.
int64_t bytes_of(int element) {
  switch (element) {
    case 1:
      return 4;
    case 2:
    case 17:
      return 1;
    case 10:
    case 16:
      return 2;
    default:
      throw BadArgument{"a weight has elements of type " + std::to_string(element)};
  }
}

int64_t count_of(const std::vector<int64_t>& shape) {
  int64_t all = 1;
  for (const int64_t size : shape) all *= size;
  return all;
}

}  // namespace

// Shape and type of a value.
struct Api::Info {
  const Api& api;
  OrtTensorTypeAndShapeInfo* info = nullptr;

  Info(const Api& of, const OrtValue* value) : api(of) {
    api.check(api.at<OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>(kGetTensorTypeAndShape)(
        value, &info));
  }
  ~Info() { api.at<void(OrtTensorTypeAndShapeInfo*)>(kReleaseTensorTypeAndShapeInfo)(info); }
  Info(const Info&) = delete;
  Info& operator=(const Info&) = delete;

  std::vector<int64_t> shape() const {
    size_t rank = 0;
    api.check(
        api.at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)>(kGetDimensionsCount)(info, &rank));
    std::vector<int64_t> sizes(rank);
    api.check(api.at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>(kGetDimensions)(
        info, sizes.data(), rank));
    return sizes;
  }
  int element() const {
    int kind = 0;
    api.check(api.at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)>(kGetTensorElementType)(info, &kind));
    return kind;
  }
};

int64_t Tensor::count() const { return count_of(shape); }

void Api::check(OrtStatus* status) {
  if (status) throw Refused{status};
}

void* Api::data_of(const OrtValue* value) const {
  void* data = nullptr;
  check(at<OrtStatus*(const OrtValue*, void**)>(kGetTensorMutableData)(value, &data));
  return data;
}

OrtStatus* Api::status(OrtErrorCode code, const char* text) const {
  return at<OrtStatus*(OrtErrorCode, const char*)>(kCreateStatus)(code, text);
}

OrtCustomOpDomain* Api::new_domain(const char* name) const {
  OrtCustomOpDomain* domain = nullptr;
  check(at<OrtStatus*(const char*, OrtCustomOpDomain**)>(kCreateCustomOpDomain)(name, &domain));
  return domain;
}

void Api::add(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
  check(at<OrtStatus*(OrtCustomOpDomain*, const OrtCustomOp*)>(kCustomOpDomainAdd)(domain, op));
}

void Api::add(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
  check(at<OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>(kAddCustomOpDomain)(options, domain));
}

std::string Api::config(const OrtSessionOptions* options, const char* key) const {
  int there = 0;
  check(at<OrtStatus*(const OrtSessionOptions*, const char*, int*)>(kHasSessionConfigEntry)(options, key,
                                                                                            &there));
  if (!there) return "";
  const auto get =
      at<OrtStatus*(const OrtSessionOptions*, const char*, char*, size_t*)>(kGetSessionConfigEntry);
  size_t size = 0;  // with the 0 at its end
  check(get(options, key, nullptr, &size));
  std::string text(size, '\0');
  check(get(options, key, text.data(), &size));
  text.resize(size - 1);
  return text;
}

int64_t Api::integer(const OrtKernelInfo* info, const char* attribute) const {
  int64_t value = 0;
  check(at<OrtStatus*(const OrtKernelInfo*, const char*, int64_t*)>(kKernelInfoGetAttributeInt64)(
      info, attribute, &value));
  return value;
}

std::string Api::text(const OrtKernelInfo* info, const char* attribute) const {
  const auto get =
      at<OrtStatus*(const OrtKernelInfo*, const char*, char*, size_t*)>(kKernelInfoGetAttributeString);
  size_t size = 0;
  check(get(info, attribute, nullptr, &size));
  std::string value(size, '\0');
  check(get(info, attribute, value.data(), &size));
  value.resize(size - 1);
  return value;
}

size_t Api::inputs(const OrtKernelInfo* info) const {
  size_t count = 0;
  check(at<OrtStatus*(const OrtKernelInfo*, size_t*)>(kKernelInfoGetInputCount)(info, &count));
  return count;
}

std::optional<int64_t> Api::constant_bytes(const OrtKernelInfo* info, size_t input) const {
  if (input >= inputs(info)) return {};
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(at<OrtStatus*(const OrtKernelInfo*, size_t, int*, const OrtValue**)>(
      kKernelInfoGetConstantInputTensor)(info, input, &is_constant, &value));
  if (!is_constant || !value) return {};
  const Info of(*this, value);
  return count_of(of.shape()) * bytes_of(of.element());
}

const OrtValue* Api::value(const OrtKernelContext* context, size_t index) const {
  const OrtValue* found = nullptr;
  check(at<OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**)>(kKernelContextGetInput)(
      context, index, &found));
  return found;
}

Tensor Api::input(const OrtKernelContext* context, size_t index) const {
  const OrtValue* found = value(context, index);
  return found ? Tensor{data_of(found), Info(*this, found).shape()} : Tensor();
}

const void* Api::data(const OrtKernelContext* context, size_t index) const {
  const OrtValue* found = value(context, index);
  return found ? data_of(found) : nullptr;
}

void* Api::output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape) const {
  OrtValue* value = nullptr;
  check(at<OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>(
      kKernelContextGetOutput)(context, index, shape.data(), shape.size(), &value));
  return data_of(value);
}

void Api::parallel_for(const OrtKernelContext* context, void (*fn)(void* data, size_t i), size_t count,
                       void* data) const {
  check(at<OrtStatus*(const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(
      kKernelContextParallelFor)(context, fn, count, 0, data));
}

}  // namespace ew::ort
