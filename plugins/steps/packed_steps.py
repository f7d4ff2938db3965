"""Steps of packed tokens brought to sizes that a GPU runs again and again: padded, rounded up, cut into parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import NO_TOKEN, CacheGroup, FloatArray, Int32Array, StepInput
from enginewright.runtime.shared.errors import RequestError

from .paged_section import IDS, KV_LEN, POSITIONS, Q_START, ROWS, slots_name, table_name


@dataclass(frozen=True)
class StepShape:
    """Sizes that a step is padded to; equal ones share a graph.

    Attributes:
        profile: which of the target's profiles runs it.
        tokens, requests, rows, blocks: T, B, R, and M of the tables.
        decodes: whether each request has one token.
        mixed: whether some have one, and are to be decoded beside the prompts of others.
    """

    profile: int
    tokens: int
    requests: int
    rows: int
    blocks: int
    decodes: bool
    mixed: bool = False


@dataclass(frozen=True)
class StepLimits:
    """The largest T, B, R and M of any step."""

    tokens: int
    requests: int
    rows: int
    blocks: int


class HoldsSteps(Protocol):
    """Something that runs steps up to a size."""

    def most(self, *, decodes: bool) -> tuple[int, int]:
        """The most tokens and requests of a step, with one token a request or any number."""


def parts(counts: npt.NDArray[Any], program: HoldsSteps) -> list[list[int]]:
    """Requests that run together: decodes, then prompts, as many as a profile holds. Raises RequestError.

    Args:
        counts: tokens of each request in the step, [B].
        program: says what it holds.
    """
    found: list[list[int]] = []
    for decodes in (True, False):
        most_tokens, most_requests = program.most(decodes=decodes)
        left = 0  # tokens that the last part has room for
        for b in np.flatnonzero(counts == 1 if decodes else counts > 1).tolist():
            needed = int(counts[b])
            if needed > most_tokens:
                raise RequestError(
                    f"step: {needed} tokens of a request, and engines hold {most_tokens}",
                    hint="Plan steps by the executor's caps.",
                )
            if needed > left or len(found[-1]) == most_requests:
                found.append([])
                left = most_tokens
            found[-1].append(b)
            left -= needed
    return found


def of_requests(step: StepInput, members: Sequence[int]) -> tuple[StepInput, npt.NDArray[np.int64]]:
    """A step of some of its requests, and which of the step's rows are theirs, in the part's order.

    What is to be copied or cleared before the step isn't the part's.
    """
    counts = np.diff(step.q_start)[list(members)]
    tokens = np.concatenate([np.arange(step.q_start[b], step.q_start[b + 1]) for b in members])
    place = np.full(len(step.ids), -1, np.int32)
    place[tokens] = np.arange(len(tokens), dtype=np.int32)
    order = np.flatnonzero(place[step.rows] >= 0)
    part = replace(
        step,
        ids=step.ids[tokens],
        positions=step.positions[tokens],
        q_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        kv_len=step.kv_len[list(members)],
        block_tables={name: table[list(members)] for name, table in step.block_tables.items()},
        slots={name: slots[tokens] for name, slots in step.slots.items()},
        rows=place[step.rows[order]],
        copies={},
        clears={},
    )
    return part, order


def padded(step: StepInput, rows: Int32Array, groups: Sequence[CacheGroup], shape: StepShape) -> dict[str, Int32Array]:
    """The inputs of a step, with the sizes of ``shape``, by the names of ``plugins.steps.paged_section``.

    Tokens of padding belong to no request and are written nowhere; requests of padding have no tokens.
    """
    tokens, requests = len(step.ids), len(step.kv_len)
    arrays = {
        IDS: _longer(step.ids, shape.tokens, 0),
        POSITIONS: _longer(step.positions, shape.tokens, 0),
        Q_START: _longer(step.q_start, shape.requests + 1, tokens),
        KV_LEN: _longer(step.kv_len, shape.requests, 0),
        ROWS: _longer(rows, shape.rows, 0),
    }
    for group in groups:
        arrays[slots_name(group.name)] = _longer(step.slots[group.name], shape.tokens, -1)
        table = np.full((shape.requests, shape.blocks), -1, np.int32)
        given = step.block_tables[group.name]
        # A tile may begin before the window: there it may read, and mask, another block of its request.
        table[:requests, : given.shape[1]] = (
            given
            if not group.window
            else np.where((given < 0) & (np.cumsum(given >= 0, axis=1) == 0), given.max(axis=1, keepdims=True), given)
        )
        arrays[table_name(group.name)] = table
    return arrays


def owners_of_bad_rows(step: StepInput, logits: FloatArray | None, tokens: Int32Array | None) -> Int32Array:
    """Requests (indices into B) of which a row's logits are not finite, as the sampler says where it ran."""
    if tokens is not None:
        bad = tokens == NO_TOKEN
    else:
        assert logits is not None
        bad = ~np.isfinite(logits).all(axis=-1)
    if not bad.any():
        return np.empty(0, np.int32)
    return np.unique(np.searchsorted(step.q_start, step.rows[bad], side="right") - 1).astype(np.int32)


def rounded(size: int, sizes: Sequence[int]) -> int:
    """``size`` up to a power of two within a profile's range, so that few graphs serve all steps."""
    return min(max(1 << (size - 1).bit_length(), sizes[0]), sizes[2])


def _longer(array: npt.NDArray[Any], size: int, value: int) -> Int32Array:
    result = np.full(size, value, np.int32)
    result[: len(array)] = array
    return result


def bucketed(size: int, sizes: Sequence[int]) -> int:
    """Tokens of a prompt step, up to one of few sizes within a profile's range: four for each doubling, by 16 at least.

    An engine that was bound to many sizes keeps something of each: a plugin's code, a compiled kernel.
    """
    unit = max(16, (1 << (size - 1).bit_length()) >> 3)
    return min(max(-(-size // unit) * unit, sizes[0]), sizes[2])


def input_shapes(groups: Sequence[CacheGroup], of: StepShape | StepLimits) -> dict[str, tuple[int, ...]]:
    """Each input's shape in a step of these sizes."""
    shapes: dict[str, tuple[int, ...]] = {IDS: (of.tokens,), POSITIONS: (of.tokens,), Q_START: (of.requests + 1,)}
    shapes |= {KV_LEN: (of.requests,), ROWS: (of.rows,)}
    for group in groups:
        shapes |= {slots_name(group.name): (of.tokens,), table_name(group.name): (of.requests, of.blocks)}
    return shapes


def input_sizes(groups: Sequence[CacheGroup], limits: StepLimits | StepShape) -> dict[str, int]:
    """Elements of each input, at its largest or in a step, in the order of ``padded``."""
    return {name: math.prod(shape) for name, shape in input_shapes(groups, limits).items()}
