// Scores to weights: what lies between q.k and p.v in attention, for the rows of a block and a step of keys.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace ew {
namespace {

// Scores are in units of log2: a weight is 2^score, which spares a product and what reduces by ln 2.
constexpr float kLog2e = 1.44269504f;

// 2^x for x that is not above 0, within 2.1 ulp. Exactly 1 at 0, exactly 0 below -125; a NaN stays.
EW_INLINE F16 exp2_of_negative(F16 x) {
  const F16 n = nearest(x), r = x - n;
  F16 p = splat(0.0013264727f);
  p = fma(p, r, splat(0.009671513f));
  p = fma(p, r, splat(0.055507336f));
  p = fma(p, r, splat(0.24022242f));
  p = fma(p, r, splat(0.693147f));
  p = fma(p, r, splat(1.0f));
  return select(x < splat(-125.0f), zero(), times_pow2(p, n));
}

EW_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

constexpr float kSlots[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

constexpr uint32_t kAllBlocks = (1u << kStep / kBlock) - 1;

// What a row's scores meet: the slots begin .. end-1 of those given are seen, and `distance` is the position
// of the first one less the query's.
struct RowView {
  int64_t head, distance, begin, end;
  uint32_t blocks = kAllBlocks;  // of those slots, bit i of block i
};

// A score is more than a product of q.k: it has a cap, or something is added by distance.
EW_INLINE bool alters_scores(const PagedAttentionArgs& a) {
  return a.softcap > 0 || a.slopes != nullptr || a.biases.data != nullptr;
}
// A score is `factor` times q.k and no more: no scales of keys, no cap, no slope.
EW_INLINE bool plain_scores(const PagedAttentionArgs& a) {
  return a.scale > 0 && !alters_scores(a) && !has_scales(a.cache.format);
}
// Returns the factor of all scores, besides a key's own scale. Caps, slopes and biases are for scores in
// units of e.
EW_INLINE float common_scale(const PagedAttentionArgs& a) {
  return alters_scores(a) ? a.scale : a.scale * kLog2e;
}

// The largest of `count` scores of a row, which stay, but for -inf where they aren't seen.
EW_INLINE float largest_score(const RowView& row, int64_t count, float* scores) {
  const F16 hidden = splat(-__builtin_inff());
  if (row.begin > 0 || row.end < count || row.blocks != kAllBlocks) {
    for (int64_t i = 0; i < count; i += 16) {
      const int64_t end = row.blocks >> i / kBlock & 1u ? row.end : 0;
      const M16 seen = lanes_between(clamp(row.begin - i, 0, 16), clamp(end - i, 0, 16));
      store(scores + i, select(seen, load(scores + i), hidden));
    }
  }
  F16 best = hidden, other = hidden;
  for (int64_t i = 0; i < count; i += 32) {
    best = max(load(scores + i), best);
    other = max(load(scores + i + 16), other);
  }
  return max_lanes(max(best, other));
}

// The biases of 16 keys, the first of which is at `distance`.
EW_INLINE F16 biases_at(const Biases& biases, int64_t head, int64_t distance) {
  const float* middle = biases.data + head * biases.stride + biases.reach;
  if (distance >= -biases.reach && distance + 15 <= biases.reach) return load(middle + distance);
  float lanes[16];
  for (int64_t i = 0; i < 16; ++i) lanes[i] = middle[clamp(distance + i, -biases.reach, biases.reach)];
  return load(lanes);
}

// `count` q.k of a row to scores, in place, -inf where they aren't seen. `scales`: of each key, the
// attention's own included. Returns the largest.
EW_INLINE float scale_scores(const PagedAttentionArgs& a, const RowView& row, const float* scales,
                             int64_t count, float* scores) {
  if (alters_scores(a)) {
    for (int64_t i = 0; i < count; i += 16) {
      F16 s = load(scores + i) * load(scales + i);
      if (a.softcap > 0) {
        const F16 cap = splat(a.softcap);
        s = cap * tanh(s / cap);
      }
      if (a.slopes != nullptr) {  // ALiBi (Press et al., arXiv:2108.12409)
        const F16 distance = abs(splat(static_cast<float>(row.distance + i)) + load(kSlots));
        s = fnma(splat(a.slopes[row.head]), distance, s);
      }
      if (a.biases.data != nullptr) s = s + biases_at(a.biases, row.head, row.distance + i);
      store(scores + i, s * splat(kLog2e));
    }
  } else {
    for (int64_t i = 0; i < count; i += 16) store(scores + i, load(scores + i) * load(scales + i));
  }
  return largest_score(row, count, scores);
}

// Scores of a row to weights 2^(factor * score - top), 32 at a time to place(i, first 16, last 16). Returns
// their sum.
template <class Place>
EW_INLINE float weigh_scores(float top, float factor, int64_t count, const float* scores,
                             const Place& place) {
  const F16 m = splat(top), f = splat(factor);
  F16 sum = zero();
  for (int64_t i = 0; i < count; i += 32) {
    const F16 low = exp2_of_negative(load(scores + i) * f - m);
    const F16 high = exp2_of_negative(load(scores + i + 16) * f - m);
    place(i, low, high);
    sum = sum + low;
    sum = sum + high;
  }
  return sum_lanes(sum);
}

// The online softmax takes in the largest scores of `rows` rows, at most 16, times `factor`: m becomes the
// running maximum, `factors` what sums so far are scaled by, `tops` what the scores are taken relative to (m,
// but 0 for a row that has seen nothing: its weights are 0).
EW_INLINE void raise_maxima(int64_t rows, const float* best, float factor, float* m, float* factors,
                            float* tops) {
  const F16 before = load_some(m, rows), after = max(load_some(best, rows) * splat(factor), before);
  const F16 top = select(splat(-__builtin_inff()) < after, after, select(after != after, after, zero()));
  store(tops, top);
  store(factors, exp2_of_negative(before - top));
  store_some(m, after, rows);
}

}  // namespace
}  // namespace ew
