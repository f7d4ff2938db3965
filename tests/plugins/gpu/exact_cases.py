"""The exact kernels' bits for the same rows in several steps; run where Triton interprets its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from enginewright.plugins.gpu.jit_launcher import JitLauncher, products_in_order
from enginewright.plugins.gpu.specs import attention_scratch
from enginewright.plugins.gpu.step_calls import (
    FLOATS_OF,
    AttendedBatch,
    AttentionParts,
    AttentionRule,
    LayerCaches,
    Stored,
    attention_calls,
    combine_experts_calls,
    laid_by_group,
    product_call,
    reduce_call,
    split_product_calls,
    split_scratch,
    work_call,
    work_size,
)
from enginewright.plugins.gpu.tiles import GPUS, ROTATED_CODES, exact_tile

from .step_cases import DTYPES, run, stored

GPU, BLOCK = GPUS[80], 32


@products_in_order()
def products(form: str, dtype: str) -> list[tuple[bool, bool]]:
    """Says whether rows have the same bits in products of 1, 7, 64 and 70 rows, and for some of a weight's columns; and
    whether any bit differs from those of the tile that depends on the number of rows (a product that can fail).
    """
    torch.manual_seed(3)
    checks = []
    for n, k, group in ((33, 2304, 128), (130, 1184, 0)):
        weight, _ = stored(form, (n,), k, group, DTYPES[dtype])
        x, bias = torch.randn(70, k).to(DTYPES[dtype]), torch.randn(n)
        for one in (weight, laid_by_group(weight)):
            whole, kernels = _product(x, one, bias, exact=True)
            assert kernels == ["product"]
            same = bool(whole.isfinite().all())
            for first, count in ((69, 1), (5, 7), (3, 64)):
                some, kernels = _product(x[first : first + count], one, bias, exact=True)
                assert kernels == ["product", "sum_parts"]
                same &= torch.equal(some, whole[first : first + count])
            same &= torch.equal(_product(x, one.rows(3, n - 8), bias[3 : n - 5], exact=True)[0], whole[:, 3 : n - 5])
            rest = [torch.equal(_product(x[:m], one, bias, exact=False)[0], whole[:m]) for m in (1, 40, 70)]
            checks.append((same, not all(rest)))
    return checks


def _product(x: Tensor, weight: Stored, bias: Tensor, *, exact: bool) -> tuple[Tensor, list[str]]:
    """A product, and the names of its kernels."""
    dtype = FLOATS_OF[x.dtype]
    tile = exact_tile(x.shape[1], weight.format, weight.group, dtype) if exact else None
    floats = split_scratch(x.shape[1], len(bias), weight.format, weight.group, dtype, tile)
    scratch, out = torch.full((floats,), float("nan")), torch.full((len(x), len(bias)), float("nan"), dtype=x.dtype)
    calls = split_product_calls(x, weight, bias, out, GPU, scratch, activation="silu", tile=tile)
    for call in calls:
        run(call)
    return out, [call.kernel for call in calls]


@products_in_order()
def grouped_products(form: str, dtype: str) -> bool:
    """Says whether an expert's rows have the same bits beside any rows of other experts."""
    torch.manual_seed(4)
    n, k = 40, 128
    weight, _ = stored(form, (3, n), k, 32, DTYPES[dtype])
    weight = laid_by_group(weight)
    tile = exact_tile(k, form, weight.group, dtype)  # type: ignore[arg-type]
    mine, others = torch.randn(9, k).to(DTYPES[dtype]), torch.randn(90, k).to(DTYPES[dtype])

    def rows(before: int, after: int, count: int) -> Tensor:
        x = torch.cat([others[:before], mine[:count], others[:after]])
        starts = torch.tensor([0, before, before + count, len(x)], dtype=torch.int32)
        out = torch.empty(len(x), n, dtype=x.dtype)
        run(product_call(x, weight, None, out, GPU, starts=starts, tile=tile))
        return out[before : before + count]

    whole = rows(0, 0, 9)
    return all(torch.equal(rows(*of, count), whole[:count]) for *of, count in ((0, 3, 1), (7, 80, 9), (70, 0, 3)))


def reductions(dtype: str) -> list[float]:
    """Differences of sums, means and logsumexps from torch's, as shares of the largest."""
    torch.manual_seed(5)
    checks = []
    for size in (3, 130, 5000):
        x = torch.randn(2, 3, size + 1).to(DTYPES[dtype])[..., 1:]
        for kind, meant in (
            ("sum", x.float().sum(-1)),
            ("mean", x.float().mean(-1)),
            ("logsumexp", x.float().logsumexp(-1)),
        ):
            out = torch.full((2, 3, 1), float("nan"))
            run(reduce_call(x, out, kind))
            checks.append(float((out[..., 0] - meant).abs().max() / meant.abs().max()))
    infinite = torch.tensor([[float("-inf")] * 3, [float("inf"), 0, 1], [float("nan"), 0, 1]])
    out = torch.zeros(3, 1)
    run(reduce_call(infinite, out, "logsumexp"))
    assert torch.equal(out[:2, 0], infinite.logsumexp(-1)[:2]) and out[2, 0].isnan()
    return checks


def combined_experts(dtype: str) -> list[float]:
    """Differences of the sums of experts' results from their definition."""
    torch.manual_seed(6)
    checks = []
    for tokens, k, size in ((1, 1, 8), (5, 3, 1100)):
        y, weights = torch.randn(tokens * k, size).to(DTYPES[dtype]), torch.randn(tokens, k)
        order = torch.randperm(tokens * k).int()
        out, places = torch.empty(tokens, size, dtype=y.dtype), torch.empty(tokens * k, dtype=torch.int32)
        for call in combine_experts_calls(y, order, places, weights, out):
            run(call)
        by_place = torch.empty_like(y).index_copy_(0, order.long(), y).float().view(tokens, k, size)
        meant = (by_place * weights.unsqueeze(-1)).sum(1)
        checks.append(float((out.float() - meant).abs().max() / meant.abs().max()))
    return checks


@products_in_order()
def attention(length: int, dtype: str, cache: str = "", **rule: object) -> bool:
    """Says whether tokens of a request of ``length`` tokens have the same attention in one step with all of them, in a
    chunk, in a mixed step, and decoded alone and beside others.
    """
    torch.manual_seed(7)
    in_keys, others = bool(rule.pop("values_in_keys", False)), 6
    heads, kv_heads, size, value_size = (20, 1, 40, 24) if in_keys else (6, 2, 24, 24)
    blocks = -(-length // BLOCK)
    of = {"": DTYPES[dtype], "fp8": torch.float8_e4m3fn, "k4v4": torch.uint8}.get(cache, torch.int8)
    pool = blocks + 2 * others
    codes = torch.randn(2, pool, BLOCK, kv_heads, size // (2 if cache == "k4v4" else 1)) * (40 if cache else 1)
    scales = torch.rand(2, pool, BLOCK, kv_heads) / 40 + 0.01 if cache else (None, None)
    keys, values = codes.abs().to(of) if cache == "k4v4" else codes.to(of)
    if in_keys:
        values, scales = keys[..., :value_size], (scales[0], scales[0])
    if cache in ROTATED_CODES:
        scales = scales.half()  # type: ignore[union-attr]
    caches, ends_order = LayerCaches(keys, values, *scales, values_in_keys=in_keys), torch.randperm(pool).int()
    if cache == "k4v4":
        of_ends = (torch.randn(2, pool, BLOCK, kv_heads, size) * 40).to(torch.int8)
        caches = replace(caches, ends=LayerCaches(*of_ends, *scales))
    q = torch.randn(length + 40, heads, size).to(DTYPES[dtype])
    order = torch.randperm(pool).int()
    tables = {"mine": order[:blocks]} | {str(i): order[blocks + 2 * i :][:2] for i in range(others)}
    vectors = {name: torch.randn(heads) for name in ("sinks", "slopes") if rule.pop(name, False)}

    def attend(requests: Mapping[str, tuple[int, int]], queries: Sequence[Tensor]) -> list[Tensor]:
        """``requests``: for each the keys before its tokens, and the number of its tokens."""
        counts = torch.tensor([0, *(count for _, count in requests.values())])
        q_start, kv_len = counts.cumsum(0).int(), torch.tensor([sum(of) for of in requests.values()]).int()
        table = torch.zeros((len(requests), blocks if "mine" in requests else 2), dtype=torch.int32)
        for row, name in enumerate(requests):
            table[row, : len(tables[name])] = tables[name]
        packed = torch.cat(list(queries))
        out = torch.full((len(packed), heads, value_size), float("nan"), dtype=packed.dtype)
        decodes, single = bool((counts[1:] == 1).all()), bool((counts[1:] == 1).any())
        mixed, splits = single and not decodes, -(-table.shape[1] * BLOCK // 512)
        work = torch.full((work_size(len(requests), splits),), -1, dtype=torch.int32)
        window = int(rule.get("window", 0))  # type: ignore[call-overload]
        if mixed or (decodes and splits > 1):
            run(work_call(kv_len, work, window, 8, q_start=q_start if mixed else None))
        floats = attention_scratch(len(requests), heads, value_size, table.shape[1], BLOCK, mixed=True)
        calls = attention_calls(
            packed,
            caches,
            AttendedBatch(table, q_start, kv_len, decodes, mixed, ends_order[table.long()]),
            AttentionRule(size**-0.5, **rule, **vectors, exact=True),  # type: ignore[arg-type]
            AttentionParts(torch.full((floats,), float("nan")), work=work, workers=3),
            out,
            GPU,
            JitLauncher().tile,
        )
        for call in calls:
            run(call)
        assert out.isfinite().all()
        return list(out.split(counts[1:].tolist()))

    (whole,) = attend({"mine": (0, length)}, [q[:length]])
    last, chunk = q[length - 1 : length], q[length - 30 : length]
    beside = {str(i): (5 * i, 1) for i in range(others)}
    rest = [q[length + i : length + i + 1] for i in range(others)]
    pairs = [
        (attend({"mine": (length - 30, 30)}, [chunk])[0], whole[-30:]),
        (attend({"0": (3, 20), "mine": (length - 30, 30)}, [q[-20:], chunk])[1], whole[-30:]),
        (attend({"mine": (length - 1, 1)}, [last])[0], whole[-1:]),
        (attend({"mine": (length - 1, 1), **beside}, [last, *rest])[0], whole[-1:]),
        (attend({"0": (3, 20), "mine": (length - 1, 1)}, [q[-20:], last])[1], whole[-1:]),
    ]
    return all(torch.equal(some, meant) for some, meant in pairs)
