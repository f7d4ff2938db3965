// The recurrent ops: stored_convolution, stored_scan and stored_delta_rule.
//
// A request's state is a part of its block of the cache. It is read when the request's first token of the
// step is computed, and written after its last one; between them a task goes through the tokens one after the
// other, so that results don't depend on how a request is cut into steps. A request that begins in this step
// has a state of zeros, whatever its block holds. Where the step asks for it, the state after a token within
// the step is stored in another block as well: a snapshot.
//
// The channels of a state are independent of each other: a task has 16 of them, a tile, for one request.
//
//   convolution   [W-1][C]                      the last inputs, oldest first
//   scan          [ceil(N P / 16)][S][16]       tile i: channels 16 i .. 16 i + 15 of all heads' N P
//   delta rule    [N][ceil(Dv / 16)][D][16]     tile i of a head: its columns 16 i .. 16 i + 15
#pragma once

#include <algorithm>

#include "kernels.h"
#include "parallel.h"
#include "vector_math.h"

namespace ew {
namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kMostTaps = 16;     // of a convolution
constexpr int64_t kMostState = 1024;  // rows of a tile: S, or D
// Tokens that share reading and writing a row of a scan: sums, inputs and decays of as many fit in registers.
constexpr int kScanTokens = kRegisters > 8 ? 4 : 2;

EW_INLINE float* state_of(const StateArgs& s, int64_t request) {
  return s.state + s.block_table[request * s.block_table_stride] * s.stride + s.first;
}
EW_INLINE bool begins(const StateArgs& s, int64_t request) {
  return s.kv_len[request] == s.spans.tokens(request);
}

// Where the step wants a snapshot of the state after token t; null for nowhere.
EW_INLINE float* snapshot_of(const StateArgs& s, int64_t t) {
  return s.slots[t] < 0 ? nullptr : s.state + s.slots[t] / s.slot_tokens * s.stride + s.first;
}

// fn(request, part) for the parts of all requests that have tokens in the step; `work` of a part and token.
template <class F>
void run_parts(const StateArgs& s, int64_t parts, int64_t work, Workers& pool, const F& fn) {
  const int64_t tokens = s.spans.total();
  run_tasks(pool, s.spans.requests * parts, tokens * parts * work, [&](int64_t task, int) {
    const int64_t request = task / parts;
    if (s.spans.tokens(request) > 0) fn(request, task % parts);
  });
}

EW_INLINE F16 activated(Activation kind, F16 v) {
  switch (kind) {
    case Activation::silu:
      return silu(v);
    case Activation::gelu:
      return gelu(v);
    case Activation::gelu_tanh:
      return gelu_tanh(v);
    case Activation::relu:
      return relu(v);
    case Activation::sigmoid:
      return sigmoid(v);
  }
  return v;
}

// result = ((x[t-W+1] w[0] + x[t-W+2] w[1]) + ..) + bias, one fma a tap.
void stored_convolution(const StoredConvolutionArgs& a, Workers& pool) {
  const StateArgs& s = a.state;
  const int64_t tiles = (a.channels + kTile - 1) / kTile, taps = a.taps, before = taps - 1;
  run_parts(s, tiles, kTile * taps, pool, [&](int64_t request, int64_t tile) {
    const int64_t c = tile * kTile, n = a.channels - c;
    float weights[kMostTaps * kTile] = {};
    for (int64_t i = 0; i < kTile && i < n; ++i) {
      for (int64_t k = 0; k < taps; ++k) weights[k * kTile + i] = a.weight[(c + i) * a.weight_stride + k];
    }
    const F16 bias = a.bias ? load_some(a.bias + c, n) : zero();
    float* state = state_of(s, request) + c;
    F16 window[kMostTaps];  // the last inputs, oldest first
    for (int64_t k = 0; k < before; ++k)
      window[k] = begins(s, request) ? zero() : load_some(state + k * a.channels, n);
    for (int64_t t = s.spans.begin(request); t < s.spans.end(request); ++t) {
      window[before] = load_some(a.x.data + t * a.x.stride0 + c, n);
      F16 sum = window[0] * load(weights);
      for (int64_t k = 1; k < taps; ++k) sum = fma(window[k], load(weights + k * kTile), sum);
      if (a.bias) sum = sum + bias;
      if (a.activated) sum = activated(a.activation, sum);
      store_some(a.out.data + t * a.out.stride0 + c, sum, n);
      for (int64_t k = 0; k < before; ++k) window[k] = window[k + 1];
      if (float* snapshot = snapshot_of(s, t)) {
        for (int64_t k = 0; k < before; ++k) store_some(snapshot + c + k * a.channels, window[k], n);
      }
    }
    for (int64_t k = 0; k < before; ++k) store_some(state + k * a.channels, window[k], n);
  });
}

// Calls fn.template operator()<row % 4>(row) for the rows of a tile in ascending order, so that the sums of
// every fourth row stay in registers.
template <class F>
EW_INLINE void for_rows(int64_t size, const F& fn) {
  int64_t row = 0;
  for (; row + 4 <= size; row += 4) {
    fn.template operator()<0>(row);
    fn.template operator()<1>(row + 1);
    fn.template operator()<2>(row + 2);
    fn.template operator()<3>(row + 3);
  }
  if (row < size) fn.template operator()<0>(row);
  if (row + 1 < size) fn.template operator()<1>(row + 1);
  if (row + 2 < size) fn.template operator()<2>(row + 2);
}
EW_INLINE F16 sum_of(const F16 (&sums)[4]) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

// Up to 16 neighbours c .. last-1 of the channels [N, P] of a token.
struct HeadLanes {
  int64_t c, last, channels_of_head, head;
  bool one_head;
  EW_INLINE HeadLanes(int64_t first, int64_t past, int64_t of_head)
      : c(first),
        last(past),
        channels_of_head(of_head),
        head(first / of_head),
        one_head((past - 1) / of_head == head) {}

  // A value of each head.
  EW_INLINE F16 by_head(const float* row) const {
    if (one_head) return splat(row[head]);
    if (channels_of_head == 1) return load_some(row + c, last - c);
    float lanes[kTile] = {};
    for (int64_t i = 0; c + i < last; ++i) lanes[i] = row[(c + i) / channels_of_head];
    return load(lanes);
  }
  // A value of each channel; heads are `stride` apart.
  EW_INLINE F16 by_channel(const float* row, int64_t stride) const {
    if (together(stride)) return load_some(row + place(c, stride), last - c);
    float lanes[kTile] = {};
    for (int64_t i = 0; c + i < last; ++i) lanes[i] = row[place(c + i, stride)];
    return load(lanes);
  }
  EW_INLINE void store_channels(float* row, int64_t stride, F16 v) const {
    if (together(stride)) return store_some(row + place(c, stride), v, last - c);
    float lanes[kTile];
    store(lanes, v);
    for (int64_t i = 0; c + i < last; ++i) row[place(c + i, stride)] = lanes[i];
  }

 private:
  EW_INLINE bool together(int64_t stride) const { return one_head || stride == channels_of_head; }
  EW_INLINE int64_t place(int64_t channel, int64_t stride) const {
    return channel / channels_of_head * stride + channel % channels_of_head;
  }
};

// kScanTokens tokens, one after the other for each row of the tile, which is read and written once for all.
// decay: exp(dt a) of each token; b and c: rows [S] of each.
EW_INLINE void scan_tokens(float* state, int64_t size, const F16 (&input)[kScanTokens],
                           const F16 (&decay)[kScanTokens], const float* const (&b)[kScanTokens],
                           const float* const (&c)[kScanTokens], F16 (&result)[kScanTokens]) {
  F16 sums[kScanTokens][4];
  for (int64_t first = 0; first < 4; ++first) {  // a sum of each token at a time has room in registers
    F16 sum[kScanTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kScanTokens; ++t) sum[t] = zero();
    for (int64_t k = first; k < size; k += 4) {
      F16 row = load(state + k * kTile);
#pragma GCC unroll 4
      for (int t = 0; t < kScanTokens; ++t) {
        row = fma(input[t], splat(b[t][k]), row * decay[t]);
        sum[t] = fma(row, splat(c[t][k]), sum[t]);
      }
      store(state + k * kTile, row);
    }
#pragma GCC unroll 4
    for (int t = 0; t < kScanTokens; ++t) sums[t][first] = sum[t];
  }
#pragma GCC unroll 4
  for (int t = 0; t < kScanTokens; ++t) result[t] = sum_of(sums[t]);
}

// state = state exp(dt a) + (dt x) b;  result = sum over s of state c, four sums of every fourth s.
void stored_scan(const StoredScanArgs& a, Workers& pool) {
  const StateArgs& s = a.state;
  const int64_t channels = a.heads * a.head_channels, tiles = (channels + kTile - 1) / kTile, size = a.size;
  const int64_t heads_of_group = a.heads / a.groups;
  run_parts(s, tiles, 3 * kTile * size, pool, [&](int64_t request, int64_t tile) {
    const int64_t c = tile * kTile;
    const HeadLanes lanes(c, std::min(channels, c + kTile), a.head_channels);
    const int64_t group = lanes.head / heads_of_group;
    const bool one_group = (lanes.last - 1) / a.head_channels / heads_of_group == group;
    float rates[kMostState * kTile], rows[2 * kMostState * kTile];
    if (a.rates_of_state) {  // [N, S] by lane
      for (int64_t i = 0; i < kTile; ++i) {
        const float* of_head = a.a + (c + i < lanes.last ? (c + i) / a.head_channels : 0) * a.a_stride;
        for (int64_t k = 0; k < size; ++k) rates[k * kTile + i] = of_head[k];
      }
    }
    float* state = state_of(s, request) + c * size;
    if (begins(s, request)) {
      for (int64_t k = 0; k < size; ++k) store(state + k * kTile, zero());
    }
    const F16 rate = a.rates_of_state ? zero() : lanes.by_head(a.a);
    const auto step_of = [&](int64_t t) { return lanes.by_head(a.dt.data + t * a.dt.stride0); };
    const auto input_of = [&](int64_t t) {
      return lanes.by_channel(a.x.data + t * a.x.stride0, a.x.stride1);
    };
    const auto put = [&](int64_t t, F16 result) {
      lanes.store_channels(a.out.data + t * a.out.stride0, a.out.stride1, result);
      if (float* snapshot = snapshot_of(s, t)) std::copy_n(state, size * kTile, snapshot + c * size);
    };
    int64_t t = s.spans.begin(request);
    const int64_t end = s.spans.end(request);
    while (t < end) {
      const float* b = a.b.data + t * a.b.stride0 + group * a.b.stride1;
      const float* from = a.c.data + t * a.c.stride0 + group * a.c.stride1;
      int64_t plain = 0;  // tokens before which no snapshot of this run is wanted
      while (plain < kScanTokens && t + plain < end && (plain == 0 || !snapshot_of(s, t + plain - 1)))
        ++plain;
      if (plain == kScanTokens && one_group && !a.rates_of_state) {
        F16 input[kScanTokens], decay[kScanTokens], result[kScanTokens];
        const float *into[kScanTokens], *out[kScanTokens];
        for (int i = 0; i < kScanTokens; ++i) {
          const F16 dt = step_of(t + i);
          input[i] = dt * input_of(t + i);
          decay[i] = exp(dt * rate);
          into[i] = b + i * a.b.stride0;
          out[i] = from + i * a.c.stride0;
        }
        scan_tokens(state, size, input, decay, into, out, result);
        for (int i = 0; i < kScanTokens; ++i) put(t + i, result[i]);
        t += kScanTokens;
        continue;
      }
      const F16 dt = step_of(t), input = dt * input_of(t), decay = exp(dt * rate);
      F16 sums[4] = {zero(), zero(), zero(), zero()};
      const auto scan = [&](const auto& kept, const auto& into, const auto& out)
                            __attribute__((always_inline)) {
                              for_rows(size, [&]<int I>(int64_t k) __attribute__((always_inline)) {
                                const F16 row = fma(input, into(k), load(state + k * kTile) * kept(k));
                                store(state + k * kTile, row);
                                sums[I] = fma(row, out(k), sums[I]);
                              });
                            };
      const auto scan_with = [&](const auto& kept) __attribute__((always_inline)) {
        if (one_group)
          return scan(
              kept, [&](int64_t k) { return splat(b[k]); }, [&](int64_t k) { return splat(from[k]); });
        for (int64_t i = 0; i < kTile; ++i) {  // each lane's own rows of b and c
          const int64_t own = (c + i < lanes.last ? c + i : c) / a.head_channels / heads_of_group;
          for (int64_t k = 0; k < size; ++k) {
            rows[k * kTile + i] = a.b.data[t * a.b.stride0 + own * a.b.stride1 + k];
            rows[(size + k) * kTile + i] = a.c.data[t * a.c.stride0 + own * a.c.stride1 + k];
          }
        }
        scan(
            kept, [&](int64_t k) { return load(rows + k * kTile); },
            [&](int64_t k) { return load(rows + (size + k) * kTile); });
      };
      if (a.rates_of_state) {
        scan_with([&](int64_t k) { return exp(dt * load(rates + k * kTile)); });
      } else {
        scan_with([&](int64_t) { return decay; });
      }
      put(t++, sum_of(sums));
    }
  });
}

// The factor that makes the sum of squares of x [D] one, but for a small addition: 1 / sqrt(sum + 1e-6).
inline float unit_factor(const float* x, int64_t size) {
  F16 squares = zero();
  for (int64_t i = 0; i < size; i += kTile) {
    const F16 v = load_some(x + i, size - i);
    squares = fma(v, v, squares);
  }
  return 1.0f / __builtin_sqrtf(sum_lanes(squares) + 1e-6f);
}

// A token's rows as the delta rule multiplies by them.
struct DeltaRows {
  float keys[kMostState], queries[kMostState],
      kept[kMostState];  // kept: exp(decay) of each row, or of all in [0]
};

// state = state exp(decay);  delta = beta (v - state^T k);  state = state + k delta;  result = state^T q.
// Both sums are four, of every fourth row. The last two parts of a token and the first two of the next go
// over the state together.
template <bool DecayOfRows>
void delta_rule(const StoredDeltaRuleArgs& a, int64_t request, int64_t part) {
  const StateArgs& s = a.state;
  const int64_t tiles = (a.value_size + kTile - 1) / kTile, size = a.key_size;
  const int64_t head = part / tiles, c = part % tiles * kTile, n = a.value_size - c;
  const int64_t key_head = head / (a.heads / a.key_heads);
  const int64_t place = (head * tiles + part % tiles) * size * kTile;
  float* state = state_of(s, request) + place;
  if (begins(s, request)) {
    for (int64_t d = 0; d < size; ++d) store(state + d * kTile, zero());
  }
  DeltaRows rows[2];
  const auto fill = [&](int64_t t, DeltaRows& to) {
    const float* k = a.k.data + t * a.k.stride0 + key_head * a.k.stride1;
    const float* q = a.q.data + t * a.q.stride0 + key_head * a.q.stride1;
    const F16 key_factor = splat(a.normalize ? unit_factor(k, size) : 1.0f);
    const F16 query_factor = splat(a.normalize ? unit_factor(q, size) * a.scale : a.scale);
    const float* decay = a.decay.data + t * a.decay.stride0 + head * (DecayOfRows ? a.decay.stride1 : 1);
    for (int64_t d = 0; d < size; d += kTile) {
      store_some(to.keys + d, load_some(k + d, size - d) * key_factor, size - d);
      store_some(to.queries + d, load_some(q + d, size - d) * query_factor, size - d);
      if (DecayOfRows) store_some(to.kept + d, exp(load_some(decay + d, size - d)), size - d);
    }
    if (!DecayOfRows) store_some(to.kept, exp(splat(decay[0])), 1);
  };
  int64_t t = s.spans.begin(request);
  const int64_t end = s.spans.end(request);
  DeltaRows *now = &rows[0], *next = &rows[1];
  F16 known[4];
  const auto decay_and_sum = [&](const DeltaRows& x) __attribute__((always_inline)) {
    const F16 whole = splat(x.kept[0]);
    for (F16& sum : known) sum = zero();
    for_rows(size, [&]<int I>(int64_t d) __attribute__((always_inline)) {
      const F16 row = load(state + d * kTile) * (DecayOfRows ? splat(x.kept[d]) : whole);
      store(state + d * kTile, row);
      known[I] = fma(row, splat(x.keys[d]), known[I]);
    });
  };
  fill(t, *now);
  decay_and_sum(*now);
  for (; t < end; ++t, std::swap(now, next)) {
    const F16 value = load_some(a.v.data + t * a.v.stride0 + head * a.v.stride1 + c, n);
    const F16 delta = (value - sum_of(known)) * splat(a.beta.data[t * a.beta.stride0 + head]);
    float* snapshot = snapshot_of(s, t);
    const bool together = t + 1 < end && snapshot == nullptr;
    if (t + 1 < end) fill(t + 1, *next);
    F16 sums[4] = {zero(), zero(), zero(), zero()};
    if (together) {
      const F16 whole = splat(next->kept[0]);
      for (F16& sum : known) sum = zero();
      const auto pass = [&](int64_t d, F16& sum, F16& of_next) __attribute__((always_inline)) {
        F16 row = fma(delta, splat(now->keys[d]), load(state + d * kTile));
        sum = fma(row, splat(now->queries[d]), sum);
        row = row * (DecayOfRows ? splat(next->kept[d]) : whole);
        store(state + d * kTile, row);
        of_next = fma(row, splat(next->keys[d]), of_next);
      };
      if constexpr (kRegisters > 8) {
        for_rows(size, [&]<int I>(int64_t d) __attribute__((always_inline)) { pass(d, sums[I], known[I]); });
      } else {  // two of the eight sums at a time
        for (int64_t first = 0; first < 4; ++first) {
          F16 sum = zero(), of_next = zero();
          for (int64_t d = first; d < size; d += 4) pass(d, sum, of_next);
          sums[first] = sum, known[first] = of_next;
        }
      }
    } else {
      for_rows(size, [&]<int I>(int64_t d) __attribute__((always_inline)) {
        const F16 row = fma(delta, splat(now->keys[d]), load(state + d * kTile));
        store(state + d * kTile, row);
        sums[I] = fma(row, splat(now->queries[d]), sums[I]);
      });
    }
    store_some(a.out.data + t * a.out.stride0 + head * a.out.stride1 + c, sum_of(sums), n);
    if (snapshot != nullptr) std::copy_n(state, size * kTile, snapshot + place);
    if (!together && t + 1 < end) decay_and_sum(*next);
  }
}

void stored_delta_rule(const StoredDeltaRuleArgs& a, Workers& pool) {
  const int64_t tiles = (a.value_size + kTile - 1) / kTile;
  run_parts(a.state, a.heads * tiles, 4 * kTile * a.key_size, pool, [&](int64_t request, int64_t part) {
    if (a.decay_of_rows) {
      delta_rule<true>(a, request, part);
    } else {
      delta_rule<false>(a, request, part);
    }
  });
}

}  // namespace
}  // namespace ew
