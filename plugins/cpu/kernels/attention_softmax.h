// Scores to weights: what lies between q.k and p.v in attention, for the rows of a block and a step of keys.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace ew {
namespace {

constexpr int64_t kStep = 128;  // keys of a softmax step

// e^x for x that is not above 0, within 2 ulp: as exp, without what numbers beyond 2^127 and subnormal
// results need. Exactly 1 at 0, exactly 0 below -87; a NaN stays.
EW_INLINE F16 exp_of_negative(F16 x) {
  const F16 y = max(splat(-87.0f), x);  // in this order a NaN stays
  const F16 magic = splat(12582912.0f);
  const F16 n = fma(y, splat(1.44269504f), magic) - magic;
  F16 r = fnma(n, splat(0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  F16 p = splat(0.0013950601f);
  p = fma(p, r, splat(0.00836895313f));
  p = fma(p, r, splat(0.041666206f));
  p = fma(p, r, splat(0.166665182f));
  p = fma(p, r, splat(0.5f));
  p = fma(p * r, r, r) + splat(1.0f);
  return select(x < splat(-87.0f), zero(), p * pow2(n));
}

EW_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

constexpr float kSlots[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// What a row's scores meet: the slots begin .. end-1 of those given are seen, and `distance` is the position
// of the first one less the query's.
struct RowView {
  int64_t head, distance, begin, end;
};

// `count` q.k of a row to scores, in place, -inf where they aren't seen. `scales`: of each key, the
// attention's own included. Returns the largest.
EW_INLINE float scale_scores(const PagedAttentionArgs& a, const RowView& row, const float* scales,
                             int64_t count, float* scores) {
  const F16 hidden = splat(-__builtin_inff());
  const bool partial = row.begin > 0 || row.end < count;
  F16 best = hidden;
  for (int64_t i = 0; i < count; i += 16) {
    F16 s = load(scores + i) * load(scales + i);
    if (a.softcap > 0) {
      const F16 cap = splat(a.softcap);
      s = cap * tanh(s / cap);
    }
    if (a.slopes != nullptr) {  // ALiBi (Press et al., arXiv:2108.12409)
      const F16 first = splat(static_cast<float>(row.distance + i));
      s = fma(splat(a.slopes[row.head]), first + load(kSlots), s);
    }
    if (partial) s = select(lanes_between(clamp(row.begin - i, 0, 16), clamp(row.end - i, 0, 16)), s, hidden);
    store(scores + i, s);
    best = max(s, best);
  }
  return max_lanes(best);
}

// Scores of a row to weights e^(score - top), in place. Returns their sum.
EW_INLINE float weigh_scores(float top, int64_t count, float* scores) {
  const F16 m = splat(top);
  F16 sum = zero();
  for (int64_t i = 0; i < count; i += 16) {
    const F16 p = exp_of_negative(load(scores + i) - m);
    store(scores + i, p);
    sum = sum + p;
  }
  return sum_lanes(sum);
}

// The online softmax takes in the largest scores of `rows` rows, at most 16: m becomes the running maximum,
// `factors` what sums so far are scaled by, `tops` what the scores are taken relative to (m, but 0 for a row
// that has seen nothing: its weights are 0).
EW_INLINE void raise_maxima(int64_t rows, const float* best, float* m, float* factors, float* tops) {
  const F16 before = load_some(m, rows), after = max(load_some(best, rows), before);
  const F16 top = select(splat(-__builtin_inff()) < after, after, select(after != after, after, zero()));
  store(tops, top);
  store(factors, exp_of_negative(before - top));
  store_some(m, after, rows);
}

}  // namespace
}  // namespace ew
