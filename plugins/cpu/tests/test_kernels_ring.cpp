// ring_attention: ranks that are threads, each with the blocks that it owns, have the bits of
// paged_attention.
#include <barrier>

#include "attention_scene.h"

using namespace ew;
using namespace ew::testing;

namespace {

// What ranks share. Rounds go on counting from scene to scene, as in a step of several layers.
class Ring {
 public:
  explicit Ring(int64_t ranks)
      : barrier_(ranks), rounds_(static_cast<size_t>(ranks), 0), pairs_(static_cast<size_t>(ranks)) {
    for (auto& of : pairs_) of.assign(static_cast<size_t>(ranks), 0);
    for (auto& place : memory_) place.resize(kFloats, kNaN);
  }

  void join(RingAttentionArgs* a) {
    a->exchange = this;
    a->rounds = &rounds_[static_cast<size_t>(a->rank)];
    a->pairs = pairs_[static_cast<size_t>(a->rank)].data();
    a->memory = [](void* ring, int place, int64_t bytes) {
      auto& memory = static_cast<Ring*>(ring)->memory_[place];
      CHECK(bytes <= static_cast<int64_t>(memory.size() * sizeof(float))) << bytes;
      return reinterpret_cast<char*>(memory.data());
    };
    a->meet = [](void* ring) { static_cast<Ring*>(ring)->barrier_.arrive_and_wait(); };
  }
  int64_t rounds() const { return rounds_[0]; }
  const std::vector<int64_t>& pairs(size_t rank) const { return pairs_[rank]; }

 private:
  static constexpr size_t kFloats = size_t{3} << 20;
  std::barrier<> barrier_;
  std::vector<float> memory_[2];
  std::vector<int64_t> rounds_;
  std::vector<std::vector<int64_t>> pairs_;
};

std::vector<float> attend_in_ring(Scene& scene, Ring& ring, int64_t ranks, const KernelTable& kernels,
                                  int threads) {
  return scene.run_ring(ranks, [&](RingAttentionArgs& a, int64_t) {
    ThreadPool pool(threads);
    ring.join(&a);
    kernels.ring_attention(a, pool);
  });
}

// Prefills alone, decodes at the borders of blocks and splits, chunks upon a past, an empty request.
void has_the_bits_of_paged_attention() {
  int64_t next = 0;
  for (Options o : all_options()) {
    const int64_t ranks = 2 + next % 3;
    if (static_cast<size_t>(next++) % kOneIn || o.heads < ranks) continue;
    o.owners = ranks;
    Scene scene(o, {0, 31, 32, 513, 10, 1900, 1100}, {40, 1, 1, 1, 0, 24, 1});
    for (const std::string& isa : available_isas()) {
      const KernelTable& kernels = *kernels_for(isa.c_str());
      ThreadPool alone(1);
      const auto whole = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, alone); });
      Ring ring(ranks);
      const int threads = ranks == 2 ? 2 : 1;
      CHECK(same_bits(attend_in_ring(scene, ring, ranks, kernels, threads), whole))
          << isa << describe(o) << " ranks " << ranks;
    }
  }
}

// More than fits into one round.
void several_rounds_have_the_same_bits() {
  for (const KvFormat format : {KvFormat::f32, KvFormat::i8, KvFormat::k6v4}) {
    const Options o = {
        .heads = 9, .kv_heads = 3, .key_size = 16, .value_size = 128, .format = format, .owners = 3};
    if (kOneIn > 1 && format != KvFormat::i8) continue;
    Scene scene(o, {2000, 1500}, {400, 1});
    for (const std::string& isa : {available_isas().front(), available_isas().back()}) {
      if (kOneIn > 1 && isa != available_isas().back()) continue;
      const KernelTable& kernels = *kernels_for(isa.c_str());
      ThreadPool alone(1);
      const auto whole = scene.run([&](const PagedAttentionArgs& a) { kernels.paged_attention(a, alone); });
      Ring ring(3);
      const int64_t times = kOneIn > 1 ? 1 : 3;
      for (int64_t again = 0; again < times; ++again) {
        CHECK(same_bits(attend_in_ring(scene, ring, 3, kernels, 1), whole)) << isa << describe(o);
      }
      CHECK(ring.rounds() >= 2 * times) << ring.rounds();
    }
  }
}

// Every rank counts what all have done: (token, split) of full attention, and of a window.
void counts_what_ranks_have_done() {
  for (const int64_t window : {0, 600}) {
    const Options o = {.window = window, .owners = 2};
    Scene scene(o, {2000}, {1});  // keys 0 .. 2000 in 4 splits; with the window those from 1401 on, in 2
    Ring ring(2);
    attend_in_ring(scene, ring, 2, *kernels_for("portable"), 1);
    int64_t expected[2] = {};
    for (int64_t split = window > 0 ? 2 : 0; split < 4; ++split) ++expected[scene.block(0, split * 16) % 2];
    for (size_t rank = 0; rank < 2; ++rank) {
      CHECK(ring.pairs(rank)[0] == expected[0] && ring.pairs(rank)[1] == expected[1])
          << rank << " " << ring.pairs(rank)[0] << " " << ring.pairs(rank)[1];
    }
  }
}

// Tokens go to the rank that owns their block, the others' memory stays as it was; queries are all rotated.
void writes_own_blocks() {
  const int64_t tokens = 200, heads = 2, size = 16, blocks = 14, ranks = 3;
  const auto k = random_floats(tokens * heads * size, 1), v = random_floats(tokens * heads * size, 2);
  const auto q = random_floats(tokens * 4 * size, 3), table = random_floats(tokens * size, 4);
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < tokens; ++t) slots.push_back((t * 7 % 13) * 32 + t % 32);
  for (const KvFormatEntry& entry : kKvFormats) {
    const KvFormat format = entry.value;
    if (!takes_head(format, Side::keys, size)) continue;
    const KvShape shape{heads, size, size, format};
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      for (const bool rotates : {false, true}) {
        const auto write = [&](int64_t of, int64_t rank, std::vector<char>* ks, std::vector<char>* vs) {
          ks->assign(static_cast<size_t>(shape.pieces(blocks) * shape.key_bytes()), kNotWritten);
          vs->assign(static_cast<size_t>(shape.pieces(blocks) * shape.value_bytes()), kNotWritten);
          std::vector<float> out = filled(tokens * 4 * size, kNaN);
          RopeKvWriteArgs a;
          a.write = {tokens,       {k.data(), heads * size, size},  {v.data(), heads * size, size},
                     slots.data(), {shape, ks->data(), vs->data()}, of,
                     rank};
          a.key = {.tokens = tokens,
                   .heads = heads,
                   .size = size,
                   .freqs = size / 2,
                   .x = a.write.k,
                   .table = table.data(),
                   .table_stride = size,
                   .interleaved = false,
                   .out = {}};
          a.query = a.key;
          a.query.heads = 4, a.query.x = {q.data(), 4 * size, size},
          a.query.out = {out.data(), 4 * size, size};
          if (rotates) {
            kernels.rope_kv_write(a, pool);
          } else {
            kernels.kv_write(a.write, pool);
          }
          return out;
        };
        std::vector<char> all_k, all_v, own_k, own_v;
        const auto all_q = write(1, 0, &all_k, &all_v);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const auto own_q = write(ranks, rank, &own_k, &own_v);
          CHECK(!rotates || same_bits(own_q, all_q)) << what;
          for (int64_t block = 0; block < blocks; ++block) {
            const auto same = [&](const std::vector<char>& own, const std::vector<char>& all) {
              const int64_t bytes = static_cast<int64_t>(own.size()) / blocks;
              const auto at = own.begin() + block * bytes;
              if (block % ranks == rank) return std::equal(at, at + bytes, all.begin() + block * bytes);
              return std::all_of(at, at + bytes, [](char c) { return c == kNotWritten; });
            };
            CHECK(same(own_k, all_k) && same(own_v, all_v)) << what << " rank " << rank << " block " << block;
          }
        }
      }
    });
  }
}

}  // namespace

int main() {
  RUN(has_the_bits_of_paged_attention);
  RUN(several_rounds_have_the_same_bits);
  RUN(counts_what_ranks_have_done);
  RUN(writes_own_blocks);
  return check::result();
}
