"""ew.attention against SDPA request by request; ew.paged_attention against the captured form."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from enginewright.passes.ops.attention import attention, paged_attention
from enginewright.passes.ops.cache import kv_write

# (lengths of the packed requests, Nq, Nkv, D, Dv)
SIZES = [((1, 5, 3), 4, 2, 8, 8), ((17, 1, 40), 6, 2, 16, 12)]
VARIANTS = [(0, 0.0, False), (4, 0.0, False), (0, 5.0, False), (3, 2.0, True)]  # window, softcap, sinks
# Sums of at most 40 products of f32 in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def _inputs(lengths, heads, kv_heads, d, dv):
    torch.manual_seed(sum(lengths))
    t = sum(lengths)
    q, k, v = torch.randn(t, heads, d), torch.randn(t, kv_heads, d), torch.randn(t, kv_heads, dv)
    q_start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return q, k, v, q_start, torch.randn(heads)


def _by_hand(q, k, v, lengths, scale, window, softcap, sinks):
    """One query and head at a time in float64, straight from the definition."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    group, start = q.shape[1] // k.shape[1], 0
    for length in lengths:
        for p in range(length):
            first = start + (max(0, p - window + 1) if window else 0)
            for h in range(q.shape[1]):
                keys = k[first : start + p + 1, h // group].double()
                s = scale * (keys @ q[start + p, h].double())
                s = softcap * torch.tanh(s / softcap) if softcap else s
                e = s.exp()
                total = e.sum() + (sinks[h].double().exp() if sinks is not None else 0)
                out[start + p, h] = (e / total) @ v[first : start + p + 1, h // group].double()
        start += length
    return out.float()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_is_its_definition(size, variant):
    q, k, v, q_start, sinks = _inputs(*size)
    window, softcap, with_sinks = variant
    s = sinks if with_sinks else None
    got = attention(q, k, v, q_start, 0, 0.3, window, softcap, s)
    torch.testing.assert_close(got, _by_hand(q, k, v, size[0], 0.3, window, softcap, s), **TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
def test_attention_equals_sdpa_on_each_request_alone(size):
    q, k, v, q_start, _ = _inputs(*size)
    got = attention(q, k, v, q_start, 0, size[3] ** -0.5, 0, 0.0, None)
    for a, b in zip(q_start[:-1].tolist(), q_start[1:].tolist(), strict=True):
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        torch.testing.assert_close(got[a:b], want, **TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
def test_slopes_are_a_bias_of_distances(size):
    """SDPA with slope * (key position - query position) as its bias."""
    q, k, v, q_start, _ = _inputs(*size)
    slopes = 2.0 ** -torch.linspace(1, 8, size[1])
    got = attention(q, k, v, q_start, 0, 0.3, 0, 0.0, None, slopes)
    for a, b in zip(q_start[:-1].tolist(), q_start[1:].tolist(), strict=True):
        positions = torch.arange(b - a)
        distance = positions[None, :] - positions[:, None]
        bias = (slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1) for x in (q, k, v)), attn_mask=bias, scale=0.3, enable_gqa=True
        ).transpose(0, 1)
        torch.testing.assert_close(got[a:b], want, **TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("window", "with_slopes"), [(0, False), (4, False), (0, True), (3, True)])
def test_attention_of_encoders_sees_both_sides(size, window, with_slopes):
    """SDPA on each request alone, with its mask: |key position - query position| < window."""
    q, k, v, q_start, _ = _inputs(*size)
    slopes = 2.0 ** -torch.linspace(1, 8, size[1]) if with_slopes else None
    got = attention(q, k, v, q_start, 0, 0.3, window, 0.0, None, slopes, causal=False)
    for a, b in zip(q_start[:-1].tolist(), q_start[1:].tolist(), strict=True):
        distance = (torch.arange(b - a)[None, :] - torch.arange(b - a)[:, None]).abs()
        bias = -slopes[:, None, None] * distance if with_slopes else torch.zeros(size[1], b - a, b - a)
        if window:
            bias = bias.masked_fill(distance >= window, float("-inf"))
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1) for x in (q, k, v)), attn_mask=bias, scale=0.3, enable_gqa=True
        ).transpose(0, 1)
        torch.testing.assert_close(got[a:b], want, **TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("causal", [True, False])
def test_biases_are_of_distances(size, causal):
    q, k, v, q_start, _ = _inputs(*size)
    farthest = 5
    biases = torch.randn(size[1], 2 * farthest + 1)
    got = attention(q, k, v, q_start, 0, 0.3, 0, 0.0, None, causal=causal, biases=biases)
    for a, b in zip(q_start[:-1].tolist(), q_start[1:].tolist(), strict=True):
        bias = torch.zeros(size[1], b - a, b - a)
        for query in range(b - a):
            for key in range(b - a):
                bias[:, query, key] = biases[:, max(-farthest, min(farthest, key - query)) + farthest]
                if causal and key > query:
                    bias[:, query, key] = float("-inf")
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1) for x in (q, k, v)), attn_mask=bias, scale=0.3, enable_gqa=True
        ).transpose(0, 1)
        torch.testing.assert_close(got[a:b], want, **TOLERANCE)


def test_packing_matters():
    """Must not match: one request of all tokens is something else than several."""
    q, k, v, q_start, _ = _inputs(*SIZES[0])
    whole = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    packed, merged = (attention(q, k, v, s, 0, 0.3, 0, 0.0, None) for s in (q_start, whole))
    assert (packed - merged).abs().max() > 1e-2


def _paged(q, k, v, lengths, chunks, window, softcap, sinks, slopes, slots_per_block=4, choice=None):
    """Runs each request in ``chunks`` of tokens through a shuffled paged cache whose unused slots are NaN."""
    blocks = [-(-n // slots_per_block) for n in lengths]
    pool = torch.randperm(sum(blocks) + 2)
    table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    for b, n in enumerate(blocks):
        table[b, :n] = pool[sum(blocks[:b]) : sum(blocks[:b]) + n].int()
    k_cache = torch.full((len(pool), slots_per_block, *k.shape[1:]), float("nan"))
    v_cache = torch.full((len(pool), slots_per_block, *v.shape[1:]), float("nan"))
    starts = [sum(lengths[:b]) for b in range(len(lengths))]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2])
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        active = [b for b, n in enumerate(lengths) if done[b] < n]
        upto = {b: min(done[b] + chunks, lengths[b]) for b in active}
        index = torch.cat([torch.arange(starts[b] + done[b], starts[b] + upto[b]) for b in active])
        place = torch.cat([torch.arange(done[b], upto[b]) for b in active])
        owner = torch.cat([torch.full((upto[b] - done[b],), b) for b in active])
        slots = table[owner, place // slots_per_block] * slots_per_block + place % slots_per_block
        q_start = torch.tensor([0, *torch.tensor([upto[b] - done[b] for b in active]).cumsum(0)], dtype=torch.int32)
        kv_len = torch.tensor([upto[b] for b in active], dtype=torch.int32)
        k_cache, v_cache = kv_write(k_cache, v_cache, k[index], v[index], slots)
        out[index] = paged_attention(
            q[index], k_cache, v_cache, table[active], q_start, kv_len, 0.3, window, softcap, sinks, slopes, choice
        )
        done = [upto.get(b, done[b]) for b in range(len(lengths))]
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunks", [1, 3, 1000])
def test_paged_form_equals_captured_form(size, variant, chunks):
    q, k, v, q_start, sinks = _inputs(*size)
    window, softcap, with_sinks = variant
    s = sinks if with_sinks else None
    for slopes in (None, sinks.abs()):
        want = attention(q, k, v, q_start, 0, 0.3, window, softcap, s, slopes)
        got = _paged(q, k, v, size[0], chunks, window, softcap, s, slopes)
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", [(0, 0.0, False), (3, 2.0, True)])
def test_fakes_agree_and_stay_symbolic(size, variant):
    q, k, v, q_start, sinks = _inputs(*size)
    window, softcap, with_sinks = variant
    s = sinks if with_sinks else None
    opcheck(torch.ops.ew.attention.default, (q, k, v, q_start, 0, 0.3, window, softcap, s))
    b = len(size[0])
    k_cache, v_cache = torch.randn(4 * b, 16, *k.shape[1:]), torch.randn(4 * b, 16, *v.shape[1:])
    table = torch.arange(4 * b, dtype=torch.int32).view(b, 4)
    kv_len = torch.tensor(size[0], dtype=torch.int32)
    args = (q, k_cache, v_cache, table, q_start, kv_len, 0.3, window, softcap, s)
    opcheck(torch.ops.ew.paged_attention.default, args)


def test_the_ends_of_a_request_are_read_in_a_second_cache():
    """Values tell which cache a query read: they are 1 in the first one, and 0 among the ends."""
    tokens, block = 512, 32
    q = torch.zeros(tokens, 1, 4)
    k, v = torch.zeros(tokens // block, block, 1, 4), torch.ones(tokens // block, block, 1, 4)
    table = torch.arange(tokens // block, dtype=torch.int32)[None]
    step = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    args = (q, k, v, table, *step, 1.0, 0, 0.0, None)
    ends = {"ends_k_cache": k, "ends_v_cache": 0 * v, "ends_table": table}
    share = paged_attention(*args, **ends)[:, 0, 0]
    assert not share[:384].any()  # the first run, the run before and the query's own
    seen = torch.arange(384, 512)
    torch.testing.assert_close(share[384:], 128 / (seen + 1.0))
    opcheck(torch.ops.ew.paged_attention.default, args, ends)


def test_heads_that_do_not_divide_are_refused():
    q_start = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="3 query heads"):
        attention(torch.randn(2, 3, 4), torch.randn(2, 2, 4), torch.randn(2, 2, 4), q_start, 0, 1.0, 0, 0.0, None)


def _chosen_by_hand(q, k, position, size, choice):
    """The keys that the query heads q [g, D] of one key/value head see of k [S, D], in blocks of ``size``."""
    first, last, best, below = choice
    whole = position // size
    ranks = {}
    for block in range(first, whole - last):
        keys = k[block * size : (block + 1) * size]
        low, high, mean = keys.amin(0), keys.amax(0), keys.mean(0)
        center = (0.5 * mean + 0.25 * (low + high)).bfloat16().float()
        spread = (0.25 * (high - low)).bfloat16().float()
        ranks[block] = [float((row * center + row.abs() * spread).sum()) for row in q]
    if position < below:
        return list(range(position + 1))
    tops = [max(of_head) for of_head in zip(*ranks.values(), strict=True)]
    ranks = {
        block: max(b - top for b, top in zip(block_range, tops, strict=True)) for block, block_range in ranks.items()
    }
    chosen = sorted(ranks, key=lambda block: (-ranks[block], block))[:best]
    return [p for p in range(position + 1) if p // size not in ranks or p // size in chosen]


@pytest.mark.parametrize("choice", [(1, 1, 2, 0), (0, 0, 1, 0), (2, 3, 1, 20), (0, 2, 100, 0), (0, 0, 3, 1000)])
@pytest.mark.parametrize("chunks", [1, 7, 1000])
def test_the_best_blocks_are_chosen(choice, chunks):
    lengths, heads, kv_heads, size = (17, 1, 61), 6, 2, 4
    q, k, v, _, sinks = _inputs(lengths, heads, kv_heads, 16, 12)
    got = _paged(q, k, v, lengths, chunks, 0, 0.0, sinks, None, size, choice)
    for start, length in zip((0, 17, 18), lengths, strict=True):
        for p in range(length):
            for head in range(heads):
                shared = head // (heads // kv_heads)
                keys = k[start : start + length, shared]
                group = q[start + p].unflatten(0, (kv_heads, -1))[shared]
                seen = _chosen_by_hand(group, keys, p, size, choice)
                scores = 0.3 * (keys[seen] @ q[start + p, head])
                weights = torch.cat((scores, sinks[head : head + 1])).softmax(0)[:-1]
                torch.testing.assert_close(
                    got[start + p, head], weights @ v[start : start + length, shared][seen], **TOLERANCE
                )
