"""Triton kernels of recurrent layers: ``ew.stored_convolution``, ``ew.stored_scan`` and ``ew.stored_delta_rule``.

A program owns some channels of one request's state. It reads them once, computes the request's tokens of the step one
after the other, and writes the state back. So a result doesn't depend on the batch, nor on how a request is cut into
steps. The sums are in float32. A request whose tokens are all in this step begins with zeros, whatever its block
holds. The state after a token whose entry of ``slots`` isn't negative is stored in that block too: a snapshot.

The states of a layer are float32 [P, STATE_SIZE]; a kernel's part of a block begins at FIRST::

    convolution   [TAPS-1, CHANNELS]    the last inputs, oldest first
    scan          [N P, S]              a row is a channel of a head
    delta rule    [N, Dv, D]            a row is a column of ew.gated_delta_rule's state

``blocks`` is the number of columns of the block table, of which the first one is read. Padding has no tokens, so it
reads and writes no state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .step_kernels import activated


@triton.jit
def _place(state: tl.tensor, block: tl.tensor, STATE_SIZE: tl.constexpr, FIRST: tl.constexpr) -> tl.tensor:
    """Returns the pointer to a kernel's part of a block of states."""
    return state + block.to(tl.int64) * STATE_SIZE + FIRST


@triton.jit(do_not_specialize=["blocks"])
def stored_convolution_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    state: tl.tensor,
    block_table: tl.tensor,
    q_start: tl.tensor,
    kv_len: tl.tensor,
    slots: tl.tensor,
    blocks: tl.tensor,
    out: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Convolves x [T, CHANNELS] over each request's last TAPS inputs -> out; grid (requests, tiles of TILE channels).

    TOKENS tokens are computed at a time. ROWS is TAPS - 1, rounded up to a power of 2.
    """
    request = tl.program_id(0)
    start = tl.load(q_start + request)
    end = tl.load(q_start + request + 1)
    known = tl.where(tl.load(kv_len + request) > end - start, start, start - TAPS)  # inputs before it aren't zero
    held = _place(state, tl.load(block_table + request.to(tl.int64) * blocks), STATE_SIZE, FIRST)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = c < tl.where(end > start, CHANNELS, 0)
    for first in range(start, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        inside = (token < end)[:, None] & real[None, :]
        slot = tl.load(slots + token, mask=token < end, other=-1)
        stored = inside & (slot >= 0)[:, None]
        snapshot = _place(state, slot // STATE_TOKENS, STATE_SIZE, FIRST)
        total = tl.zeros((TOKENS, TILE), tl.float32)
        for k in tl.static_range(TAPS):
            source = token - (TAPS - 1 - k)
            here = (source >= start)[:, None]
            at = x + source.to(tl.int64)[:, None] * X_STRIDE + c[None, :]
            value = tl.load(at, mask=inside & here, other=0.0).to(tl.float32)
            row = source - start + (TAPS - 1)
            before = (source < known)[:, None]
            value += tl.load(held + row[:, None] * CHANNELS + c[None, :], mask=inside & before, other=0.0)
            factor = tl.load(weight + c * WEIGHT_STRIDE + k, mask=real, other=0.0).to(tl.float32)
            total += value * factor[None, :]
            if k > 0:
                tl.store(snapshot[:, None] + (k - 1) * CHANNELS + c[None, :], value, mask=stored)
        if BIAS:
            total += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)[None, :]
        to = out + token.to(tl.int64)[:, None] * OUT_STRIDE + c[None, :]
        tl.store(to, activated(total, ACTIVATION).to(out.dtype.element_ty), mask=inside)
    row = tl.arange(0, ROWS)
    source = end - (TAPS - 1) + row
    inside = (row < TAPS - 1)[:, None] & real[None, :]
    at = x + source.to(tl.int64)[:, None] * X_STRIDE + c[None, :]
    value = tl.load(at, mask=inside & (source >= start)[:, None], other=0.0).to(tl.float32)
    before = (source < known)[:, None]
    old = row + (end - start)
    value += tl.load(held + old[:, None] * CHANNELS + c[None, :], mask=inside & before, other=0.0)
    tl.debug_barrier()  # every thread has read the state before one overwrites it
    tl.store(held + row[:, None] * CHANNELS + c[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def stored_scan_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    state: tl.tensor,
    block_table: tl.tensor,
    q_start: tl.tensor,
    kv_len: tl.tensor,
    slots: tl.tensor,
    blocks: tl.tensor,
    out: tl.tensor,
    CHANNELS: tl.constexpr,
    OF_HEAD: tl.constexpr,
    OF_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    X_OUTER: tl.constexpr,
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_OUTER: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_OUTER: tl.constexpr,
    C_STRIDE: tl.constexpr,
    OUT_OUTER: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Scans x [T, N, P] by dt [T, N], a, b and c [T, G, S] -> out; grid (requests, tiles of TILE channels).

    CHANNELS is N P, OF_HEAD is P, and OF_GROUP the channels that read the same rows of b and c. With A_STRIDE, a is
    [N, S], otherwise [N]. SIZE is S, and WIDTH a power of 2 at least as large.
    """
    request = tl.program_id(0)
    start = tl.load(q_start + request)
    end = tl.load(q_start + request + 1)
    known = tl.where(tl.load(kv_len + request) > end - start, SIZE, 0)
    held = _place(state, tl.load(block_table + request.to(tl.int64) * blocks), STATE_SIZE, FIRST)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = channel // OF_HEAD
    s = tl.arange(0, WIDTH)
    real = channel < tl.where(end > start, CHANNELS, 0)
    inside = real[:, None] & (s < SIZE)[None, :]
    place = channel[:, None] * SIZE + s[None, :]
    values = tl.load(held + place, mask=real[:, None] & (s < known)[None, :], other=0.0)
    if A_STRIDE:
        rates = tl.load(a + head[:, None] * A_STRIDE + s[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        rates = tl.load(a + head, mask=real, other=0.0).to(tl.float32)
    for token in range(start, end):
        t = start.to(tl.int64) + (token - start)  # the interpreter counts in Python's integers
        step = tl.load(dt + t * DT_STRIDE + head, mask=real, other=0.0).to(tl.float32)
        at = x + t * X_OUTER + head * X_STRIDE + channel % OF_HEAD
        entering = tl.load(at, mask=real, other=0.0).to(tl.float32) * step
        if OF_GROUP % TILE == 0:  # all channels of the tile read the same rows
            group = tl.program_id(1) * TILE // OF_GROUP
            into = tl.load(b + t * B_OUTER + group * B_STRIDE + s, mask=s < SIZE, other=0.0).to(tl.float32)[None, :]
            seen = tl.load(c + t * C_OUTER + group * C_STRIDE + s, mask=s < SIZE, other=0.0).to(tl.float32)[None, :]
        else:
            group = (channel // OF_GROUP)[:, None]
            into = tl.load(b + t * B_OUTER + group * B_STRIDE + s[None, :], mask=inside, other=0.0).to(tl.float32)
            seen = tl.load(c + t * C_OUTER + group * C_STRIDE + s[None, :], mask=inside, other=0.0).to(tl.float32)
        if A_STRIDE:
            values *= tl.exp(step[:, None] * rates)
        else:
            values *= tl.exp(step * rates)[:, None]
        values += entering[:, None] * into
        result = tl.sum(values * seen, axis=1)
        to = out + t * OUT_OUTER + head * OUT_STRIDE + channel % OF_HEAD
        tl.store(to, result.to(out.dtype.element_ty), mask=real)
        slot = tl.load(slots + token)
        snapshot = _place(state, slot // STATE_TOKENS, STATE_SIZE, FIRST)
        stored = (s < tl.where(slot >= 0, SIZE, 0))[None, :]
        tl.store(snapshot + place, values, mask=real[:, None] & stored)
    tl.store(held + place, values, mask=inside)


@triton.jit
def _unit(x: tl.tensor, EPS: tl.constexpr, NORMALIZE: tl.constexpr) -> tl.tensor:
    """Returns x divided by the root of its sum of squares plus EPS; x itself without NORMALIZE."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) + EPS)) if NORMALIZE else x


@triton.jit(do_not_specialize=["blocks"])
def stored_delta_rule_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    state: tl.tensor,
    block_table: tl.tensor,
    q_start: tl.tensor,
    kv_len: tl.tensor,
    slots: tl.tensor,
    blocks: tl.tensor,
    out: tl.tensor,
    OF_KEY: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    Q_OUTER: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_OUTER: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_OUTER: tl.constexpr,
    V_STRIDE: tl.constexpr,
    DECAY_OUTER: tl.constexpr,
    DECAY_STRIDE: tl.constexpr,
    BETA_STRIDE: tl.constexpr,
    OUT_OUTER: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Applies the gated delta rule to q, k [T, Nk, D], v [T, N, Dv], decay and beta [T, N] -> out [T, N, Dv]; grid
    (requests, heads, tiles of TILE columns).

    OF_KEY is the number of heads of v for each head of k. With DECAY_STRIDE, decay is [T, N, D]. SIZE is D, WIDTH a
    power of 2 at least as large, VALUE_SIZE is Dv.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(q_start + request)
    end = tl.load(q_start + request + 1)
    known = tl.where(tl.load(kv_len + request) > end - start, SIZE, 0)
    held = _place(state, tl.load(block_table + request.to(tl.int64) * blocks), STATE_SIZE, FIRST)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, WIDTH)
    row = d < SIZE
    real = column < tl.where(end > start, VALUE_SIZE, 0)
    inside = real[:, None] & row[None, :]
    place = (head * VALUE_SIZE + column[:, None]) * SIZE + d[None, :]
    values = tl.load(held + place, mask=real[:, None] & (d < known)[None, :], other=0.0)
    of_key = head // OF_KEY
    for token in range(start, end):
        t = start.to(tl.int64) + (token - start)  # the interpreter counts in Python's integers
        query = tl.load(q + t * Q_OUTER + of_key * Q_STRIDE + d, mask=row, other=0.0).to(tl.float32)
        key = tl.load(k + t * K_OUTER + of_key * K_STRIDE + d, mask=row, other=0.0).to(tl.float32)
        value = tl.load(v + t * V_OUTER + head * V_STRIDE + column, mask=real, other=0.0).to(tl.float32)
        share = tl.load(beta + t * BETA_STRIDE + head).to(tl.float32)
        if DECAY_STRIDE:
            rates = tl.load(decay + t * DECAY_OUTER + head * DECAY_STRIDE + d, mask=row, other=0.0).to(tl.float32)
            values *= tl.exp(rates)[None, :]
        else:
            values *= tl.exp(tl.load(decay + t * DECAY_OUTER + head).to(tl.float32))
        key = _unit(key, EPS, NORMALIZE)
        query = _unit(query, EPS, NORMALIZE) * SCALE
        delta = (value - tl.sum(values * key[None, :], axis=1)) * share
        values += delta[:, None] * key[None, :]
        result = tl.sum(values * query[None, :], axis=1)
        to = out + t * OUT_OUTER + head * OUT_STRIDE + column
        tl.store(to, result.to(out.dtype.element_ty), mask=real)
        slot = tl.load(slots + token)
        snapshot = _place(state, slot // STATE_TOKENS, STATE_SIZE, FIRST)
        stored = (d < tl.where(slot >= 0, SIZE, 0))[None, :]
        tl.store(snapshot + place, values, mask=real[:, None] & stored)
    tl.store(held + place, values, mask=inside)
