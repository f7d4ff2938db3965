// Layers that have memory for some of their blocks: the same bits, and what a file does wrong is found out.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "../../cpu/tests/attention_scene.h"
#include "../offload.h"

using namespace ew;
using namespace ew::testing;

namespace {

// The folder of a test.
struct Folder {
  std::string path = (std::filesystem::temp_directory_path() / "offload-XXXXXX").string();
  Folder() { CHECK(mkdtemp(path.data()) != nullptr); }
  ~Folder() { std::filesystem::remove_all(path); }
};

// A descriptor of the process's only file without a name in a folder.
int opened_in(const std::string& folder) {
  for (int i = 3; i < 1024; ++i) {
    char target[4096];
    const std::string link = "/proc/self/fd/" + std::to_string(i);
    const ssize_t length = readlink(link.c_str(), target, sizeof target);
    if (length > 0 && std::string(target, static_cast<size_t>(length)).starts_with(folder)) return i;
  }
  return -1;
}

// The first 4 of the reference's vectors: key 00 01 .. 0f, messages of 0, 1, .. bytes.
void hash_is_siphash() {
  const uint64_t key[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
  const uint64_t expected[] = {0x726fdb47dd0e0e31u, 0x74f839c593dc67fdu, 0x0d6c8009d9a94f5au,
                               0x85676696d7fb7e2du};
  unsigned char message[16];
  for (size_t i = 0; i < 16; ++i) message[i] = static_cast<unsigned char>(i);
  for (size_t n = 0; n < 4; ++n) CHECK(siphash(key, message, n) == expected[n]) << n;
  CHECK(siphash(key, message, 15) == 0xa129ca6149be45e5u);  // of the paper
}

constexpr int64_t kHeads = 4, kKvHeads = 2, kKey = 40, kValue = 24, kBlocks = 60;
constexpr BlockChoice kChoice = {1, 1, 2, 0};

// Two requests whose tokens come bit by bit, to a whole cache and to one with few slots.
struct Course {
  std::vector<int32_t> table;  // [2, kBlocks / 2]
  std::vector<float> keys, values, queries;
  std::vector<std::pair<int32_t, int32_t>> steps;  // tokens of each request
  Workspace workspace;

  Course() {
    std::vector<int32_t> order(kBlocks);
    for (size_t i = 0; i < kBlocks; ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(3));
    table = order;
    for (int i = 0; i < 5; ++i)
      steps.insert(steps.end(), {{90, 33}, {1, 1}, {7, 64}, {1, 0}, {0, 5}, {45, 1}});
    const int64_t most = kBlocks * kBlock;
    keys = random_floats(most * kKvHeads * kKey, 1);
    values = random_floats(most * kKvHeads * kValue, 2);
    queries = random_floats(most * kHeads * kKey, 3);
  }

  // Results of all steps. write(args) and attend(args) run one.
  template <class Write, class Attend>
  std::vector<float> run(const KvCache& cache, const Write& write, const Attend& attend) {
    std::vector<float> results;
    int32_t lengths[2] = {0, 0};
    int64_t first = 0;
    for (const auto& [one, other] : steps) {
      const int32_t counts[2] = {one, other}, starts[3] = {0, one, one + other};
      std::vector<int32_t> slots;
      for (int b = 0; b < 2; ++b) {
        for (int32_t t = 0; t < counts[b]; ++t, ++lengths[b]) {
          const int32_t block = table[static_cast<size_t>(b * kBlocks / 2 + lengths[b] / kBlock)];
          slots.push_back(block * static_cast<int32_t>(kBlock) + lengths[b] % static_cast<int32_t>(kBlock));
        }
      }
      const int64_t tokens = one + other;
      write(KvWriteArgs{tokens,
                        {keys.data() + first * kKvHeads * kKey, kKvHeads * kKey, kKey},
                        {values.data() + first * kKvHeads * kValue, kKvHeads * kValue, kValue},
                        slots.data(),
                        cache});
      PagedAttentionArgs a;
      a.spans = {2, starts};
      a.query_heads = kHeads;
      a.q = {queries.data() + first * kHeads * kKey, kHeads * kKey, kKey};
      a.cache = cache;
      a.block_table = table.data();
      a.block_table_stride = kBlocks / 2;
      a.kv_len = lengths;
      a.scale = 0.2f;
      a.choice = kChoice;
      a.workspace = &workspace;
      std::vector<float> out(static_cast<size_t>(tokens * kHeads * kValue), kNaN);
      a.out = {out.data(), kHeads * kValue, kValue};
      attend(a);
      results.insert(results.end(), out.begin(), out.end());
      first += tokens;
    }
    return results;
  }
};

KvCache cache_of(KvFormat format) { return {{kKvHeads, kKey, kValue, format, true}}; }

void few_slots_have_the_same_bits() {
  Folder folder;
  Course course;
  for (const KvFormatEntry& entry : kKvFormats) {
    if (has_few_bits(entry.value)) continue;  // there are no summaries of rotated keys
    KvCache whole = cache_of(entry.value);
    std::vector<char> k(static_cast<size_t>(whole.pieces(kBlocks) * whole.key_bytes()));
    std::vector<char> v(
        static_cast<size_t>(kBlocks * kKvHeads * kv_piece_bytes(entry.value, Side::values, kValue)));
    for_all([&](const KernelTable& kernels, ThreadPool& pool, const std::string& what) {
      std::fill(k.begin(), k.end(), char{0});
      whole.k = k.data();
      whole.v = v.data();
      const auto expected = course.run(
          whole, [&](const KvWriteArgs& a) { kernels.kv_write(a, pool); },
          [&](const PagedAttentionArgs& a) { kernels.paged_attention(a, pool); });
      // 9 are enough for 90 and 33 tokens, or a row's 7 blocks.
      for (const int64_t slots : {int64_t{9}, int64_t{23}, kBlocks}) {
        if (kOneIn > 1 && slots != 9) continue;  // under a sanitizer
        OffloadFile file(folder.path);
        OffloadedLayer before(file, cache_of(entry.value), 0, kBlocks, slots, 0);
        OffloadedLayer layer(file, cache_of(entry.value), 0, kBlocks, slots,
                             OffloadedLayer::file_bytes(cache_of(entry.value), kBlocks));
        for (OffloadedLayer* one : {&before, &layer}) {
          const auto results = course.run(
              one->cache(),
              [&](const KvWriteArgs& a) {
                one->fetch_written(a.slots, a.tokens);
                kernels.kv_write(a, pool);
              },
              [&](const PagedAttentionArgs& a) { one->attend(a, kernels, pool); });
          CHECK(same_bits(results, expected)) << what << entry.name << slots << " slots";
        }
        CHECK(file.counts.read > 0 || slots != 9) << slots;
        CHECK((file.counts.written == 0) == (slots == kBlocks)) << slots;
        CHECK(file.counts.lost == 0);
      }
    });
  }
}

void what_comes_back_is_what_was_written() {
  Folder folder;
  Course course;
  ThreadPool pool(2);
  const KernelTable& kernels = *kernels_for(available_isas()[0].c_str());
  const KvCache sizes = cache_of(KvFormat::bf16);
  const int64_t bytes = OffloadedLayer::file_bytes(sizes, kBlocks);
  // How a course ends to whose file harm comes behind a step.
  const auto run = [&](int harmed, const auto& harm) {
    OffloadFile file(folder.path);
    OffloadedLayer layer(file, sizes, 5, kBlocks, 9, 0);
    int step = 0;
    try {
      course.run(
          layer.cache(),
          [&](const KvWriteArgs& a) {
            layer.fetch_written(a.slots, a.tokens);
            kernels.kv_write(a, pool);
          },
          [&](const PagedAttentionArgs& a) {
            layer.attend(a, kernels, pool);
            if (++step == harmed) harm();
          });
    } catch (const OffloadError& e) {
      CHECK(e.lost >= -1 && e.lost < kBlocks && e.group == (e.lost < 0 ? -1 : 5)) << e.what();
      CHECK(file.counts.lost == (e.lost < 0 ? 0 : 1)) << e.what();
      return e.lost < 0 ? "full" : "lost";
    }
    return "well";
  };
  CHECK(run(0, [] {}) == std::string("well"));
  CHECK(std::filesystem::is_empty(folder.path));
  const auto one_bit_of_each = [&] {
    const int descriptor = opened_in(folder.path);
    for (int64_t at = 100; at < bytes; at += bytes / kBlocks) {
      char byte = 0;
      if (pread(descriptor, &byte, 1, at) == 1) byte ^= 4;
      CHECK(pwrite(descriptor, &byte, 1, at) == 1);
    }
  };
  CHECK(run(14, one_bit_of_each) == std::string("lost"));
  CHECK(run(14, [&] { CHECK(ftruncate(opened_in(folder.path), 0) == 0); }) == std::string("lost"));
  const auto full = [&] {  // from the first write on
    const int other = open("/dev/full", O_RDWR);
    CHECK(dup2(other, opened_in(folder.path)) >= 0);
    close(other);
  };
  CHECK(run(1, full) == std::string("full"));
  CHECK_THROWS(OffloadFile("/nowhere/at/all"), OffloadError);
}

void a_copy_has_all_of_a_block() {
  Folder folder;
  OffloadFile file(folder.path);
  OffloadedLayer layer(file, cache_of(KvFormat::i8), 0, 4, 2, 0);
  ThreadPool pool(1);
  const KernelTable& kernels = *kernels_for("portable");
  const auto k = random_floats(kBlock * kKvHeads * kKey, 1), v = random_floats(kBlock * kKvHeads * kValue, 2);
  std::vector<int32_t> slots(kBlock);
  for (size_t i = 0; i < slots.size(); ++i)
    slots[i] = static_cast<int32_t>(3 * kBlock + static_cast<int64_t>(i));
  layer.fetch_written(slots.data(), kBlock);
  kernels.kv_write({kBlock,
                    {k.data(), kKvHeads * kKey, kKey},
                    {v.data(), kKvHeads * kValue, kValue},
                    slots.data(),
                    layer.cache()},
                   pool);
  const KvCache& c = layer.cache();
  const int64_t key = kv_piece_bytes(c.format, Side::keys, kKey);
  const int64_t value = kv_piece_bytes(c.format, Side::values, kValue);
  const auto held = [&](int32_t block) {
    const auto bytes = [&](void* memory, int64_t piece) {
      const size_t size = static_cast<size_t>(kKvHeads * piece);
      return std::string(static_cast<char*>(memory) + static_cast<size_t>(c.places[block]) * size, size);
    };
    return bytes(c.k, key) + bytes(c.v, value);
  };
  const std::string written = held(3);
  const auto to_the_file = [&] {  // what both slots have, and they have something else
    const int32_t both[] = {0, 1};
    layer.fetch(both, false);
    std::memset(c.k, 7, static_cast<size_t>(2 * kKvHeads * key));
    std::memset(c.v, 7, static_cast<size_t>(2 * kKvHeads * value));
  };
  to_the_file();
  layer.copy(3, 2);
  const int32_t last[] = {2, 3};
  layer.fetch(last, false);
  CHECK(held(2) == written && held(3) == written);
  // A block whose last user has left may be the one that is taken for its own copy.
  to_the_file();
  layer.copy(3, 3);
  layer.fetch(last, false);
  CHECK(held(3) == written);
  const int32_t three[] = {0, 1, 2};
  CHECK_THROWS(layer.fetch(three, false), std::invalid_argument);
}

}  // namespace

int main() {
  RUN(hash_is_siphash);
  RUN(few_slots_have_the_same_bits);
  RUN(what_comes_back_is_what_was_written);
  RUN(a_copy_has_all_of_a_block);
  return check::result();
}
