#include "call_frame.h"

namespace ew::xla {
namespace {

// By XLA's numbers of types: i1, i8, i16, i32, i64, u8, u16, u32, u64, f16, f32, f64, .. bf16, .. fp8.
int64_t size_of(int type) {
  switch (type) {
    case 1:
    case 2:
    case 6:
    case 20:
      return 1;
    case 3:
    case 7:
    case 10:
    case 16:
      return 2;
    case 4:
    case 8:
    case 11:
      return 4;
    case 5:
    case 9:
    case 12:
      return 8;
    default:
      throw BadArgument{"elements of type " + std::to_string(type)};
  }
}

void check(const XlaFfiBuffer& buffer, int type, int64_t count, const std::string& what) {
  if (buffer.type != type) throw BadArgument{what + " has elements of type " + std::to_string(buffer.type)};
  if (count >= 0 && elements(buffer) != count) {
    throw BadArgument{what + " has " + std::to_string(elements(buffer)) + " elements, and not " +
                      std::to_string(count)};
  }
}

}  // namespace

int64_t elements(const XlaFfiBuffer& buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) count *= buffer.dims[i];
  return count;
}

int64_t bytes(const XlaFfiBuffer& buffer) { return elements(buffer) * size_of(buffer.type); }

const XlaFfiBuffer& CallFrame::at(const XlaFfiBuffers& buffers, const char* what, int64_t place) {
  if (place < buffers.size) return *buffers.buffers[place];
  throw BadArgument{std::string(what) + " " + std::to_string(place) + " is missing"};
}

const float* CallFrame::floats(int64_t place, int64_t count) const {
  const XlaFfiBuffer& buffer = argument(place);
  check(buffer, kXlaF32, count, "argument " + std::to_string(place));
  return static_cast<const float*>(buffer.data);
}

float* CallFrame::out(int64_t place, int64_t count) const {
  const XlaFfiBuffer& buffer = result(place);
  check(buffer, kXlaF32, count, "result " + std::to_string(place));
  return static_cast<float*>(buffer.data);
}

const int64_t* CallFrame::integers(int64_t place, int64_t count) const {
  const XlaFfiBuffer& buffer = argument(place);
  check(buffer, kXlaS64, count, "argument " + std::to_string(place));
  return static_cast<const int64_t*>(buffer.data);
}

const void* CallFrame::attribute(std::string_view name, int kind) const {
  const XlaFfiAttributes& all = frame_.attributes;
  for (int64_t i = 0; i < all.size; ++i) {
    if (name != std::string_view(all.names[i]->data, all.names[i]->size)) continue;
    if (all.types[i] == kind) return all.values[i];
    throw BadArgument{std::string(name) + " is of another type"};
  }
  throw BadArgument{std::string(name) + " is missing"};
}

int64_t CallFrame::integer(std::string_view name) const {
  const auto& scalar = *static_cast<const XlaFfiScalar*>(attribute(name, kXlaScalar));
  if (scalar.type != kXlaS64) throw BadArgument{std::string(name) + " is of another type"};
  return *static_cast<const int64_t*>(scalar.value);
}

float CallFrame::number(std::string_view name) const {
  const auto& scalar = *static_cast<const XlaFfiScalar*>(attribute(name, kXlaScalar));
  if (scalar.type != kXlaF32) throw BadArgument{std::string(name) + " is of another type"};
  return *static_cast<const float*>(scalar.value);
}

std::string CallFrame::text(std::string_view name) const {
  const auto& found = *static_cast<const XlaFfiBytes*>(attribute(name, kXlaString));
  return {found.data, found.size};
}

}  // namespace ew::xla
