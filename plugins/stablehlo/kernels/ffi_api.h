// What of XLA's C interface for custom calls ("FFI") is used here: its layout in memory, of version 0.3, as
// xla/ffi/api/c_api.h has it, which jaxlib's wheel contains. XLA supports a version for at least a year, and
// asks a handler for its own before it calls it.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

constexpr int kXlaFfiMajor = 0, kXlaFfiMinor = 3;

struct XlaFfiExtension {
  size_t struct_size;
  int type;  // 1: XLA asks for the metadata, and nothing else
  XlaFfiExtension* next;
};

struct XlaFfiVersion {
  size_t struct_size;
  XlaFfiExtension* extension;
  int major, minor;
};

struct XlaFfiMetadata {
  size_t struct_size;
  XlaFfiVersion version;
  uint32_t traits;
  int64_t state_type;
};

struct XlaFfiMetadataExtension {
  XlaFfiExtension base;
  XlaFfiMetadata* metadata;
};

struct XlaFfiError;
struct XlaFfiContext;

enum XlaFfiType : int {
  kXlaS32 = 4,
  kXlaS64 = 5,
  kXlaF32 = 11,
};

struct XlaFfiBuffer {
  size_t struct_size;
  XlaFfiExtension* extension;
  int type;
  void* data;
  int64_t rank;
  const int64_t* dims;
};

struct XlaFfiBytes {
  const char* data;
  size_t size;
};

struct XlaFfiScalar {
  int type;
  const void* value;
};

enum XlaFfiAttribute : int { kXlaScalar = 3, kXlaString = 4 };

// Arguments, or results: all of them buffers.
struct XlaFfiBuffers {
  size_t struct_size;
  XlaFfiExtension* extension;
  int64_t size;
  const int* types;
  XlaFfiBuffer* const* buffers;
};

struct XlaFfiAttributes {
  size_t struct_size;
  XlaFfiExtension* extension;
  int64_t size;
  const int* types;
  const XlaFfiBytes* const* names;  // in their order
  const void* const* values;
};

struct XlaFfiErrorArgs {
  size_t struct_size;
  XlaFfiExtension* extension;
  const char* message;
  int code;
};
constexpr int kXlaInvalidArgument = 3, kXlaResourceExhausted = 8;

struct XlaFfiScheduleArgs {
  size_t struct_size;
  XlaFfiExtension* extension;
  XlaFfiContext* context;
  void (*task)(void*);
  void* data;
};

struct XlaFfiThreadsArgs {
  size_t struct_size;
  XlaFfiExtension* extension;
  XlaFfiContext* context;
  int64_t* threads;
};

struct XlaFfiErrorDestroyArgs {
  size_t struct_size;
  XlaFfiExtension* extension;
  XlaFfiError* error;
};

struct XlaFfiApi {
  size_t struct_size;
  XlaFfiExtension* extension;
  XlaFfiVersion version;
  const void* internal;
  XlaFfiError* (*make_error)(XlaFfiErrorArgs*);
  void* error_message;
  void (*destroy_error)(XlaFfiErrorDestroyArgs*);
  void* others[8];  // registration, streams, types, state, device memory
  XlaFfiError* (*schedule)(XlaFfiScheduleArgs*);
  XlaFfiError* (*threads)(XlaFfiThreadsArgs*);
};

struct XlaFfiCallFrame {
  size_t struct_size;
  XlaFfiExtension* extension;
  const XlaFfiApi* api;
  XlaFfiContext* context;
  int stage;
  XlaFfiBuffers arguments, results;
  XlaFfiAttributes attributes;
  void* future;
};
}
