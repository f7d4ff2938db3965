// What this library needs of onnxruntime's C interface: its header isn't in the Python package, and only a
// table of functions whose order never changes and the struct of an operator are needed. Names, places and
// types are those of `onnxruntime_c_api.h` (github.com/microsoft/onnxruntime, MIT), version 17 of the
// interface.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;
struct OrtApi;  // a table of pointers to functions: see `Api`

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);  // null if onnxruntime is older
  const char* (*GetVersionString)();
};

// Element types, as operators name those of their operands.
enum OrtElementType { kOrtAnyType = 0, kOrtFloat = 1, kOrtFloat16 = 10 };
enum OrtErrorCode { kOrtFail = 1, kOrtInvalidArgument = 2 };
enum OrtPresence { kOrtRequired = 0, kOrtOptional = 1 };
enum OrtMemoryType { kOrtDefaultMemory = 0 };

// One operator: onnxruntime calls what it is made of. A status is null where all went well.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  OrtElementType (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  OrtElementType (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  OrtPresence (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  OrtPresence (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  OrtMemoryType (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
};
