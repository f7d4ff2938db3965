// What XLA calls: products, writes to a cache and attention, by the CPU kernels. plugins/stablehlo/compile
// writes the calls; plugins/stablehlo/serve/pjrt_library.py registers the handlers by the names of the
// functions.
//
// A slot of C places is C / 32 blocks of kv_format.h in a row; the module sees [B*Nkv, C, D] and looks at
// none of it. What can't be taken, XLA's caller is told.
#include <cstring>
#include <new>

#include "../../cpu/kernels/parallel.h"
#include "call_frame.h"
#include "run_threads.h"

namespace ew::xla {
namespace {

const KernelTable& kernels() {
  static const KernelTable& best = *kernels_for(available_isas().front().c_str());
  return best;
}

// x [.., K], weight, then scales, offsets and bias, as far as the attributes say that they are there -> y
// [.., N]
void linear(const CallFrame& frame) {
  const PanelLinear product({.n = frame.integer("n"),
                             .k = frame.integer("k"),
                             .weight_group = frame.integer("weight_group"),
                             .activation_group = frame.integer("activation_group"),
                             .storage = frame.text("storage"),
                             .activation = frame.text("activation"),
                             .sparse = frame.integer("sparse") != 0});
  const bool has_offsets = frame.integer("offsets") != 0;
  if (has_offsets && !product.may_have_offsets()) throw BadArgument{"offsets: this format has none"};
  int64_t place = 1;
  const auto stored = [&](const char* name, int64_t size) -> const void* {
    const XlaFfiBuffer& buffer = frame.argument(place++);
    if (bytes(buffer) == size) return buffer.data;
    throw BadArgument{std::string(name) + " has " + std::to_string(bytes(buffer)) + " bytes, and not " +
                      std::to_string(size)};
  };
  PanelLinear::Call call;
  call.x = frame.floats(0);
  call.m = elements(frame.argument(0)) / product.k();
  if (call.m * product.k() != elements(frame.argument(0))) throw BadArgument{"x: it isn't of rows of k"};
  call.weight = stored("weight", product.weight_bytes());
  if (product.scaled()) {
    call.scales = static_cast<const uint16_t*>(stored("scales", product.scale_bytes()));
  }
  if (has_offsets) call.offsets = static_cast<const uint16_t*>(stored("offsets", product.scale_bytes()));
  if (frame.integer("bias")) call.bias = frame.floats(place++, product.n());
  if (frame.arguments() != place) throw BadArgument{"there are arguments too many"};
  call.y = frame.out(0, call.m * product.n());
  RunThreads pool(frame);
  product.run(kernels(), call, pool);
}

// x [T, N, D], cosines and sines [T, 2F] -> the same rotated
void rotate(const CallFrame& frame) {
  const int64_t heads = frame.integer("heads"), size = frame.integer("size");
  const XlaFfiBuffer &x = frame.argument(0), &table = frame.argument(1);
  if (x.rank != 3 || x.dims[1] != heads || x.dims[2] != size) throw BadArgument{"x: [T, heads, size]"};
  if (table.rank != 2 || table.dims[0] != x.dims[0] || table.dims[1] % 2 || table.dims[1] > size) {
    throw BadArgument{"the table: [T, 2F]"};
  }
  RopeArgs args;
  args.tokens = x.dims[0], args.heads = heads, args.size = size, args.freqs = table.dims[1] / 2;
  args.x = {.data = frame.floats(0), .stride0 = heads * size, .stride1 = size};
  args.table = frame.floats(1), args.table_stride = table.dims[1];
  args.interleaved = frame.integer("interleaved") != 0;
  args.out = {.data = frame.out(0, elements(x)), .stride0 = heads * size, .stride1 = size};
  RunThreads pool(frame);
  kernels().rope(args, pool);
}

// The sizes of slots, and which of their places a step writes.
struct Slots {
  int64_t requests, tokens, kv_heads, places;
  const int64_t* index;  // [B]: where a request's first token goes

  Slots(const CallFrame& frame, int64_t index_at)
      : requests(frame.integer("requests")),
        tokens(frame.integer("tokens")),
        kv_heads(frame.integer("kv_heads")),
        places(frame.integer("places")) {
    const int64_t most = int64_t{1} << 24;
    for (const int64_t size : {requests, tokens, kv_heads, places}) {
      if (size < 1 || size > most) throw BadArgument{"sizes: 1 to 2^24"};
    }
    if (places % kBlock || requests * places > INT32_MAX) throw BadArgument{"places: a multiple of 32"};
    index = frame.integers(index_at, requests);
    for (int64_t b = 0; b < requests; ++b) {
      if (index[b] < 0 || index[b] + tokens > places) throw BadArgument{"index: beyond the slot"};
    }
  }
  int64_t rows() const { return requests * tokens; }
  // Rows that rest write to the last place, which is nobody's, and are looked at by nobody.
  bool rests(int64_t b) const { return tokens == 1 && index[b] == places - 1; }
};

// cache [B*Nkv, C, D], update [T, Nkv, D], index [B] -> the cache
void write_cache(const CallFrame& frame) {
  const Slots s(frame, 2);
  const int64_t size = frame.integer("size"), heads = s.kv_heads;
  const bool keys = frame.integer("keys") != 0;
  const float* update = frame.floats(1, s.rows() * heads * size);
  const int64_t count = s.requests * heads * s.places * size;
  float* cache = frame.out(0, count);
  if (const float* before = frame.floats(0, count); before != cache) {
    std::memcpy(cache, before, static_cast<size_t>(count) * sizeof(float));  // it wasn't donated
  }
  RunThreads pool(frame);
  run_rows(pool, s.rows(), heads * size, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t place = t / s.tokens * s.places + s.index[t / s.tokens] + t % s.tokens;
      for (int64_t h = 0; h < heads; ++h) {
        float* piece = cache + (place / kBlock * heads + h) * kBlock * size;
        const float* from = update + (t * heads + h) * size;
        if (keys) {
          for (int64_t d = 0; d < size; ++d) piece[d * kBlock + place % kBlock] = from[d];
        } else {
          std::memcpy(piece + place % kBlock * size, from, static_cast<size_t>(size) * sizeof(float));
        }
      }
    }
  });
}

struct AttentionMemory {
  Workspace workspace, tables;
};

// q [T, Nq, D], keys [B*Nkv, C, D], values [B*Nkv, C, Dv], index [B] -> [T, Nq, Dv]
void attention(const CallFrame& frame) {
  const Slots s(frame, 3);
  const int64_t heads = frame.integer("heads"), size = frame.integer("size"), width = frame.integer("width");
  if (heads < 1 || heads % s.kv_heads || size < 1 || width < 1) throw BadArgument{"heads, size, width"};
  thread_local AttentionMemory memory;
  const int64_t blocks = s.places / kBlock;
  auto* table = static_cast<int32_t*>(
      memory.tables.reserve((s.requests * (blocks + 2) + 1) * int64_t{sizeof(int32_t)}));
  int32_t *starts = table + s.requests * blocks, *lengths = starts + s.requests + 1;
  for (int64_t i = 0; i < s.requests * blocks; ++i) table[i] = static_cast<int32_t>(i);
  for (int64_t b = 0; b <= s.requests; ++b) starts[b] = static_cast<int32_t>(b * s.tokens);
  for (int64_t b = 0; b < s.requests; ++b) {
    lengths[b] = s.rests(b) ? 1 : static_cast<int32_t>(s.index[b] + s.tokens);
  }
  PagedAttentionArgs args;
  args.spans = {s.requests, starts}, args.query_heads = heads;
  args.q = {.data = frame.floats(0, s.rows() * heads * size), .stride0 = heads * size, .stride1 = size};
  args.cache.k = const_cast<float*>(frame.floats(1, s.requests * s.kv_heads * s.places * size));
  args.cache.v = const_cast<float*>(frame.floats(2, s.requests * s.kv_heads * s.places * width));
  args.cache.kv_heads = s.kv_heads, args.cache.key_size = size, args.cache.value_size = width;
  args.block_table = table, args.block_table_stride = blocks;
  args.kv_len = lengths;
  args.scale = frame.number("scale"), args.window = frame.integer("window");
  args.out = {.data = frame.out(0, s.rows() * heads * width), .stride0 = heads * width, .stride1 = width};
  args.workspace = &memory.workspace;
  RunThreads pool(frame);
  kernels().paged_attention(args, pool);
}

XlaFfiError* error_of(const XlaFfiApi& api, const std::string& text, int code) {
  const std::string message = "enginewright: " + text;
  XlaFfiErrorArgs args = {sizeof(args), nullptr, message.c_str(), code};
  return api.make_error(&args);
}

XlaFfiError* handle(XlaFfiCallFrame* frame, void (*run)(const CallFrame&)) {
  if (frame->extension && frame->extension->type == 1) {
    auto* metadata = reinterpret_cast<XlaFfiMetadataExtension*>(frame->extension)->metadata;
    metadata->version.major = kXlaFfiMajor, metadata->version.minor = kXlaFfiMinor;
    metadata->traits = 0;
    return nullptr;
  }
  try {
    run(CallFrame(frame));
    return nullptr;
  } catch (const BadArgument& e) {
    return error_of(*frame->api, e.problem, kXlaInvalidArgument);
  } catch (const std::bad_alloc&) {
    return error_of(*frame->api, "there is no memory for a step", kXlaResourceExhausted);
  }
}

}  // namespace
}  // namespace ew::xla

#define EW_HANDLER(name, run)                                                                              \
  extern "C" __attribute__((visibility("default"))) XlaFfiError* enginewright_##name(XlaFfiCallFrame* f) { \
    return ew::xla::handle(f, ew::xla::run);                                                               \
  }
EW_HANDLER(linear, linear)
EW_HANDLER(rotate, rotate)
EW_HANDLER(write_cache, write_cache)
EW_HANDLER(attention, attention)
