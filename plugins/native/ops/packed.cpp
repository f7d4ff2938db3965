// Attention without a cache, and pooling: ops that read all tokens of a request at once.
#include <cmath>

#include "op.h"
#include "step_resolver.h"
#include "step_verifier.h"

namespace ew {
namespace {

// q [T, Nq, D], k [T, Nkv, D], v [T, Nkv, Dv], q_start, sinks? [Nq], slopes? [Nq], biases?
// [Nq, 2 * reach + 1] -> [T, Nq, Dv]
void verify_attention(StepVerifier& v) {
  Attributes& a = v.attributes();
  a.has_sinks = v.flag("has_sinks", false);
  a.has_slopes = v.flag("has_slopes", false);
  a.has_biases = v.flag("has_biases", false);
  for (size_t i = 0; i < 3; ++i) v.data(v.in(i), Dtype::f32, 3, 3);
  v.data(v.out(), Dtype::f32, 3, 3);
  const Operand &q = v.in(0), &key = v.in(1), &value = v.in(2);
  const int64_t heads = v.size(q, 1), kv_heads = v.size(key, 1), most = int64_t{1} << 20;
  v.require(v.size(q, 2) <= most && v.size(value, 2) <= most,
            "operands " + shape_text(q) + ", " + shape_text(value) + " have heads of more than 2^20");
  v.require(q.shape[0] == kTokens && key.shape[0] == kTokens && value.shape[0] == kTokens &&
                heads % kv_heads == 0 && value.shape[1].is(kv_heads) && key.shape[2] == q.shape[2],
            "operands " + shape_text(q) + ", " + shape_text(key) + ", " + shape_text(value) +
                " aren't queries, keys and values of the step's tokens");
  v.require(v.out().shape == std::vector<Affine>{kTokens, q.shape[1], value.shape[2]},
            "operand " + shape_text(v.out()) + " doesn't fit the queries and values");
  v.input(v.in(3), PortCheck::starts);
  const size_t biases = v.inputs() - (a.has_biases ? 1 : 0);
  for (size_t i = 4; i < biases; ++i) v.vector(v.in(i), q.shape[1]);
  if (a.has_biases) {
    v.matrix(v.in(biases), Dtype::f32, q.shape[1], Affine{v.size(v.in(biases), 1)});
    v.require(v.size(v.in(biases), 1) % 2 == 1,
              "operand " + shape_text(v.in(biases)) + " has no column in the middle");
  }
  a.scale = static_cast<float>(v.number("scale"));
  a.softcap = static_cast<float>(v.number("softcap"));
  a.window = v.integer("window", 0, INT32_MAX);
  a.causal = v.flag("causal");
  const std::string format = v.string("dtype", "f32");
  v.require(parse_kv_format(format.c_str(), &a.kv_format) && !has_scales(a.kv_format),
            "attribute dtype: keys and values are packed as f32 or bf16, not " + format);
  v.require(std::isfinite(a.scale) && a.softcap >= 0 && std::isfinite(a.softcap),
            "attribute scale or softcap is out of range");
}

// The last operand.
Biases biases_of(const StepResolver& s) {
  const Place& last = s.in(s.inputs() - 1);
  return {last.as<float>(), last.strides[0], last.shape[1] / 2};
}

Call bind_attention(const StepResolver& s) {
  const Attributes& a = s.attributes();
  return call(&KernelTable::attention,
              {.spans = {s.sizes().requests, s.in(3).as<int32_t>()},
               .query_heads = s.in(0).shape[1],
               .kv_heads = s.in(1).shape[1],
               .key_size = s.in(1).shape[2],
               .value_size = s.in(2).shape[2],
               .q = rows<const float>(s.in(0)),
               .k = rows<const float>(s.in(1)),
               .v = rows<const float>(s.in(2)),
               .sinks = a.has_sinks ? s.in(4).as<float>() : nullptr,
               .slopes = a.has_slopes ? s.in(a.has_sinks ? 5 : 4).as<float>() : nullptr,
               .biases = a.has_biases ? biases_of(s) : Biases(),
               .scale = a.scale,
               .window = a.window,
               .softcap = a.softcap,
               .causal = a.causal,
               .format = a.kv_format,
               .out = rows<float>(s.out()),
               .workspace = s.memory().workspace});
}

// hidden [T, H], q_start -> [B, H]
void verify_pool(StepVerifier& v) {
  v.matrix(v.in(0), Dtype::f32, kTokens, Affine{v.size(v.in(0), 1)});
  v.input(v.in(1), PortCheck::starts);
  v.matrix(v.out(), Dtype::f32, kRequests, v.in(0).shape[1]);
  const std::string kind = v.string("kind");
  v.require(parse_pool(kind.c_str(), &v.attributes().pool), "attribute kind: no pooling " + kind);
}

Call bind_pool(const StepResolver& s) {
  return call(&KernelTable::pool, {.spans = {s.sizes().requests, s.in(1).as<int32_t>()},
                                   .size = s.in(0).shape[1],
                                   .x = rows<const float>(s.in(0)),
                                   .kind = s.attributes().pool,
                                   .out = rows<float>(s.out())});
}

constexpr Op kOps[] = {
    {.name = "attention", .verify = verify_attention, .bind = bind_attention},
    {.name = "pool", .verify = verify_pool, .bind = bind_pool},
};

}  // namespace

std::span<const Op> packed_ops() { return kOps; }

}  // namespace ew
