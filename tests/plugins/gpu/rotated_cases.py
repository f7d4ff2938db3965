"""Caches of rotated integers on GPUs beside what they mean; run where Triton interprets its kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from enginewright.passes.ops.attention import paged_attention
from enginewright.passes.ops.quantized_cache import FEW_BITS, NORMAL, quantize_to_few_bits, round_to_few_bits
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.specs import attention_scratch, splits_of
from enginewright.plugins.gpu.step_calls import (
    AttendedBatch,
    AttentionParts,
    AttentionRule,
    LayerCaches,
    attention_calls,
    kv_write_call,
    work_call,
    work_size,
)
from enginewright.plugins.gpu.tiles import GPUS, Tile
from enginewright.runtime.shared.kv_formats import END
from tests.plugins.gpu.cases import DTYPES

BLOCK = 32


def stored(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [N, Nkv, D] as kernels store it: codes, two of 4 bits to a byte, and scales float16 [N, Nkv]."""
    integers, scales = quantize_to_few_bits(x, bits)
    if bits == 8:
        return integers, scales
    codes = torch.bucketize(integers, torch.tensor(NORMAL, dtype=torch.int8))
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), scales


def write(dtype: str, cache: str, tokens: int, heads: int, size: int, value_size: int) -> list[Tensor]:
    """Returns the caches and scales that the reference writes, then those that the kernel writes."""
    torch.manual_seed(tokens)
    k, v = (torch.randn(tokens, heads, of).to(DTYPES[dtype]) for of in (size, value_size))
    if tokens > 3:  # zeros, an infinity, a scale that float16 doesn't hold
        k[0, 0], v[1, 0, 1], k[2] = 0, float("inf"), k[2] * (1e4 if dtype == "f16" else 1e30)
    slots = torch.randperm(2 * BLOCK)[:tokens].int()
    written, meant = [], []
    for x, bits in ((k, FEW_BITS[cache][0]), (v, FEW_BITS[cache][1])):
        codes, scales = stored(x, bits)
        for of in (codes, scales):
            empty = torch.zeros(2, BLOCK, *of.shape[1:], dtype=of.dtype)
            written.append(empty)
            meant.append(empty.flatten(0, 1).index_copy(0, slots.long(), of).view(empty.shape))
    keys, key_scales, values, value_scales = written
    JitLauncher().bind(kv_write_call(k, v, slots, LayerCaches(keys, values, key_scales, value_scales)))()
    return [x.float() for x in (*meant, *written)]


@dataclass(frozen=True)
class Case:
    """Requests with ``past`` tokens in the cache and ``new`` ones in the step."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    cache: str = "k4v4"
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    value_size: int = 16
    dtype: str = "f32"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    exact: bool = False
    rows: int = 0
    """Rows of a tile; 0 for those that a GPU has."""
    seed: int = 0


def attend(case: Case) -> tuple[Tensor, Tensor]:
    """Returns the kernels' result and the reference's. What no query may read is NaN, or in blocks that are
    gone.
    """
    torch.set_num_threads(1)
    lengths = [n + p for n, p in zip(case.new, case.past, strict=True)]
    random = torch.Generator().manual_seed(case.seed + sum(lengths))
    most = max(-(-n // BLOCK) for n in lengths)
    k, v = (torch.randn(sum(lengths), case.kv_heads, of, generator=random) for of in (case.size, case.value_size))
    q = torch.randn(sum(case.new), case.heads, case.size, generator=random).to(DTYPES[case.dtype])
    sinks = torch.randn(case.heads, generator=random) if case.sinks else None
    q_start = torch.tensor([0, *itertools.accumulate(case.new)], dtype=torch.int32)
    kv_len = torch.tensor(lengths, dtype=torch.int32)
    starts = [0, *itertools.accumulate(lengths)]
    shown, meant, tables = [], [], []
    ends = case.cache == "k4v4"
    for second, cache in enumerate((case.cache, "k8v8") if ends else (case.cache,)):
        pool = torch.randperm(len(lengths) * most + 2, generator=random).int()
        table = torch.full((len(lengths), most), -1, dtype=torch.int32)
        places = torch.empty(sum(lengths), dtype=torch.int64)
        reads = torch.zeros(sum(lengths), dtype=torch.bool)
        for b, n in enumerate(lengths):
            position = torch.arange(n)
            blocks = pool[b * most : (b + 1) * most]
            places[starts[b] : starts[b + 1]] = blocks[position // BLOCK].long() * BLOCK + position % BLOCK
            queries = torch.arange(case.past[b], n)[:, None]
            near = (position < END) | (position // END >= queries // END - 1)
            seen = (near if second else ~near) if ends else torch.ones_like(near)
            if case.window:
                seen &= position > queries - case.window
            of_request = (seen & (position <= queries)).any(0)
            reads[starts[b] : starts[b + 1]] = of_request
            for at in range(-(-n // BLOCK)):
                if of_request[at * BLOCK : (at + 1) * BLOCK].any():
                    table[b, at] = blocks[at]
        layer, rounded = [], []
        for x, bits in ((k, FEW_BITS[cache][0]), (v, FEW_BITS[cache][1])):
            codes, scales = stored(x, bits)
            scales[~reads] = float("nan")
            paged = []
            for of in (codes, scales, round_to_few_bits(x, bits)):
                empty = torch.zeros(len(pool) * BLOCK, *of.shape[1:], dtype=of.dtype)
                paged.append(empty.index_copy(0, places, of).view(len(pool), BLOCK, *of.shape[1:]))
            layer.append(paged[:2])
            rounded.append(paged[2])
        (keys, key_scales), (values, value_scales) = layer
        shown.append(LayerCaches(keys, values, key_scales, value_scales))
        meant.append(rounded)
        tables.append(table)
    rule = AttentionRule(case.size**-0.5, case.window, case.softcap, sinks, exact=case.exact)
    more = (None, None, *meant[1], tables[1]) if ends else ()
    how = (rule.scale, rule.window, rule.softcap, sinks)
    want = paged_attention(q.float(), *meant[0], tables[0], q_start, kv_len, *how, *more)
    layer = replace(shown[0], ends=shown[1] if ends else None)
    return _run(case, q, layer, tables, q_start, kv_len, rule), want


def _run(
    case: Case,
    q: Tensor,
    layer: LayerCaches,
    tables: Sequence[Tensor],
    q_start: Tensor,
    kv_len: Tensor,
    rule: AttentionRule,
) -> Tensor:
    decodes = len(q) == len(kv_len)
    mixed = not decodes and 1 in case.new
    out = torch.full((len(q), case.heads, case.value_size), float("nan"), dtype=q.dtype)
    most = tables[0].shape[1]
    splits = splits_of(most, BLOCK)
    floats = attention_scratch(len(kv_len), case.heads, case.value_size, most, BLOCK, mixed=True)
    launcher, work = JitLauncher(), None
    if mixed or (splits > 1 and decodes):
        work = torch.zeros(work_size(len(kv_len), splits), dtype=torch.int32)
        launcher.bind(work_call(kv_len, work, case.window, len(kv_len), q_start=q_start if mixed else None))()
    calls = attention_calls(
        q,
        layer,
        AttendedBatch(tables[0], q_start, kv_len, decodes, mixed, tables[-1]),
        rule,
        AttentionParts(torch.full((floats,), float("nan")), work=work, workers=3),
        out,
        GPUS[80],
        (lambda shape, decode: Tile(1 if decode else case.rows // shape.group, case.rows, 32, 4, 1))
        if case.rows
        else launcher.tile,
    )
    for call in calls:
        launcher.bind(call)()
    return out
