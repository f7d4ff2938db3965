#include "linear_problem.h"

#include <sstream>

#include "../../../cpu/tests/reference.h"
#include "../../../native/tests/test_tensors.h"
#include "../session_threads.h"

namespace ew::testing {
namespace {

constexpr int kUint8 = 2, kBfloat16 = 16, kFloat8 = 17;  // elements, as the interface numbers them

template <class T>
std::vector<char> bytes_of(const std::vector<T>& values) {
  const auto* begin = reinterpret_cast<const char*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

int64_t groups_of(int64_t k, int64_t group) { return group > 0 ? (k + group - 1) / group : 1; }

bool is_integer(const Form& form) { return form.storage == "int8" || form.storage == "int4"; }

struct ByReference {
  bool fused;
  void operator()(const LinearArgs& a) const { reference::linear(a, fused); }
  void operator()(const LinearBf16Args& a) const { reference::linear_bf16(a, fused); }
  void operator()(const LinearFp8Args& a) const { reference::linear_fp8(a, fused); }
  void operator()(const LinearInt8Args& a) const { reference::linear_int8(a, fused); }
  void operator()(const LinearInt4Args& a) const { reference::linear_int4(a, fused); }
};

struct ByKernels {
  const KernelTable& kernels;
  Workers& pool;
  void operator()(const LinearArgs& a) const { kernels.linear(a, pool); }
  void operator()(const LinearBf16Args& a) const { kernels.linear_bf16(a, pool); }
  void operator()(const LinearFp8Args& a) const { kernels.linear_fp8(a, pool); }
  void operator()(const LinearInt8Args& a) const { kernels.linear_int8(a, pool); }
  void operator()(const LinearInt4Args& a) const { kernels.linear_int4(a, pool); }
};

}  // namespace

std::string describe(const Form& form, const Shape& shape, const Ends& ends) {
  std::ostringstream text;
  text << (form.sparse ? "sparse " : "") << form.storage << " groups " << form.weight_group << "/"
       << form.activation_group << (form.offsets ? " offsets" : "") << ", rows";
  for (const int64_t rows : shape.rows) text << " " << rows;
  text << " n=" << shape.n << " k=" << shape.k << " " << ends.activation << (ends.bias ? " bias " : " ");
  return text.str();
}

Problem::Problem(const Form& form, const Shape& shape, const Ends& ends)
    : form_(form), n_(shape.n), k_(shape.k), ends_(ends) {
  for (const int64_t rows : shape.rows) m_ *= rows;
  std::vector<int64_t> x_shape = shape.rows;
  x_shape.push_back(k_);
  x = {kOrtFloat, x_shape, bytes_of(random_floats(m_ * k_, 1))};
  make_weight();
  const int64_t panels = (n_ + 31) / 32, groups = groups_of(k_, form.weight_group);
  const auto halves = [&](unsigned seed) {
    return OrtValue{kOrtFloat16, {panels, groups, 32}, bytes_of(random_half_panels(n_, groups, seed))};
  };
  if (is_integer(form) || form.storage == "fp8") scales = halves(4);
  if (form.offsets) offsets = halves(5);
  if (ends.bias) bias = {kOrtFloat, {n_}, bytes_of(random_floats(n_, 2))};
}

void Problem::make_weight() {
  const int64_t count = n_ * k_;
  if (form_.sparse) {
    constexpr int32_t pairs[] = {0 | 1 << 2, 0 | 2 << 2, 0 | 3 << 2, 1 | 2 << 2, 1 | 3 << 2, 2 | 3 << 2};
    for (const int32_t which : random_ints(count / 4, 6, 7)) places_.push_back(pairs[which]);
  }
  if (form_.storage == "f32") {
    const auto rows = kept(random_floats(count, 3), 0.0f);
    store(rows, bytes_of(to_panels(rows, n_, k_)), 32, kOrtFloat, 0.0f);
  } else if (form_.storage == "bf16") {
    std::vector<uint16_t> rows;
    for (const float value : random_floats(count, 3)) rows.push_back(reference::to_bf16(value));
    rows = kept<uint16_t>(rows, 0);
    store<uint16_t>(rows, bytes_of(to_packed_panels<uint16_t>(rows, n_, k_, 2, 0)), 16, kBfloat16, 0);
  } else if (form_.storage == "int4") {
    const auto rows = kept(random_ints(count, 16, 3), 8);
    store(rows, bytes_of(to_panels_int4(rows, n_, k_)), 4, kUint8, 8);
  } else {
    const bool is_fp8 = form_.storage == "fp8";
    std::vector<uint8_t> rows;
    for (const int32_t value : random_ints(count, 256, 3)) {
      const bool is_nan = is_fp8 && value % 128 == 127;
      rows.push_back(static_cast<uint8_t>(is_nan ? 0 : value));
    }
    rows = kept<uint8_t>(rows, 128);
    const auto panels = to_packed_panels<uint8_t>(rows, n_, k_, is_fp8 ? 1 : 4, is_fp8 ? 0 : 128);
    store<uint8_t>(rows, bytes_of(panels), 8, is_fp8 ? kFloat8 : kUint8, 128);
  }
}

// [N, K] with `zero` for what isn't kept.
template <class T>
std::vector<T> Problem::kept(std::vector<T> rows, T zero) const {
  for (size_t i = 0; form_.sparse && i < rows.size(); ++i) {
    const int32_t both = places_[i / 4], j = static_cast<int32_t>(i % 4);
    if (j != (both & 3) && j != both >> 2) rows[i] = zero;
  }
  return rows;
}

// [N, K] as the file has it: in dense panels, or in sparse32 (../../cpu/kernels/sparse_panel.h).
template <class T>
void Problem::store(const std::vector<T>& rows, std::vector<char> dense, int64_t bits, int element, T zero) {
  const int64_t panels = (n_ + 31) / 32, blocks = (k_ + 31) / 32, block_bytes = 128 + 64 * bits;
  dense_ = std::move(dense);
  weight.bytes =
      form_.sparse ? std::vector<char>(static_cast<size_t>(panels * blocks * block_bytes)) : dense_;
  weight.element = form_.sparse ? kUint8 : element;
  const auto item = static_cast<int64_t>(bits == 4 || form_.sparse ? 1 : sizeof(T));
  weight.shape = {panels, static_cast<int64_t>(weight.bytes.size()) / panels / item};
  for (int64_t i = 0; form_.sparse && i < panels * 32; ++i) {
    for (int64_t q = 0; q < blocks * 8; ++q) {
      char* block = weight.bytes.data() + (i / 32 * blocks + q / 8) * block_bytes;
      const bool inside = i < n_ && 4 * q < k_;
      const int32_t both = inside ? places_[static_cast<size_t>(i * k_ / 4 + q)] : 0 | 1 << 2;
      block[i % 32 * 4 + q % 8 / 2] |= static_cast<char>(both << (q % 2 * 4));
      for (const int64_t which : {0, 1}) {
        const int64_t at = i * k_ + 4 * q + (which == 0 ? both & 3 : both >> 2);
        const T value = inside ? rows[static_cast<size_t>(at)] : zero;
        const int64_t pair = bits == 32 ? which * 32 + i % 32 : i % 32 * 2 + which;
        if (bits == 4) {  // two quads share bytes
          block[128 + q % 8 / 2 * 64 + pair] |= static_cast<char>(static_cast<int>(value) << (q % 2 * 4));
        } else {
          std::memcpy(block + 128 + (q % 8 * 64 + pair) * bits / 8, &value, sizeof value);
        }
      }
    }
  }
}

std::vector<const OrtValue*> Problem::inputs() const {
  std::vector<const OrtValue*> all;
  for (const OrtValue* value : {&x, &weight, &scales, &offsets, &bias}) {
    all.push_back(value->shape.empty() ? nullptr : value);
  }
  while (!all.back()) all.pop_back();
  return all;
}

OrtKernelInfo Problem::info() const {
  OrtKernelInfo info = {{{"n", n_},
                         {"k", k_},
                         {"sparse", form_.sparse},
                         {"weight_group", form_.weight_group},
                         {"activation_group", form_.activation_group}},
                        {{"storage", form_.storage}, {"activation", ends_.activation}},
                        {}};
  for (const OrtValue* value : inputs()) {
    info.inputs.push_back({value, value == &weight || value == &scales || value == &offsets});
  }
  return info;
}

std::vector<int64_t> Problem::y_shape() const {
  std::vector<int64_t> shape = x.shape;
  shape.back() = n_;
  return shape;
}

const std::vector<float>& Problem::expected(const std::string& isa) {
  const bool exact = ends_.activation.empty() || ends_.activation.starts_with("relu");
  const bool by_reference =
      exact && (form_.storage != "bf16" || (isa != "avx512_bf16" && isa != "avx512_amx"));
  const bool fused = isa != "portable";
  auto& found = expected_[!by_reference ? isa : fused ? "fused" : "twice"];
  if (!found.empty()) return found;
  if (by_reference) return found = compute(dense_, false, ByReference{fused});
  const ort::Api api(fake::table());
  ort::SessionThreads alone(api, nullptr, 1);
  return found = compute(weight.bytes, form_.sparse, ByKernels{*kernels_for(isa.c_str()), alone});
}

template <class Call>
std::vector<float> Problem::compute(const std::vector<char>& stored, bool sparse, const Call& call) const {
  const int64_t groups = groups_of(k_, form_.activation_group), stride = (k_ + 3) / 4 * 4;
  const auto* floats = reinterpret_cast<const float*>(x.bytes.data());
  std::vector<float> y = filled(m_ * n_, kNaN);
  Workspace workspace;
  const auto finish = [&](auto a) {
    a.m = m_, a.n = n_, a.k = k_;
    a.weight = reinterpret_cast<decltype(a.weight)>(stored.data());
    if (ends_.bias) a.bias = reinterpret_cast<const float*>(bias.bytes.data());
    a.y = y.data(), a.y_stride = n_;
    parse_linear_activation(ends_.activation.c_str(), &a.epilogue.activation);
    if constexpr (requires { a.weight_scales; }) {
      a.weight_scales = reinterpret_cast<const uint16_t*>(scales.bytes.data());
    }
    if constexpr (requires { a.sparse; }) a.sparse = sparse;
    if constexpr (requires { a.workspace; }) a.workspace = &workspace;
    call(a);
  };
  std::vector<int8_t> values(static_cast<size_t>(m_ * stride));
  std::vector<float> value_scales = filled(m_ * groups, 0);
  std::vector<int32_t> sums(value_scales.size());
  const auto rounded = [&](auto a) {
    reference::quantize_activation({m_, k_, form_.activation_group, floats, k_, values.data(), stride,
                                    value_scales.data(), groups, sums.data(), groups});
    a.values = values.data(), a.values_stride = stride;
    a.scales = value_scales.data(), a.scales_stride = groups;
    a.sums = sums.data(), a.sums_stride = groups;
    finish(a);
  };
  if (form_.storage == "f32") {
    finish(LinearArgs{.x = floats, .x_stride = k_});
  } else if (form_.storage == "bf16") {
    std::vector<uint16_t> narrow(values.size());
    reference::cast_bf16({m_, k_, floats, k_, narrow.data(), stride});
    finish(LinearBf16Args{.x = narrow.data(), .x_stride = stride});
  } else if (form_.storage == "fp8") {
    finish(LinearFp8Args{.group = form_.weight_group, .x = floats, .x_stride = k_});
  } else if (form_.storage == "int8") {
    rounded(LinearInt8Args{.weight_group = form_.weight_group, .activation_group = form_.activation_group});
  } else {
    const auto* added = reinterpret_cast<const uint16_t*>(offsets.bytes.data());
    rounded(LinearInt4Args{.group = form_.weight_group, .weight_offsets = form_.offsets ? added : nullptr});
  }
  return y;
}

}  // namespace ew::testing
