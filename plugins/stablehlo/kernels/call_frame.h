// A custom call of XLA with C++ types: what it is given, by place and by name. What can't be taken throws
// BadArgument.
#pragma once

#include <string>
#include <string_view>

#include "../../native/panel_linear.h"
#include "ffi_api.h"

namespace ew::xla {

class CallFrame {
 public:
  explicit CallFrame(const XlaFfiCallFrame* frame) : frame_(*frame) {}

  int64_t arguments() const { return frame_.arguments.size; }
  const XlaFfiBuffer& argument(int64_t place) const { return at(frame_.arguments, "argument", place); }
  const XlaFfiBuffer& result(int64_t place) const { return at(frame_.results, "result", place); }
  // Floats of 32 bits: an argument that has so many elements, or any number of them (-1).
  const float* floats(int64_t place, int64_t count = -1) const;
  float* out(int64_t place, int64_t count) const;
  const int64_t* integers(int64_t place, int64_t count) const;

  int64_t integer(std::string_view name) const;
  float number(std::string_view name) const;
  std::string text(std::string_view name) const;

  const XlaFfiApi& api() const { return *frame_.api; }
  XlaFfiContext* context() const { return frame_.context; }

 private:
  static const XlaFfiBuffer& at(const XlaFfiBuffers& buffers, const char* what, int64_t place);
  const void* attribute(std::string_view name, int kind) const;

  const XlaFfiCallFrame& frame_;
};

int64_t elements(const XlaFfiBuffer& buffer);
// Of any type that graphs here have.
int64_t bytes(const XlaFfiBuffer& buffer);

}  // namespace ew::xla
