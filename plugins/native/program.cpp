#include "program.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <stdexcept>

#include "ops/op.h"
#include "step_verifier.h"

namespace ew {
namespace {

// Coefficients and sizes are held so far below 2^63 that evaluating an expression cannot overflow.
constexpr int64_t kMaxCoefficient = int64_t{1} << 40;

[[noreturn]] void fail(const std::string& subject, const std::string& problem) {
  throw std::invalid_argument(subject + ": " + problem);
}

bool sane(const Affine& a) {
  const auto ok = [](int64_t v) { return -kMaxCoefficient <= v && v <= kMaxCoefficient; };
  return ok(a.constant) && ok(a.t) && ok(a.b) && ok(a.r);
}

template <class E>
struct Name {
  const char* name;
  E value;
};
constexpr Name<Dtype> kDtypes[] = {
    {"f32", Dtype::f32}, {"bf16", Dtype::bf16}, {"f16", Dtype::f16}, {"i32", Dtype::i32}, {"i8", Dtype::i8},
    {"i4", Dtype::i4},   {"u4", Dtype::u4},     {"fp8", Dtype::fp8}, {"i5", Dtype::i5},   {"u5", Dtype::u5},
    {"i6", Dtype::i6},   {"iq4", Dtype::iq4},   {"fp4", Dtype::fp4}, {"i3", Dtype::i3},   {"u3", Dtype::u3},
    {"i2", Dtype::i2},   {"u2", Dtype::u2}};
constexpr Name<PortCheck> kChecks[] = {{"none", PortCheck::none},       {"index", PortCheck::index},
                                       {"row", PortCheck::row},         {"starts", PortCheck::starts},
                                       {"lengths", PortCheck::lengths}, {"segments", PortCheck::segments},
                                       {"slots", PortCheck::slots},     {"table", PortCheck::table}};
// How many values along K lie side by side, and what they may be. runtime/shared/panel_layouts.py has the
// same depths for what packs weights.
struct Layout {
  const char* name;
  WeightLayout value;
  int64_t depth;
  uint32_t dtypes;
};
constexpr uint32_t any_of(std::initializer_list<Dtype> dtypes) {
  uint32_t bits = 0;
  for (const Dtype dtype : dtypes) bits |= 1u << static_cast<int>(dtype);
  return bits;
}
constexpr Layout kLayouts[] = {
    {"rows", WeightLayout::rows, 1, any_of({Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i32, Dtype::i8})},
    {"panel32", WeightLayout::panel32, 1, any_of({Dtype::f32, Dtype::f16, Dtype::fp8})},
    {"panel32x2", WeightLayout::panel32x2, 2, any_of({Dtype::bf16})},
    {"panel32x4", WeightLayout::panel32x4, 4, any_of({Dtype::i8})},
    {"panel32x8", WeightLayout::panel32x8, 8, any_of({Dtype::i4, Dtype::u4, Dtype::iq4, Dtype::fp4})},
    {"planes32", WeightLayout::planes32, 16,
     any_of({Dtype::i5, Dtype::u5, Dtype::i6, Dtype::i3, Dtype::u3, Dtype::i2, Dtype::u2})},
    {"blocks8", WeightLayout::blocks8, 10, any_of({Dtype::i8})},
    {"blocks16", WeightLayout::blocks16, 18, any_of({Dtype::i8})},
    // What isn't kept is zero, which a u4 has no word for.
    {"sparse32", WeightLayout::sparse32, 32, any_of({Dtype::f32, Dtype::bf16, Dtype::i8, Dtype::i4})}};

template <class Entry, size_t N, class E>
const Entry& find(const Entry (&entries)[N], E value) {
  return *std::find_if(entries, entries + N - 1, [&](const Entry& e) { return e.value == value; });
}

template <class Entry, size_t N, class E>
bool parse(const Entry (&entries)[N], const char* name, E* out) {
  const auto found =
      std::find_if(entries, entries + N, [&](const Entry& e) { return std::strcmp(e.name, name) == 0; });
  if (found == entries + N) return false;
  *out = found->value;
  return true;
}

bool fits(WeightLayout layout, Dtype dtype) { return (find(kLayouts, layout).dtypes & any_of({dtype})) != 0; }

}  // namespace

const char* name_of(Dtype dtype) { return find(kDtypes, dtype).name; }
const char* name_of(WeightLayout layout) { return find(kLayouts, layout).name; }
bool parse_dtype(const char* name, Dtype* out) { return parse(kDtypes, name, out); }
bool parse_layout(const char* name, WeightLayout* out) { return parse(kLayouts, name, out); }
bool parse_check(const char* name, PortCheck* out) { return parse(kChecks, name, out); }

std::map<std::string, int64_t> layout_depths() {
  std::map<std::string, int64_t> depths;
  for (const Layout& layout : kLayouts) depths.emplace(layout.name, layout.depth);
  return depths;
}

std::string Affine::text() const {
  std::string result;
  const auto term = [&result](int64_t coefficient, const char* symbol) {
    if (coefficient == 0) return;
    if (!result.empty()) result += " + ";
    result += coefficient == 1 ? symbol : std::to_string(coefficient) + "*" + symbol;
  };
  term(t, "T");
  term(b, "B");
  term(r, "R");
  if (constant != 0 || result.empty()) result += (result.empty() ? "" : " + ") + std::to_string(constant);
  return result;
}

int64_t Weight::elements() const {
  int64_t count = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    const bool panels = layout != WeightLayout::rows;
    const int64_t multiple = panels && i + 2 == shape.size()   ? kPanel
                             : panels && i + 1 == shape.size() ? find(kLayouts, layout).depth
                                                               : 1;
    const int64_t size = (std::min(shape[i], kMaxCoefficient) + multiple - 1) / multiple * multiple;
    if (shape[i] > kMaxCoefficient || __builtin_mul_overflow(count, size, &count) || count > kMaxCoefficient)
      fail("weight " + name, "it has more than 2^40 elements");
  }
  return count;
}

std::string step_title(size_t index, const Step& step) {
  std::string title = "step " + std::to_string(index) + " " + step.op_name;
  if (!step.where.empty()) title += " (" + step.where + ")";
  return title;
}

int Program::add_cache_group(CacheGroup group, int64_t block_size) {
  const std::string subject = "cache group " + group.name;
  if (!steps_.empty()) fail(subject, "cache groups come before the steps");
  if (group.state_size < 0 || group.state_size > kMaxCoefficient) fail(subject, "a state beyond 2^40 values");
  group.block_tokens = block_size;
  if (group.state_size > 0 ? block_size < 1 : block_size != kBlock) {
    fail(subject,
         "blocks of " + std::to_string(block_size) + " slots; the kernels take " + std::to_string(kBlock));
  }
  if (!group.between(1, INT64_MAX)) fail(subject, "a size below 1");
  if (!group.between(1, 1 << 20)) fail(subject, "a size above 2^20");
  if (has_few_bits(group.format) && group.summaries) fail(subject, "rotated keys have no summaries");
  if (!takes_head(group.format, Side::keys, group.key_size) ||
      !takes_head(group.format, Side::values, group.value_size))
    fail(subject, "heads that its format doesn't take");
  if (group.values_in_keys && (group.value_size > group.key_size || has_few_bits(group.format)))
    fail(subject, "values that are a part of keys have more channels than these, or keys are rotated");
  if (group.layers.empty() && regions_.empty())
    fail(subject, "it has no layers");  // another stage may have them
  for (const CacheGroup& other : groups_) {
    if (other.name == group.name) fail(subject, "the name is taken");
  }
  const int index = static_cast<int>(groups_.size());
  for (const int layer : group.layers) {
    if (std::count(group.layers.begin(), group.layers.end(), layer) > 1) {
      fail(subject, "layer " + std::to_string(layer) + " is listed twice");
    }
    caches_.push_back({index, layer});
  }
  group.attention_window = -1;
  groups_.push_back(std::move(group));
  return index;
}

int Program::add_port(Port port) {
  const std::string subject = "step input " + port.name;
  if (!steps_.empty()) fail(subject, "step inputs come before the steps");
  if (port.group >= static_cast<int>(groups_.size())) fail(subject, "there is no such cache group");
  if (port.dtype != Dtype::i32 && port.dtype != Dtype::f32) fail(subject, "it is neither i32 nor f32");
  if (port.dtype != Dtype::i32 && port.check != PortCheck::none) fail(subject, "only i32 is checked");
  if (port.shape.empty() || port.shape.size() > 2) fail(subject, "its rank is not 1 or 2");
  for (size_t i = 0; i < port.shape.size(); ++i) {
    if (!sane(port.shape[i])) fail(subject, "a coefficient beyond 2^40");
    if (i > 0 && !port.shape[i].is(port.shape[i].constant)) fail(subject, "its rows differ in size");
  }
  for (const Port& other : ports_) {
    if (other.name == port.name) fail(subject, "the name is taken");
  }
  ports_.push_back(std::move(port));
  return static_cast<int>(ports_.size()) - 1;
}

int Program::add_weight(Weight weight, int64_t bytes) {
  const std::string subject = "weight " + weight.name;
  for (const int64_t size : weight.shape) {
    if (size < 1) fail(subject, "a size below 1");
  }
  const std::string layout = std::string("layout ") + name_of(weight.layout);
  const bool matrix = weight.shape.size() == 2 || weight.shape.size() == 3;
  if (weight.layout != WeightLayout::rows && !matrix) fail(subject, layout + " takes rank 2 or 3");
  if (weight.layout == WeightLayout::sparse32 && (weight.shape.size() != 2 || weight.shape[1] % 4 != 0))
    fail(subject, layout + " takes rank 2 and a multiple of 4 columns");
  if (!fits(weight.layout, weight.dtype)) fail(subject, layout + " takes no " + name_of(weight.dtype));
  if (weight.bytes() != bytes) {
    fail(subject, "it has " + std::to_string(bytes) + " bytes, where its shape and layout take " +
                      std::to_string(weight.elements()) + " elements of " +
                      (few_bits(weight.dtype) > 0 ? std::to_string(few_bits(weight.dtype)) + " bits"
                                                  : std::to_string(element_bytes(weight.dtype))));
  }
  if (weight.data == nullptr || reinterpret_cast<uintptr_t>(weight.data) % 64 != 0) {
    fail(subject, "its memory is not aligned to 64 bytes");
  }
  weights_.push_back(std::move(weight));
  return static_cast<int>(weights_.size()) - 1;
}

int Program::add_buffer(Buffer buffer) {
  if (!sane(buffer.size) || !sane(buffer.offset)) fail("buffer " + buffer.name, "a coefficient beyond 2^40");
  if (buffer.region && !regions_.count(buffer.region))
    fail("buffer " + buffer.name, "region " + std::to_string(buffer.region) + " has no size");
  buffers_.push_back(std::move(buffer));
  return static_cast<int>(buffers_.size()) - 1;
}

void Program::set_arena(Affine bytes) {
  if (!sane(bytes)) fail("arena_bytes", "a coefficient beyond 2^40");
  arena_bytes_ = bytes;
}

void Program::set_region(int region, Affine bytes) {
  const std::string subject = "region " + std::to_string(region);
  if (region < 1 || region >= Exchange::kRegions) fail(subject, "it is out of range");
  if (!sane(bytes)) fail(subject, "a coefficient beyond 2^40");
  regions_[region] = bytes;
}

void Program::set_ranks(RankGroup group) {
  if (group.first < 0 || group.count < 1) fail("ranks", "there are none");
  ranks_ = group;
}

void Program::verify_operand(const Operand& operand, const std::string& subject) const {
  const std::string name = subject + ": operand " + operand.name;
  const auto in_list = [&operand](size_t size) {
    return operand.index >= 0 && static_cast<size_t>(operand.index) < size;
  };
  if (operand.kind == OperandKind::cache) {
    if (!in_list(caches_.size())) fail(name, "there is no such cache");
    return;
  }
  if (only_of_weights(operand.dtype) && operand.kind != OperandKind::weight)
    fail(name, std::string("only a weight can be ") + name_of(operand.dtype));
  if (operand.rank() < 1 || operand.rank() > kMaxRank) fail(name, "its rank is not in 1 .. 4");
  if (operand.strides.size() != operand.shape.size()) fail(name, "strides and shape differ in rank");
  for (const auto& list : {operand.shape, operand.strides, {operand.offset}}) {
    for (const Affine& a : list) {
      if (!sane(a)) fail(name, "a coefficient beyond 2^40");
    }
  }
  switch (operand.kind) {
    case OperandKind::buffer:
      if (!in_list(buffers_.size())) fail(name, "there is no such buffer");
      break;
    case OperandKind::weight: {
      if (!in_list(weights_.size())) fail(name, "there is no such weight");
      const Weight& weight = weights_[operand.index];
      if (weight.dtype != operand.dtype) fail(name, "its dtype is not the weight's");
      if (weight.layout == WeightLayout::rows) break;
      // The memory order of a panel weight is its layout's, so a view of it has no meaning.
      bool whole = static_cast<size_t>(operand.rank()) == weight.shape.size() && operand.offset.is(0);
      for (size_t i = 0; whole && i < weight.shape.size(); ++i) whole = operand.shape[i].is(weight.shape[i]);
      if (!whole)
        fail(name, std::string("a weight of layout ") + name_of(weight.layout) + " can only be used whole");
      break;
    }
    case OperandKind::input: {
      if (!in_list(ports_.size())) fail(name, "there is no such step input");
      const Port& port = ports_[operand.index];
      if (operand.dtype != port.dtype) fail(name, std::string("the step input is ") + name_of(port.dtype));
      if (port.check == PortCheck::table) {  // its width is the caller's choice
        if (operand.rank() != 2 || operand.shape[0] != kRequests) fail(name, "its shape is not [B, blocks]");
        break;
      }
      bool whole = operand.shape == port.shape && operand.offset.is(0);
      int64_t stride = 1;
      for (int i = operand.rank() - 1; whole && i >= 0; --i) {
        whole = operand.strides[i].is(stride);
        stride *= std::max<int64_t>(operand.shape[i].constant, 1);
      }
      if (!whole) {
        std::string shape;
        for (const Affine& size : port.shape) shape += (shape.empty() ? "" : ", ") + size.text();
        fail(name, "it is not the whole step input, of shape [" + shape + "]");
      }
      break;
    }
    case OperandKind::cache:
      break;
  }
}

void Program::add_step(const std::string& op, std::vector<Operand> inputs, std::vector<Operand> outputs,
                       const AttributeMap& attributes, const std::string& where) {
  Step step;
  step.op_name = op;
  step.where = where;
  step.inputs = std::move(inputs);
  step.outputs = std::move(outputs);
  const std::string title = step_title(steps_.size(), step);
  for (const Operand& operand : step.inputs) verify_operand(operand, title);
  for (const Operand& operand : step.outputs) {
    verify_operand(operand, title);
    if (operand.kind != OperandKind::buffer)
      fail(title + ": operand " + operand.name, "an output must be a buffer");
    for (int i = 0; i < operand.rank(); ++i) {
      if (operand.strides[i].is(0) && !operand.shape[i].is(1))
        fail(title + ": operand " + operand.name,
             "an output has a place for every element, so no stride of 0");
    }
  }
  StepVerifier(*this, step, title).verify(attributes);
  of_several_ranks_ |= step.op->meets;
  steps_.push_back(std::move(step));
}

void Program::set_logits(Operand logits) {
  verify_operand(logits, "output logits");
  const bool ok = logits.kind == OperandKind::buffer && logits.dtype == Dtype::f32 && logits.rank() == 2 &&
                  logits.shape[0] == kRows && logits.shape[1] == Affine{logits.shape[1].constant} &&
                  logits.shape[1].constant > 0 && logits.strides[1].is(1);
  if (!ok) fail("output logits", "it is not an f32 buffer of shape [R, V] with unit inner stride");
  logits_ = std::move(logits);
}

void Program::add_tap(const std::string& name, size_t step, size_t output) {
  if (step >= steps_.size() || output >= steps_[step].outputs.size())
    fail("output " + name, "there is no such step, or output of one");
  keep_tap({name, step, steps_[step].outputs[output]});
}

void Program::add_output(const std::string& name, Operand operand) {
  verify_operand(operand, "output " + name);
  if (operand.kind != OperandKind::buffer)
    fail("output " + name, "operand " + operand.name + " is no buffer");
  keep_tap({name, steps_.size(), std::move(operand)});
}

void Program::keep_tap(Tap tap) {
  const std::string subject = "output " + tap.name;
  const Operand& operand = tap.operand;
  const bool floats =
      operand.dtype == Dtype::f32 || operand.dtype == Dtype::bf16 || operand.dtype == Dtype::f16;
  const bool ok =
      floats && operand.rank() == 2 &&
      (operand.shape[0] == kTokens || operand.shape[0] == kRows || operand.shape[0] == kRequests) &&
      operand.shape[1].is(operand.shape[1].constant) && operand.shape[1].constant > 0;
  if (!ok)
    fail(subject, "operand " + operand.name + " is not of floats, [T, width], [R, width] or [B, width]");
  taps_.push_back(std::move(tap));
}

void Program::finish() {
  if (logits_.shape.empty() && taps_.empty() && !of_several_ranks_)
    throw std::invalid_argument("the program has no output");
  for (const PortCheck needed : {PortCheck::starts, PortCheck::lengths, PortCheck::row}) {
    if (find_port(needed) < 0) throw std::invalid_argument("the program lacks an array of every step");
  }
  finished_ = true;
}

int Program::find_cache(const std::string& group, int layer) const {
  for (size_t i = 0; i < caches_.size(); ++i) {
    if (caches_[i].layer == layer && groups_[caches_[i].group].name == group) return static_cast<int>(i);
  }
  return -1;
}

int Program::find_port(PortCheck check, int group) const {
  for (size_t i = 0; i < ports_.size(); ++i) {
    if (ports_[i].check == check && ports_[i].group == group) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace ew
