// rope_kv_write: queries and keys are rotated by one table, and keys and values go to the cache, in one pass
// over the tokens. A rotated key is in memory of this function for one head at a time.
//
//   q ---- rotate ----> out       k ---- rotate ----> head [D] ----> cache, ends       v ----> cache, ends
#pragma once

#include "kernels.h"
#include "kv_format.h"
#include "parallel.h"
#include "rope.h"

namespace ew {
namespace {

void rope_kv_write(const RopeKvWriteArgs& a, Workers& pool) {
  const KvCache& c = a.write.cache;
  const int64_t work = a.query.heads * a.query.size + c.kv_heads * (2 * c.key_size + c.value_size);
  run_rows(pool, a.write.tokens, work, [&](int64_t begin, int64_t end) {
    alignas(64) float key[kLongestHead];  // what crosses a line of the cache can't be forwarded to the reads
    for (int64_t t = begin; t < end; ++t) {
      rope_token(a.query, t);
      if (!a.write.owns(a.write.slots[t] / kBlock)) continue;
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        rotate(a.key, a.key.table + t * a.key.table_stride,
               a.key.x.data + t * a.key.x.stride0 + h * a.key.x.stride1, key);
        write_head(a.write, t, h, key);
      }
    }
  });
}

}  // namespace
}  // namespace ew
