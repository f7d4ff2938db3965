"""The fused ops against the ops that they stand for, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.library import opcheck

import enginewright.passes.ops  # noqa: F401  (registers torch.ops.ew)

ew = torch.ops.ew
SIZES = [(3, 8), (5, 96)]  # T, H
Arguments = dict[str, Any]


def _norm_arguments(tokens: int, hidden: int) -> Arguments:
    torch.manual_seed(hidden)
    x, residual = torch.randn(2, tokens, hidden)
    return {"x": x, "residual": residual, "weight": torch.randn(hidden), "bias": torch.randn(hidden), "eps": 1e-5}


def _rms(a: Arguments, group: int) -> tuple[torch.Tensor, ...]:
    return ew.quantize_activation(ew.rms_norm(a["x"], a["weight"], a["eps"]), group)


def _layer(a: Arguments, group: int) -> tuple[torch.Tensor, ...]:
    return ew.quantize_activation(ew.layer_norm(a["x"], a["weight"], a["bias"], a["eps"]), group)


def _add_rms(a: Arguments, group: int) -> tuple[torch.Tensor, ...]:
    total = a["x"] + a["residual"]
    return (*ew.quantize_activation(ew.rms_norm(total, a["weight"], a["eps"]), group), total)


def _add_layer(a: Arguments, group: int) -> tuple[torch.Tensor, ...]:
    total = a["x"] + a["residual"]
    return (*ew.quantize_activation(ew.layer_norm(total, a["weight"], a["bias"], a["eps"]), group), total)


NORMS: dict[str, tuple[tuple[str, ...], Callable[[Arguments, int], tuple[torch.Tensor, ...]]]] = {
    "rms_norm_quantize": (("x", "weight", "eps"), _rms),
    "layer_norm_quantize": (("x", "weight", "bias", "eps"), _layer),
    "add_rms_norm_quantize": (("x", "residual", "weight", "eps"), _add_rms),
    "add_layer_norm_quantize": (("x", "residual", "weight", "bias", "eps"), _add_layer),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
@pytest.mark.parametrize("group", [0, 4])
def test_a_norm_that_is_quantized_is_the_norm_then_quantized(name: str, tokens: int, hidden: int, group: int) -> None:
    names, apart = NORMS[name]
    arguments = _norm_arguments(tokens, hidden)
    fused = getattr(ew, name)(*(arguments[one] for one in names), group)
    for result, expected in zip(fused, apart(arguments, group), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert not torch.equal(fused[1], apart(arguments | {"eps": 1.0}, group)[1])  # scales depend on eps
    opcheck(getattr(ew, name).default, (*(arguments[one] for one in names), group))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), [(3, 2, 1, 8), (5, 4, 2, 16)])
def test_a_rotation_that_is_cached_is_the_rotation_then_the_write(
    tokens: int, heads: int, kv_heads: int, size: int, interleaved: bool
) -> None:
    torch.manual_seed(size)
    q, k, v = (torch.randn(tokens, n, size) for n in (heads, kv_heads, kv_heads))
    caches = torch.randn(2, 3, 4, kv_heads, size)  # keys and values: [P, K, Nkv, D]
    table = ew.rope_table(torch.arange(tokens), torch.rand(size // 2), 1.0)
    slots = torch.randperm(12)[:tokens].int()
    fused = ew.rope_kv_write(*caches, q, k, v, table, slots, interleaved)
    apart = ew.rope(q, table, interleaved), *ew.kv_write(*caches, ew.rope(k, table, interleaved), v, slots)
    for result, expected in zip(fused, apart, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert not torch.equal(fused[0], ew.rope(q, table, not interleaved))
    opcheck(ew.rope_kv_write.default, (*caches, q, k, v, table, slots, interleaved))


@pytest.mark.parametrize("dtype", ["k4v4", "k6v4"])
def test_a_rotation_that_is_cached_twice_is_the_rotation_then_both_writes(dtype: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, n, 16) for n in (4, 2, 2))
    caches, ends = torch.randn(2, 3, 4, 2, 16), torch.randn(2, 2, 4, 2, 16)
    table = ew.rope_table(torch.arange(5), torch.rand(8), 1.0)
    slots, ends_slots = torch.randperm(12)[:5].int(), torch.randperm(8)[:5].int()
    arguments = (*caches, *ends, q, k, v, table, slots, ends_slots, False, dtype, "k8v8")
    rotated = ew.rope(k, table, False)
    apart = (
        ew.rope(q, table, False),
        *ew.kv_write(*caches, rotated, v, slots, dtype),
        *ew.kv_write(*ends, rotated, v, ends_slots, "k8v8"),
    )
    for result, expected in zip(ew.rope_kv_write_with_ends(*arguments), apart, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    opcheck(ew.rope_kv_write_with_ends.default, arguments)


def test_a_table_wider_than_a_head_is_refused() -> None:
    q = torch.randn(2, 1, 4)
    caches = torch.zeros(2, 1, 4, 1, 4)
    table, slots = torch.randn(2, 6), torch.arange(2, dtype=torch.int32)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="a table"):
        ew.rope_kv_write(*caches, q, q, q, table, slots, False)
