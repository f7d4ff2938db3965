"""The recurrent ops against their formulas in float64, and their stored forms against the captured ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.nn.functional import conv1d, silu

from enginewright.passes.ops.recurrence import gated_delta_rule, selective_scan, short_convolution
from enginewright.runtime.shared.contracts import STATE_TOKENS

ew = torch.ops.ew

LENGTHS = [(1, 5, 3), (17, 1, 40)]
# Recurrences of at most 40 tokens in float32, of values of magnitude 1.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def starts_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def spans(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    starts = starts_of(lengths).tolist()
    return list(pairwise(starts))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("width", "biased", "activation"), [(3, False, ""), (4, True, "silu"), (7, True, "")])
def test_a_convolution_is_that_of_torch_on_each_request(
    lengths: tuple[int, ...], width: int, biased: bool, activation: str
) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(sum(lengths), 6), torch.randn(6, width)
    bias = torch.randn(6) if biased else None
    result = short_convolution(x, weight, bias, starts_of(lengths), 0, activation)
    for a, b in spans(lengths):
        whole = conv1d(x[a:b].T[None], weight[:, None], bias, padding=width - 1, groups=6)[0, :, : b - a].T
        torch.testing.assert_close(result[a:b], silu(whole) if activation else whole, **TOLERANCE)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("heads", "size", "groups", "rates"), [(4, 3, 2, (4,)), (6, 1, 1, (6, 5))])
def test_a_scan_is_its_recurrence(
    lengths: tuple[int, ...], heads: int, size: int, groups: int, rates: tuple[int, ...]
) -> None:
    torch.manual_seed(heads)
    tokens, state_size = sum(lengths), 5
    x, dt = torch.randn(tokens, heads, size), torch.rand(tokens, heads)
    a = -torch.rand(rates)
    b, c = torch.randn(tokens, groups, state_size), torch.randn(tokens, groups, state_size)
    result = selective_scan(x, dt, a, b, c, starts_of(lengths), 0)
    for first, end in spans(lengths):
        for n in range(heads):
            state = torch.zeros(size, state_size, dtype=torch.float64)
            for t in range(first, end):
                group = n // (heads // groups)
                state = state * torch.exp(dt[t, n].double() * a[n].double())
                state = state + dt[t, n].double() * torch.outer(x[t, n].double(), b[t, group].double())
                torch.testing.assert_close(result[t, n].double(), state @ c[t, group].double(), **TOLERANCE)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("normalize", "of_rows"), [(False, False), (True, False), (True, True)])
def test_a_delta_rule_is_its_recurrence(lengths: tuple[int, ...], normalize: bool, of_rows: bool) -> None:
    torch.manual_seed(len(lengths))
    tokens, heads, key_heads, size, value_size = sum(lengths), 4, 2, 6, 5
    q, k = torch.randn(tokens, key_heads, size) / 3, torch.randn(tokens, key_heads, size) / 3
    v, beta = torch.randn(tokens, heads, value_size), torch.rand(tokens, heads)
    decay = -torch.rand((tokens, heads, size) if of_rows else (tokens, heads))
    result = gated_delta_rule(q, k, v, decay, beta, starts_of(lengths), 0, 0.5, normalize)
    for first, end in spans(lengths):
        for n in range(heads):
            state = torch.zeros(size, value_size, dtype=torch.float64)
            for t in range(first, end):
                key, query = (value[t, n // 2].double() for value in (k, q))
                if normalize:
                    key, query = (value / (value.square().sum() + 1e-6).sqrt() for value in (key, query))
                factor = decay[t, n].double().exp()
                state = state * (factor[:, None] if of_rows else factor)
                state = state + torch.outer(key, beta[t, n].double() * (v[t, n].double() - state.T @ key))
                torch.testing.assert_close(result[t, n].double(), state.T @ query * 0.5, **TOLERANCE)


def test_packing_matters() -> None:
    """Must not match: one request of all tokens is something else than several."""
    x, weight = torch.randn(9, 4), torch.randn(4, 3)
    packed, merged = (short_convolution(x, weight, None, starts_of(n), 0, "") for n in ((1, 5, 3), (9,)))
    assert (packed - merged).abs().max() > 1e-2


def _convolution() -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor | None], list[Any], int]:
    x, weight = torch.randn(26, 6), torch.randn(6, 4)
    return short_convolution, ew.stored_convolution, [x, weight, None], ["silu"], 6 * 3


def _scan() -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor | None], list[Any], int]:
    x, dt, a = torch.randn(26, 4, 3), torch.rand(26, 4), -torch.rand(4)
    return selective_scan, ew.stored_scan, [x, dt, a, torch.randn(26, 2, 5), torch.randn(26, 2, 5)], [], 4 * 3 * 5


def _delta_rule() -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor | None], list[Any], int]:
    q, k, v = torch.randn(26, 2, 6), torch.randn(26, 2, 6), torch.randn(26, 4, 5)
    decay, beta = -torch.rand(26, 4), torch.rand(26, 4)
    return gated_delta_rule, ew.stored_delta_rule, [q, k, v, decay, beta], [0.4, True], 4 * 6 * 5


CASES = {"convolution": _convolution, "scan": _scan, "delta_rule": _delta_rule}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_stored_form_goes_on_from_chunk_to_chunk(case: str, chunk: int) -> None:
    """Two requests in blocks whose contents are NaN at first. torch's exp and silu round by a value's place."""
    torch.manual_seed(0)
    captured, stored, tensors, options, size = CASES[case]()
    lengths = (9, 17)
    whole = captured(*tensors, starts_of(lengths), 0, *options)
    first = 3
    state = torch.full((5, size + first + 2), float("nan"))
    table = torch.tensor([[4, -1], [1, -1]], dtype=torch.int32)
    begins = starts_of(lengths).tolist()
    for begin in range(0, max(lengths), chunk):
        active = [b for b in (0, 1) if begin < lengths[b]]
        ends = [min(begin + chunk, lengths[b]) for b in active]
        bounds = [(begins[b] + begin, begins[b] + end) for b, end in zip(active, ends, strict=True)]
        index = torch.cat([torch.arange(*pair) for pair in bounds])
        chunks = tuple(end - begin for end in ends)
        parts = [t[index] if t is not None and t.shape[0] == 26 else t for t in tensors]
        lengths_so_far, none = torch.tensor(ends, dtype=torch.int32), torch.full((len(index),), -1)
        result, state = stored(*parts, state, table[active], starts_of(chunks), lengths_so_far, none, first, *options)
        torch.testing.assert_close(result, whole[index], rtol=1e-6, atol=1e-6)
    assert state[[0, 2, 3]].isnan().all() and state[:, :first].isnan().all(), "nothing else is written"


@pytest.mark.parametrize("case", CASES)
def test_a_state_is_stored_after_any_token(case: str) -> None:
    """The state after tokens 5 and 9 of a request of 26 is the state that a request of so many tokens ends with."""
    torch.manual_seed(0)
    _, stored, tensors, options, size = CASES[case]()
    first, table = 2, torch.tensor([[1]], dtype=torch.int32)

    def states(length: int, snapshots: dict[int, int]) -> torch.Tensor:
        slots = torch.full((length,), -1)
        for end, block in snapshots.items():
            slots[end - 1] = block * STATE_TOKENS + end - 1
        parts = [t[:length] if t is not None and t.shape[0] == 26 else t for t in tensors]
        cache, lengths = torch.full((4, size + first + 1), float("nan")), torch.tensor([length], dtype=torch.int32)
        return stored(*parts, cache, table, starts_of((length,)), lengths, slots, first, *options)[1]

    cache = states(26, {5: 0, 9: 3})
    torch.testing.assert_close(cache[0], states(5, {})[1], rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(cache[3], states(9, {})[1], rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(cache[1], states(26, {})[1], rtol=0, atol=0, equal_nan=True)
    assert cache[2].isnan().all(), "nothing else is written"


@pytest.mark.parametrize("case", CASES)
def test_schemas_and_fakes_agree(case: str) -> None:
    captured, _, tensors, options, _ = CASES[case]()
    opcheck(getattr(ew, captured.__name__).default, (*tensors, starts_of((9, 17)), 0, *options))


def test_heads_must_be_a_multiple_of_groups() -> None:
    x, b = torch.randn(3, 4, 2), torch.randn(3, 3, 5)
    with pytest.raises(RuntimeError, match="4 heads aren't a multiple of 3 groups"):
        selective_scan(x, torch.rand(3, 4), torch.rand(4), b, b, starts_of((3,)), 0)
