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

EW_INLINE float* state_of(const StateArgs& s, int64_t request) {
  return s.state + s.block_table[request * s.block_table_stride] * s.stride + s.first;
}
EW_INLINE bool begins(const StateArgs& s, int64_t request) {
  return s.kv_len[request] == s.q_start[request + 1] - s.q_start[request];
}

// Where the step wants a snapshot of the state after token t; null for nowhere.
EW_INLINE float* snapshot_of(const StateArgs& s, int64_t t) {
  return s.slots[t] < 0 ? nullptr : s.state + s.slots[t] / s.slot_tokens * s.stride + s.first;
}

// fn(request, part) for the parts of all requests that have tokens in the step; `work` of a part and token.
template <class F>
void run_parts(const StateArgs& s, int64_t parts, int64_t work, Workers& pool, const F& fn) {
  const int64_t tokens = s.q_start[s.requests];
  run_tasks(pool, s.requests * parts, tokens * parts * work, [&](int64_t task, int) {
    const int64_t request = task / parts;
    if (s.q_start[request] < s.q_start[request + 1]) fn(request, task % parts);
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
    for (int64_t t = s.q_start[request]; t < s.q_start[request + 1]; ++t) {
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

// 16 lanes of an array [T, N] by head, from channel c on of heads of P channels.
EW_INLINE F16 by_head(const float* row, int64_t c, int64_t last, int64_t channels_of_head) {
  const int64_t head = c / channels_of_head;
  if ((last - 1) / channels_of_head == head) return splat(row[head]);
  float lanes[kTile] = {};
  for (int64_t i = 0; c + i < last; ++i) lanes[i] = row[(c + i) / channels_of_head];
  return load(lanes);
}

// state = state exp(dt a) + (dt x) b;  result = sum over s of state c, four sums of every fourth s.
void stored_scan(const StoredScanArgs& a, Workers& pool) {
  const StateArgs& s = a.state;
  const int64_t channels = a.heads * a.head_channels, tiles = (channels + kTile - 1) / kTile, size = a.size;
  const int64_t heads_of_group = a.heads / a.groups;
  run_parts(s, tiles, 3 * kTile * size, pool, [&](int64_t request, int64_t tile) {
    const int64_t c = tile * kTile, n = channels - c, last = n < kTile ? channels : c + kTile;
    const int64_t group = c / a.head_channels / heads_of_group;
    const bool one_group = (last - 1) / a.head_channels / heads_of_group == group;
    float rates[kMostState * kTile], rows[2 * kMostState * kTile];
    if (a.rates_of_state) {  // [N, S] by lane
      for (int64_t i = 0; i < kTile; ++i) {
        const float* of_head = a.a + (c + i < last ? (c + i) / a.head_channels : 0) * a.a_stride;
        for (int64_t k = 0; k < size; ++k) rates[k * kTile + i] = of_head[k];
      }
    }
    float* state = state_of(s, request) + c * size;
    if (begins(s, request)) {
      for (int64_t k = 0; k < size; ++k) store(state + k * kTile, zero());
    }
    for (int64_t t = s.q_start[request]; t < s.q_start[request + 1]; ++t) {
      const F16 dt = by_head(a.dt.data + t * a.dt.stride0, c, last, a.head_channels);
      float lanes[kTile] = {};
      for (int64_t i = 0; c + i < last; ++i)
        lanes[i] =
            a.x.data[t * a.x.stride0 + (c + i) / a.head_channels * a.x.stride1 + (c + i) % a.head_channels];
      const F16 input = dt * load(lanes);
      const float* b = a.b.data + t * a.b.stride0 + group * a.b.stride1;
      const float* out = a.c.data + t * a.c.stride0 + group * a.c.stride1;
      if (!one_group) {  // each lane's own rows of b and c
        for (int64_t i = 0; i < kTile; ++i) {
          const int64_t own = (c + i < last ? c + i : c) / a.head_channels / heads_of_group;
          for (int64_t k = 0; k < size; ++k) {
            rows[k * kTile + i] = a.b.data[t * a.b.stride0 + own * a.b.stride1 + k];
            rows[(size + k) * kTile + i] = a.c.data[t * a.c.stride0 + own * a.c.stride1 + k];
          }
        }
      }
      const F16 decay = a.rates_of_state ? zero() : exp(dt * by_head(a.a, c, last, a.head_channels));
      F16 sums[4] = {zero(), zero(), zero(), zero()};
      for (int64_t k = 0; k < size; ++k) {
        const F16 kept = a.rates_of_state ? exp(dt * load(rates + k * kTile)) : decay;
        const F16 into = one_group ? splat(b[k]) : load(rows + k * kTile);
        const F16 from = one_group ? splat(out[k]) : load(rows + (size + k) * kTile);
        const F16 after = fma(input, into, load(state + k * kTile) * kept);
        store(state + k * kTile, after);
        sums[k % 4] = fma(after, from, sums[k % 4]);
      }
      store(lanes, (sums[0] + sums[1]) + (sums[2] + sums[3]));
      for (int64_t i = 0; c + i < last; ++i)
        a.out
            .data[t * a.out.stride0 + (c + i) / a.head_channels * a.out.stride1 + (c + i) % a.head_channels] =
            lanes[i];
      if (float* snapshot = snapshot_of(s, t)) std::copy_n(state, size * kTile, snapshot + c * size);
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

// state = state exp(decay);  delta = beta (v - state^T k);  state = state + k delta;  result = state^T q.
// Both sums are four, of every fourth row.
void stored_delta_rule(const StoredDeltaRuleArgs& a, Workers& pool) {
  const StateArgs& s = a.state;
  const int64_t tiles = (a.value_size + kTile - 1) / kTile, size = a.key_size;
  run_parts(s, a.heads * tiles, 4 * kTile * size, pool, [&](int64_t request, int64_t part) {
    const int64_t head = part / tiles, c = part % tiles * kTile, n = a.value_size - c;
    const int64_t key_head = head / (a.heads / a.key_heads);
    const int64_t place = (head * tiles + part % tiles) * size * kTile;
    float* state = state_of(s, request) + place;
    if (begins(s, request)) {
      for (int64_t d = 0; d < size; ++d) store(state + d * kTile, zero());
    }
    float keys[kMostState], queries[kMostState], kept[kMostState];
    for (int64_t t = s.q_start[request]; t < s.q_start[request + 1]; ++t) {
      const float* k = a.k.data + t * a.k.stride0 + key_head * a.k.stride1;
      const float* q = a.q.data + t * a.q.stride0 + key_head * a.q.stride1;
      const F16 key_factor = splat(a.normalize ? unit_factor(k, size) : 1.0f);
      const F16 query_factor = splat(a.normalize ? unit_factor(q, size) * a.scale : a.scale);
      const float* decay =
          a.decay.data + t * a.decay.stride0 + head * (a.decay_of_rows ? a.decay.stride1 : 1);
      for (int64_t d = 0; d < size; d += kTile) {
        store_some(keys + d, load_some(k + d, size - d) * key_factor, size - d);
        store_some(queries + d, load_some(q + d, size - d) * query_factor, size - d);
        if (a.decay_of_rows) store_some(kept + d, exp(load_some(decay + d, size - d)), size - d);
      }
      const F16 whole = exp(splat(decay[0]));
      F16 sums[4] = {zero(), zero(), zero(), zero()};
      for (int64_t d = 0; d < size; ++d) {
        const F16 row = load(state + d * kTile) * (a.decay_of_rows ? splat(kept[d]) : whole);
        store(state + d * kTile, row);
        sums[d % 4] = fma(row, splat(keys[d]), sums[d % 4]);
      }
      const F16 known = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      const F16 value = load_some(a.v.data + t * a.v.stride0 + head * a.v.stride1 + c, n);
      const F16 delta = (value - known) * splat(a.beta.data[t * a.beta.stride0 + head]);
      for (F16& sum : sums) sum = zero();
      for (int64_t d = 0; d < size; ++d) {
        const F16 row = fma(delta, splat(keys[d]), load(state + d * kTile));
        store(state + d * kTile, row);
        sums[d % 4] = fma(row, splat(queries[d]), sums[d % 4]);
      }
      store_some(a.out.data + t * a.out.stride0 + head * a.out.stride1 + c,
                 (sums[0] + sums[1]) + (sums[2] + sums[3]), n);
      if (float* snapshot = snapshot_of(s, t)) std::copy_n(state, size * kTile, snapshot + place);
    }
  });
}

}  // namespace
}  // namespace ew
