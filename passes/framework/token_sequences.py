"""Token sequences for passes: samples of them, packed inputs for a Program, and the distance between logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from enginewright.passes.ir.program import Program, cache_input
from enginewright.runtime.shared.contracts import STATE
from enginewright.runtime.shared.step_schema import (
    BLOCK_TABLE,
    IDS,
    KV_LEN,
    POSITIONS,
    Q_START,
    ROWS,
    SLOTS,
    TYPES,
    group_port,
)


def packed_inputs(
    program: Program, sequences: Sequence[torch.Tensor], most_rows: int | None = None
) -> dict[str, torch.Tensor]:
    """Returns an input for each placeholder of ``program``: the sequences packed into one step, with empty caches.

    Args:
        program: a program with attention as captured, or paged.
        sequences: token ids, [S] each, at least one token.
        most_rows: the most tokens whose logits are computed, evenly spaced; None for all T.

    Returns:
        the inputs by name. ``rows`` has all T tokens, or some, so that the program returns logits [T, V] or fewer.
    """
    lengths = torch.tensor([len(s) for s in sequences])
    requests = range(len(sequences))
    starts = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))  # [B+1]
    positions = torch.cat([torch.arange(len(s)) for s in sequences])  # [T]
    every = 1 if most_rows is None else -(-len(positions) // most_rows)
    inputs = {
        IDS: torch.cat([s.long() for s in sequences]),
        POSITIONS: positions,
        Q_START: starts,
        KV_LEN: lengths,
        ROWS: torch.arange(every - 1, int(starts[-1]), every),
        TYPES: torch.zeros(int(starts[-1])),
    }
    owner = torch.repeat_interleave(torch.tensor(list(requests)), lengths)  # [T]
    for group in program.cache_groups:
        width = -(-int(lengths.max()) // group.block_size)  # blocks of the longest
        table = torch.arange(len(sequences) * width).view(-1, width)  # [B, M]
        inputs[group_port(BLOCK_TABLE, group.name)] = table
        if group.kind == STATE:
            inputs[group_port(SLOTS, group.name)] = torch.full((len(positions),), -1)
            inputs |= {f"{STATE}:{n}": torch.zeros(()).expand(table.numel(), group.state_size) for n in group.layers}
            continue
        inputs[group_port(SLOTS, group.name)] = table[owner, positions // group.block_size] * group.block_size + (
            positions % group.block_size
        )
        for layer in group.layers:
            for plane in group.planes:
                shape = (table.numel(), group.block_size, *plane.shape)
                name = cache_input(plane.name, layer, ends=group.holds_ends)
                inputs[name] = torch.zeros(()).expand(shape)  # takes no memory
    # The captured form has a table and slots as well, which nothing reads.
    inputs |= {name: torch.zeros((len(sequences), 1)) for name in (BLOCK_TABLE,) if name in program.inputs}
    inputs |= {name: torch.zeros(len(positions)) for name in (SLOTS,) if name in program.inputs}
    return {name: inputs[name].to(program.value(node).dtype) for name, node in program.inputs.items()}


Item = TypeVar("Item")


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Returns ``count`` evenly spaced items, among them the first."""
    return [items[i * len(items) // count] for i in range(count)]


def beginnings(sequences: Sequence[torch.Tensor], most: int, length: int) -> list[torch.Tensor]:
    """Returns the beginnings of evenly spaced sequences: about ``most`` tokens in total, ``length`` from each.

    If there are too few sequences, longer beginnings are taken.
    """
    count = min(len(sequences), max(1, most // length))
    return [sequence[: max(1, most // count)] for sequence in spread(sequences, count)]


_ELEMENTS = 1 << 22
"""Logits that are looked at together."""


def mean_kl(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """Returns the mean over rows of KL(reference || logits) in nats. Both arguments are logits [R, V]."""
    total = 0.0
    step = max(1, _ELEMENTS // reference.shape[-1])
    for a, b in zip(reference.split(step), logits.split(step), strict=True):
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp(min=0).sum())
    return total / len(reference)
