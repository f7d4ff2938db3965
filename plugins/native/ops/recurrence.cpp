// Recurrent layers, whose states are in a cache.
#include <cmath>
#include <initializer_list>

#include "op.h"
#include "step_resolver.h"
#include "step_verifier.h"

namespace ew {
namespace {

constexpr int64_t kTile = 16;                      // channels that a state is padded to a multiple of
constexpr int64_t kMostValues = int64_t{1} << 40;  // of a state
constexpr int64_t kMostTaps = 16;                  // as kernels/recurrence.h has them
constexpr int64_t kMostState = 1024;

int64_t padded(int64_t channels) { return (channels + kTile - 1) / kTile * kTile; }

// The cache, block_table, q_start, kv_len and slots from input `at` on; the product of `sizes` is how many
// floats of a block are the state.
void verify_state(StepVerifier& v, size_t at, std::initializer_list<int64_t> sizes) {
  int group = 0;
  int64_t size = 1;
  for (const int64_t one : sizes) {
    v.require(!__builtin_mul_overflow(size, one, &size) && size <= kMostValues,
              "a state of more than 2^40 values");
  }
  const CacheGroup& cached = v.state(v.in(at), &group);
  v.input(v.in(at + 1), PortCheck::table, group);
  v.input(v.in(at + 2), PortCheck::starts);
  v.input(v.in(at + 3), PortCheck::lengths);
  v.input(v.in(at + 4), PortCheck::slots, group);
  Attributes& a = v.attributes();
  a.first = v.integer("first", 0, cached.state_size);
  v.require(size <= cached.state_size - a.first,
            "attribute first: a state of " + std::to_string(size) + " values from " +
                std::to_string(a.first) + " on doesn't fit into the " + std::to_string(cached.state_size) +
                " of cache group " + cached.name);
}

StateArgs state_args(const StepResolver& s, size_t at) {
  return {.spans = {s.sizes().requests, s.in(at + 2).as<int32_t>()},
          .state = static_cast<float*>(s.cache(at).k),
          .stride = s.cache(at).state_size,
          .first = s.attributes().first,
          .block_table = s.in(at + 1).as<int32_t>(),
          .block_table_stride = s.block_table_stride(at),
          .kv_len = s.in(at + 3).as<int32_t>(),
          .slots = s.in(at + 4).as<int32_t>(),
          .slot_tokens = s.block_tokens(at)};
}

// x [T, C], weight [C, W], bias? [C], and the state [W - 1, C] -> [T, C]
void verify_stored_convolution(StepVerifier& v) {
  Attributes& a = v.attributes();
  a.has_bias = v.flag("has_bias", false);
  v.data(v.in(0), Dtype::f32, 2, 2);
  v.data(v.in(1), Dtype::f32, 2, 2);
  const int64_t channels = v.size(v.in(0), 1), taps = v.size(v.in(1), 1);
  v.require(v.in(0).shape[0] == kTokens && v.size(v.in(1), 0) == channels && taps <= kMostTaps,
            "operand " + shape_text(v.in(1)) + " isn't a convolution of " + shape_text(v.in(0)));
  if (a.has_bias) v.vector(v.in(2), v.in(0).shape[1]);
  v.data(v.out(), Dtype::f32, 2, 2);
  v.same_shape(v.in(0), v.out());
  const std::string kind = v.string("activation");
  a.activated = !kind.empty();
  v.require(kind.empty() || parse_activation(kind.c_str(), &a.activation),
            "attribute activation: no activation " + kind);
  verify_state(v, a.has_bias ? 3 : 2, {taps - 1, channels});
}

Call bind_stored_convolution(const StepResolver& s) {
  const Attributes& a = s.attributes();
  return call(&KernelTable::stored_convolution,
              StoredConvolutionArgs{.channels = s.in(0).shape[1],
                                    .taps = s.in(1).shape[1],
                                    .x = rows<const float>(s.in(0)),
                                    .weight = s.in(1).as<float>(),
                                    .weight_stride = s.in(1).strides[0],
                                    .bias = a.has_bias ? s.in(2).as<float>() : nullptr,
                                    .activated = a.activated,
                                    .activation = a.activation,
                                    .out = rows<float>(s.out()),
                                    .state = state_args(s, a.has_bias ? 3 : 2)});
}

// x [T, N, P], dt [T, N], a [N] or [N, S], b and c [T, G, S], and the state [N, S, P] -> [T, N, P]
void verify_stored_scan(StepVerifier& v) {
  v.data(v.in(0), Dtype::f32, 3, 3);
  v.data(v.in(1), Dtype::f32, 2, 2);
  v.data(v.in(2), Dtype::f32, 1, 2);
  v.data(v.in(3), Dtype::f32, 3, 3);
  v.data(v.in(4), Dtype::f32, 3, 3);
  const int64_t heads = v.size(v.in(0), 1), channels = v.size(v.in(0), 2);
  const int64_t groups = v.size(v.in(3), 1), size = v.size(v.in(3), 2);
  v.matrix(v.in(1), Dtype::f32, kTokens, v.in(0).shape[1]);
  v.require(v.in(0).shape[0] == kTokens && v.in(3).shape[0] == kTokens && heads % groups == 0 &&
                size <= kMostState && v.size(v.in(2), 0) == heads &&
                (v.in(2).rank() == 1 || v.size(v.in(2), 1) == size),
            "operands " + shape_text(v.in(0)) + ", " + shape_text(v.in(2)) + " and " + shape_text(v.in(3)) +
                " aren't a scan");
  v.same_shape(v.in(3), v.in(4));
  v.data(v.out(), Dtype::f32, 3, 3);
  v.same_shape(v.in(0), v.out());
  verify_state(v, 5, {padded(heads * channels), size});
}

Call bind_stored_scan(const StepResolver& s) {
  const bool of_state = s.in(2).shape.size() == 2;
  return call(&KernelTable::stored_scan, StoredScanArgs{.heads = s.in(0).shape[1],
                                                        .head_channels = s.in(0).shape[2],
                                                        .groups = s.in(3).shape[1],
                                                        .size = s.in(3).shape[2],
                                                        .x = rows<const float>(s.in(0)),
                                                        .dt = rows<const float>(s.in(1)),
                                                        .a = s.in(2).as<float>(),
                                                        .a_stride = of_state ? s.in(2).strides[0] : 0,
                                                        .rates_of_state = of_state,
                                                        .b = rows<const float>(s.in(3)),
                                                        .c = rows<const float>(s.in(4)),
                                                        .out = rows<float>(s.out()),
                                                        .state = state_args(s, 5)});
}

// q, k [T, Nk, D], v [T, N, Dv], decay [T, N] or [T, N, D], beta [T, N], and the state [N, D, Dv] -> [T, N,
// Dv]
void verify_stored_delta_rule(StepVerifier& v) {
  for (const int i : {0, 1, 2}) v.data(v.in(static_cast<size_t>(i)), Dtype::f32, 3, 3);
  v.data(v.in(3), Dtype::f32, 2, 3);
  const int64_t key_heads = v.size(v.in(1), 1), size = v.size(v.in(1), 2);
  const int64_t heads = v.size(v.in(2), 1), value_size = v.size(v.in(2), 2);
  v.same_shape(v.in(0), v.in(1));
  v.matrix(v.in(4), Dtype::f32, kTokens, v.in(2).shape[1]);
  v.require(v.in(1).shape[0] == kTokens && v.in(2).shape[0] == kTokens && heads % key_heads == 0 &&
                size <= kMostState && v.in(3).shape[0] == kTokens && v.size(v.in(3), 1) == heads &&
                (v.in(3).rank() == 2 || v.size(v.in(3), 2) == size),
            "operands " + shape_text(v.in(1)) + ", " + shape_text(v.in(2)) + " and " + shape_text(v.in(3)) +
                " aren't a delta rule");
  v.data(v.out(), Dtype::f32, 3, 3);
  v.same_shape(v.in(2), v.out());
  Attributes& a = v.attributes();
  a.scale = static_cast<float>(v.number("scale"));
  a.normalize = v.flag("normalize");
  v.require(std::isfinite(a.scale), "attribute scale is not finite");
  verify_state(v, 5, {heads, padded(value_size), size});
}

Call bind_stored_delta_rule(const StepResolver& s) {
  return call(&KernelTable::stored_delta_rule, StoredDeltaRuleArgs{.heads = s.in(2).shape[1],
                                                                   .key_heads = s.in(1).shape[1],
                                                                   .key_size = s.in(1).shape[2],
                                                                   .value_size = s.in(2).shape[2],
                                                                   .q = rows<const float>(s.in(0)),
                                                                   .k = rows<const float>(s.in(1)),
                                                                   .v = rows<const float>(s.in(2)),
                                                                   .decay = rows<const float>(s.in(3)),
                                                                   .decay_of_rows = s.in(3).shape.size() == 3,
                                                                   .beta = rows<const float>(s.in(4)),
                                                                   .scale = s.attributes().scale,
                                                                   .normalize = s.attributes().normalize,
                                                                   .out = rows<float>(s.out()),
                                                                   .state = state_args(s, 5)});
}

constexpr Op kOps[] = {
    {.name = "stored_convolution", .verify = verify_stored_convolution, .bind = bind_stored_convolution},
    {.name = "stored_scan", .verify = verify_stored_scan, .bind = bind_stored_scan},
    {.name = "stored_delta_rule", .verify = verify_stored_delta_rule, .bind = bind_stored_delta_rule},
};

}  // namespace

std::span<const Op> recurrence_ops() { return kOps; }

}  // namespace ew
