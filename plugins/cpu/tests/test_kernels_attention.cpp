#include "attention_scene.h"

using namespace ew;
using namespace ew::testing;

namespace {

// Scores are chains of D products and within a few eps of their size (about 2 to 6), which their exponentials
// pass on as a relative error; the weights add to 1 and the values are of size 1. So a few tens of eps in
// all; this is 34 of them. Where weights are rounded to bf16, by 2^-8 of each at most, the result is off by
// no more than that of the largest value, which is below 5. Values that are a part of keys are twice as
// large.
double tolerance(const Options& o) {
  return (o.format == KvFormat::f32 ? 4e-6 : 5.0 / 256) * (o.values_in_keys ? 2 : 1);
}

// And rows that choose blocks, and those that read the ends of a request in another cache.
std::vector<Options> and_choosing(std::vector<Options> options) {
  options.push_back({.heads = 9, .kv_heads = 3, .format = KvFormat::k4v4, .ends = true});
  options.push_back({.heads = 3,
                     .kv_heads = 1,
                     .key_size = 256,
                     .value_size = 256,
                     .sinks = true,
                     .slopes = true,
                     .format = KvFormat::k4v4,
                     .ends = true});
  options.push_back({.heads = 4,
                     .kv_heads = 2,
                     .key_size = 80,
                     .value_size = 24,
                     .window = 1050,
                     .softcap = 20,
                     .format = KvFormat::k4v4,
                     .ends = true});
  const std::vector<Options> more = choosing_options();
  for (size_t i = 0; i < more.size(); i += kOneIn > 1 ? 5 : 1) options.push_back(more[i]);
  return options;
}

void equals_reference() {
  for (const Options& o : and_choosing(some_options(0))) {
    // Prefill alone, decodes at the borders of blocks and splits, a chunk upon a past, an empty request.
    Scene scene(o, {0, 31, 32, 513, 10, 600, 0}, {40, 1, 1, 1, 0, 70, 1});
    const auto expected = scene.run([](const PagedAttentionArgs& a) { reference::paged_attention(a); });
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const auto out = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); });
      CHECK(worst(out, expected, tolerance(o), 0) <= 1)
          << what << describe(o) << ": " << worst(out, expected, tolerance(o), 0) << " of the tolerance";
    });
  }
}

// Alone, in a batch, chunked in any way, with any threads: the same bits.
void same_bits_in_any_company() {
  for (const Options& o : and_choosing(some_options(1))) {
    Scene scene(o, {0, 1100, 40, 505}, {75, 1, 33, 20});
    for (const std::string& isa : available_isas()) {
      const KernelTable& kernels = *kernels_for(isa.c_str());
      std::vector<float> first;
      for (const int threads : {1, 2, 3}) {
        if (kOneIn > 1 && threads == 2) continue;
        ThreadPool pool(threads);
        const auto attend = [&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); };
        const auto whole = scene.run(attend);
        if (first.empty()) first = whole;
        CHECK(same_bits(whole, first)) << isa << describe(o) << " threads " << threads;
        for (const int64_t chunk : {1, 7, 64}) {
          if (kOneIn > 1 && chunk == 7) continue;
          CHECK(same_bits(scene.run_chunked(chunk, attend), first))
              << isa << describe(o) << " threads " << threads << " chunk " << chunk;
        }
      }
    }
  }
}

// One long decode on many threads goes through split tasks and a merge; on one thread it doesn't.
void split_decode_has_the_same_bits() {
  const std::vector<Options> options = {
      Options{.heads = 9, .kv_heads = 3, .format = KvFormat::bf16},
      Options{},
      Options{.heads = 8, .kv_heads = 2, .window = 1300, .format = KvFormat::i8},
      Options{.heads = 4, .kv_heads = 2, .key_size = 80, .value_size = 80, .format = KvFormat::fp8},
      Options{.heads = 6, .kv_heads = 2, .window = 1300, .sinks = true},
      Options{.heads = 4, .kv_heads = 2, .key_size = 32, .value_size = 32, .slopes = true},
      Options{.heads = 8, .kv_heads = 2, .format = KvFormat::bf16, .choice = {1, 4, 16, 0}},
      Options{.heads = 2, .kv_heads = 2, .format = KvFormat::i8, .choice = {1, 1, 4, 0}},
      Options{.heads = 4, .kv_heads = 2, .format = KvFormat::k4v4, .ends = true},
      Options{.heads = 3, .kv_heads = 1, .key_size = 24, .value_size = 40}};
  for (size_t i = 0; i < options.size(); i += kOneIn > 1 ? 4 : 1) {
    const Options& o = options[i];
    Scene scene(o, {4000}, {2});
    const auto expected = scene.run([](const PagedAttentionArgs& a) { reference::paged_attention(a); });
    for (const std::string& isa : available_isas()) {
      const KernelTable& kernels = *kernels_for(isa.c_str());
      ThreadPool one(1), three(3);
      const auto plain = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, one); });
      const auto split = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, three); });
      CHECK(same_bits(plain, split)) << isa << describe(o);
      CHECK(worst(plain, expected, tolerance(o), 0) <= 1) << isa << describe(o);
    }
  }
}

std::vector<float> heads_of(const std::vector<float>& out, const Options& o, int64_t low, int64_t high) {
  std::vector<float> some;
  for (int64_t at = 0; at < static_cast<int64_t>(out.size()); at += o.heads * o.value_size) {
    some.insert(some.end(), out.begin() + at + low * o.value_size, out.begin() + at + high * o.value_size);
  }
  return some;
}

// Some query heads alone, as a rank has them, that begin and end within a kv head's group: the bits of the
// whole step, and the reference's numbers.
void some_heads_have_the_same_bits() {
  std::vector<Options> options = all_options();
  for (const KvFormat format : {KvFormat::f32, KvFormat::bf16, KvFormat::i8, KvFormat::fp8}) {
    options.push_back({.heads = 14, .kv_heads = 2, .format = format});
    options.push_back(
        {.heads = 9, .kv_heads = 3, .key_size = 32, .value_size = 48, .window = 70, .format = format});
    options.back().sinks = options.back().slopes = true;
  }
  for (size_t i = 0; i < options.size(); ++i) {
    const Options& o = options[i];
    if (o.heads < 2 || i % kOneIn) continue;
    // Of 9 heads in groups of 3: 0 .. 3, 4 .. 8, 2 .. 6 and 4 alone.
    const std::pair<int64_t, int64_t> parts[] = {{0, o.heads / 2},
                                                 {o.heads / 2, o.heads},
                                                 {o.heads / 4, o.heads - o.heads / 4},
                                                 {o.heads / 2, o.heads / 2 + 1}};
    for (const bool long_decode : {false, true}) {
      if (long_decode && o.heads != 9 && o.heads != 14) continue;  // on several threads: a task a split
      Scene scene = long_decode ? Scene(o, {2100}, {2}) : Scene(o, {0, 40, 505, 3}, {45, 33, 20, 0});
      const auto reference = [](const PagedAttentionArgs& a) { reference::paged_attention(a); };
      const auto expected = long_decode ? std::vector<float>() : scene.run(reference);
      for (const auto& [low, high] : parts) {
        if (long_decode) break;
        CHECK(same_bits(scene.run_heads(low, high, reference), heads_of(expected, o, low, high)))
            << "reference" << describe(o) << " heads " << low << " to " << high;
      }
      for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
        const auto attend = [&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); };
        const auto whole = scene.run(attend);
        for (const auto& [low, high] : parts) {
          CHECK(same_bits(scene.run_heads(low, high, attend), heads_of(whole, o, low, high)))
              << what << describe(o) << " heads " << low << " to " << high << (long_decode ? " long" : "");
        }
      });
    }
  }
}

// Queries and results as slices of wider buffers, as a fused q/k/v gives.
void strides() {
  Scene scene({.heads = 4, .kv_heads = 2, .key_size = 16, .value_size = 16}, {0, 5}, {37, 1});
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto plain = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); });
    PagedAttentionArgs a = scene.args();
    std::vector<float> q = filled(38 * 100, kNaN), out = filled(38 * 90, -7);
    for (int64_t t = 0; t < 38; ++t) {
      for (int64_t h = 0; h < 4; ++h)
        std::copy_n(a.q.data + t * 64 + h * 16, 16, q.data() + t * 100 + h * 20);
    }
    a.q = {q.data(), 100, 20};
    a.out = {out.data(), 90, 17};
    kernels.paged_attention(a, pool);
    for (int64_t t = 0; t < 38; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        CHECK(std::memcmp(out.data() + t * 90 + h * 17, plain.data() + t * 64 + h * 16, 64) == 0) << what;
        CHECK(out[static_cast<size_t>(t * 90 + h * 17 + 16)] == -7) << what;
      }
    }
  });
}

// A choice of as many blocks as there are changes no bit, and what a step leaves of a summary is the
// reference's. What isn't chosen isn't read: it may be NaN.
void chosen_blocks_alone_are_read() {
  const std::vector<Options> choosing = choosing_options();
  for (size_t i = 0; i < choosing.size(); i += kOneIn > 1 ? 5 : 1) {
    Options o = choosing[i];
    o.choice = {1, 1, 1000, 0};
    Options all = o;
    all.choice = {};
    Scene with(o, {0, 700}, {75, 3}), without(all, {0, 700}, {75, 3});
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const auto attend = [&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); };
      CHECK(same_bits(with.run(attend), without.run(attend))) << what << describe(o);
    });
    // Blocks 1 and 2 are filled by the step; both scenes deal out the same blocks.
    Scene step(o, {60}, {40}), whole(o, {96}, {4});
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const Scene::Memory before = step.memory();
      step.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); });
      CHECK(step.memory() == whole.memory()) << what << describe(o);
      step.put_back(before);
    });
    // One token behind 21 blocks, all but the best of which are made NaN behind their summaries' backs.
    o.choice = {1, 1, 1, 0};
    Scene clean(o, {680}, {1}), spoiled(o, {680}, {1});
    for (int64_t h = 0; h < o.kv_heads; ++h) {
      const std::vector<bool> seen = reference::seen_blocks(clean.args(), 0, 0, h);
      for (size_t i = 0; i < seen.size(); ++i) {
        if (!seen[i]) spoiled.spoil(0, static_cast<int64_t>(i), h);
      }
    }
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      const auto attend = [&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); };
      CHECK(same_bits(spoiled.run(attend), clean.run(attend))) << what << describe(o);
    });
  }
}

// A steep slope leaves a query its own value and next to nothing of the others; a slope of 0 changes no bit.
void slopes_say_how_far() {
  Scene plain({.heads = 2, .kv_heads = 1}, {40}, {9});
  for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
    const auto without = plain.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); });
    const float slopes[2] = {0, 100};
    const auto with = plain.run([&](PagedAttentionArgs a) {
      a.slopes = slopes;
      kernels.paged_attention(a, pool);
    });
    for (int64_t t = 0; t < 9; ++t) {
      CHECK(std::memcmp(&with[static_cast<size_t>(t * 128)], &without[static_cast<size_t>(t * 128)], 256) ==
            0)
          << what << " token " << t;
      for (int64_t i = 0; i < 64; ++i) {
        const double own = plain.value(0, 40 + t, 0, i);
        CHECK(std::fabs(with[static_cast<size_t>(t * 128 + 64 + i)] - own) < 1e-6) << what << " token " << t;
      }
    }
  });
}

}  // namespace

int main() {
  RUN(equals_reference);
  RUN(same_bits_in_any_company);
  RUN(split_decode_has_the_same_bits);
  RUN(some_heads_have_the_same_bits);
  RUN(strides);
  RUN(chosen_blocks_alone_are_read);
  RUN(slopes_say_how_far);
  return check::result();
}
