"""The kernels of recurrent layers beside the references of the ew ops; run where Triton interprets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from enginewright.passes.ops import REFERENCES
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.recurrence_calls import StoredStates, convolution_call, delta_rule_call, scan_call
from enginewright.runtime.shared.contracts import STATE_TOKENS

BLOCKS, FIRST, SPARE = 9, 16, 16
"""Blocks of the cache; values of a block before a state and behind it, which are another one's."""

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """An op at some sizes.

    Attributes:
        op: the name of its reference.
        width: the number of values of a token's operands, all together.
        size: the number of values of a state.
        operands: cuts a token's values [T, width] into the operands that both functions take first.
        options: the reference's arguments after the cache's.
        call: makes the kernel's call from the operands, the states and the output.
        result: the shape of a token's result.
        order: brings a state of the kernel [size] into the reference's order.
    """

    op: str
    width: int
    size: int
    operands: Callable[[Tensor], list[Tensor | None]]
    options: tuple[Any, ...]
    call: Callable[[list[Any], StoredStates, Tensor], Call]
    result: tuple[int, ...]
    order: Callable[[Tensor], Tensor] = lambda state: state


def convolution(channels: int, taps: int, biased: bool, activation: str) -> Case:
    weight, bias = torch.randn(channels, taps + 1)[:, :taps], torch.randn(channels) if biased else None
    return Case(
        "stored_convolution",
        channels + 3,
        channels * (taps - 1),
        lambda values: [values[:, 3:], weight, bias],
        (activation,),
        lambda x, stored, out: convolution_call(x[0], x[1], x[2], stored, out, activation),
        (channels,),
    )


def scan(heads: int, channels: int, groups: int, size: int, of_state: bool) -> Case:
    rates = -torch.rand((heads, size + 3) if of_state else (heads, 1)).to(torch.float32)
    rates = rates[:, :size] if of_state else rates[:, 0].contiguous()
    widths = (heads * channels, heads, groups * size, groups * size)

    def operands(values: Tensor) -> list[Tensor | None]:
        x, dt, b, c = values.split(widths, 1)
        b, c = (one.unflatten(1, (groups, size)) for one in (b, c))
        return [x.unflatten(1, (heads, channels)), dt.abs(), rates, b, c]

    return Case(
        "stored_scan",
        sum(widths),
        heads * channels * size,
        operands,
        (),
        lambda x, stored, out: scan_call(*x, stored, out),
        (heads, channels),
        lambda state: state.view(heads, channels, size).transpose(1, 2).reshape(-1),
    )


def delta_rule(key_heads: int, heads: int, size: int, value_size: int, normalize: bool, of_rows: bool) -> Case:
    widths = (key_heads * size, key_heads * size, heads * value_size, heads * (size if of_rows else 1), heads)

    def operands(values: Tensor) -> list[Tensor | None]:
        q, k, v, decay, beta = values.split(widths, 1)
        q, k = (one.unflatten(1, (key_heads, size)) for one in (q, k))
        decay = decay.unflatten(1, (heads, size)) if of_rows else decay
        shares = beta.square() / (1 + beta.square())  # torch rounds the functions that aren't exact by a value's place
        return [q, k if normalize else k / size, v.unflatten(1, (heads, value_size)), -decay.abs(), shares]

    return Case(
        "stored_delta_rule",
        sum(widths),
        heads * size * value_size,
        operands,
        (0.4, normalize),
        lambda x, stored, out: delta_rule_call(x, stored, out, 0.4, normalize=normalize),
        (heads, value_size),
        lambda state: state.view(heads, value_size, size).transpose(1, 2).reshape(-1),
    )


CASES: Mapping[str, Callable[[], Case]] = {
    "convolution of 6 channels, 4 taps": lambda: convolution(6, 4, True, "silu"),
    "convolution of 200 channels, 3 taps": lambda: convolution(200, 3, False, ""),
    "convolution of 130 channels, 7 taps": lambda: convolution(130, 7, True, "gelu"),
    "Mamba-2, tiles across groups": lambda: scan(4, 3, 2, 5, False),
    "Mamba-2, tiles within a head": lambda: scan(2, 32, 2, 64, False),
    "Mamba, 6 channels": lambda: scan(6, 1, 1, 5, True),
    "Mamba, 150 channels": lambda: scan(150, 1, 1, 16, True),
    "delta rule of 6 x 5": lambda: delta_rule(2, 4, 6, 5, True, False),
    "delta rule of 64 x 40": lambda: delta_rule(1, 2, 64, 40, False, False),
    "KDA of 12 x 9": lambda: delta_rule(3, 3, 12, 9, True, True),
    "KDA of 64 x 20": lambda: delta_rule(2, 2, 64, 20, True, True),
}


@dataclass
class Steps:
    """Steps of a case by the kernel and by the reference, each with a cache of its own.

    ``padding``: requests and tokens of padding in each step.
    """

    case: Case
    dtype: torch.dtype = torch.float32
    padding: int = 0

    def __post_init__(self) -> None:
        size = FIRST + self.case.size + SPARE
        self.ours, self.theirs = torch.full((BLOCKS, size), NAN), torch.full((BLOCKS, size), NAN)
        self.done: dict[int, int] = {}

    def step(
        self, chunks: Mapping[int, Tensor], snapshots: Mapping[tuple[int, int], int] = {}
    ) -> tuple[Tensor, Tensor]:
        """Results of the kernel and of the reference for further tokens of some requests.

        Args:
            chunks: the block of a request's state -> the values of its tokens [n, width].
            snapshots: (block of the request, index of the token in the chunk) -> the block that gets the state.
        """
        counts = [len(chunk) for chunk in chunks.values()]
        starts = [0, *accumulate(counts)]
        for block, chunk in chunks.items():
            self.done[block] = self.done.get(block, 0) + len(chunk)
        slots = torch.full((starts[-1],), -1, dtype=torch.int32)
        for (block, token), to in snapshots.items():
            slots[starts[list(chunks).index(block)] + token] = to * STATE_TOKENS + self.done[block] - 1
        table = torch.tensor([[block, -1] for block in chunks], dtype=torch.int32)
        kv_len = torch.tensor([self.done[block] for block in chunks], dtype=torch.int32)
        q_start = torch.tensor(starts, dtype=torch.int32)
        values = torch.cat(list(chunks.values()))
        wide = [None if one is None else one.to(self.dtype).float() for one in self.case.operands(values)]
        expected, self.theirs = REFERENCES[self.case.op](
            *wide, self.theirs, table, q_start, kv_len, slots, FIRST, *self.case.options
        )
        more = self.padding
        padded = self.case.operands(torch.cat([values, torch.full((more, values.shape[1]), NAN)]))
        padded = [None if one is None else one.to(self.dtype) for one in padded]
        stored = StoredStates(
            self.ours,
            torch.cat([table, torch.full((more, 2), -1, dtype=torch.int32)]),
            torch.cat([q_start, q_start[-1:].expand(more)]),
            torch.cat([kv_len, torch.zeros(more, dtype=torch.int32)]),
            torch.cat([slots, torch.full((more,), -1, dtype=torch.int32)]),
            FIRST,
        )
        out = torch.full((starts[-1] + more, 2, *self.case.result), NAN, dtype=self.dtype)[:, 1]
        JitLauncher().bind(self.case.call(padded, stored, out))()
        assert out[starts[-1] :].isnan().all(), "padding has no results"
        return out[: starts[-1]].float(), expected

    def states(self) -> tuple[Tensor, Tensor]:
        """The caches of both, in the reference's order."""
        ours = self.ours.clone()
        for block in range(BLOCKS):
            ours[block, FIRST : FIRST + self.case.size] = self.case.order(ours[block, FIRST : FIRST + self.case.size])
        return ours, self.theirs


def differences(name: str, dtype: str, padding: int = 3) -> tuple[float, float]:
    """The largest differences of a result and of a state, as shares of the largest ones.

    Three requests, in chunks of several sizes, with states of zeros and from blocks, with snapshots. The untouched
    values of both caches must be the same.
    """
    torch.manual_seed(0)
    case = CASES[name]()
    steps = Steps(case, {"f32": torch.float32, "bf16": torch.bfloat16}[dtype], padding)
    values = {block: torch.randn(n, case.width) for block, n in ((4, 14), (0, 21), (7, 3))}
    schedule: Sequence[tuple[Mapping[int, tuple[int, int]], Mapping[tuple[int, int], int]]] = (
        ({4: (0, 5), 0: (0, 1)}, {(4, 1): 2}),
        ({0: (1, 20), 7: (0, 2), 4: (5, 6)}, {(0, 9): 3, (0, 18): 8}),
        ({7: (2, 3), 4: (6, 14), 0: (20, 21)}, {(7, 0): 5}),
    )
    apart = [0.0]
    for spans, snapshots in schedule:
        chunks = {block: values[block][first:end] for block, (first, end) in spans.items()}
        got, expected = steps.step(chunks, snapshots)
        apart.append(float((got - expected).abs().max() / expected.abs().max()))
    ours, theirs = steps.states()
    assert torch.equal(ours.isnan(), theirs.isnan()), "both write the same values"
    assert ours[[1, 6]].isnan().all() and not ours[[0, 2, 3, 4, 5, 7, 8], FIRST:-SPARE].isnan().any()
    assert ours[:, :FIRST].isnan().all() and ours[:, -SPARE:].isnan().all()
    return max(apart), float((ours - theirs).nan_to_num().abs().max() / theirs.nan_to_num().abs().max())


def in_chunks(name: str, sizes: Sequence[int]) -> list[list[float]]:
    """Returns a request's results and last state for each size of chunks: alone in one piece, then beside another."""
    torch.manual_seed(0)
    case = CASES[name]()
    values, others = torch.randn(23, case.width), torch.randn(9, case.width)
    whole = Steps(case)
    results = [[*whole.step({4: values})[0].flatten().tolist(), *whole.ours[4, FIRST:-SPARE].tolist()]]
    for size in sizes:
        steps = Steps(case, padding=1)
        steps.step({2: others})
        pieces = []
        for first, end in pairwise([*range(0, len(values), size), len(values)]):
            beside = {2: others[first % 8 : first % 8 + 1]}
            pieces.append(steps.step({**beside, 4: values[first:end]})[0][1:])
        results.append([*torch.cat(pieces).flatten().tolist(), *steps.ours[4, FIRST:-SPARE].tolist()])
    return results
