"""Prepares steps of packed tokens for a GPU: divides them, and pads them to few sizes, so that CUDA graphs are
reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.contracts import NO_TOKEN, CacheGroup, FloatArray, Int32Array, StepInput
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.step_arrays import filled, part_of
from enginewright.runtime.shared.step_schema import BLOCK_TABLE, ROWS, Array, group_port, port_of, ports_of


@dataclass(frozen=True)
class StepShape:
    """The sizes to which a step is padded. Steps of equal shape share a graph.

    Attributes:
        profile: the index of the target's profile that runs it.
        tokens, requests, rows, blocks: T, B, R, and M of the block tables.
        decodes: True if each request has one token.
        mixed: True if some requests have one token and others are prompts, and the former are decoded separately.
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
    """A program or engine that runs steps up to a maximum size."""

    def most(self, *, decodes: bool) -> tuple[int, int]:
        """Returns the maximum tokens and requests of a step. ``decodes``: True for steps with one token per request."""


def parts(counts: npt.NDArray[Any], program: HoldsSteps) -> list[list[int]]:
    """Divides the requests of a step into groups that run together: decodes, then prompts, as many as a profile holds.

    Returns the indices of each group's requests.

    Args:
        counts: the tokens of each request in the step, [B].
        program: the program, whose profiles limit the groups.

    Raises:
        RequestError: a request alone has too many tokens.
    """
    members: list[list[int]] = []
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
            if needed > left or len(members[-1]) == most_requests:
                members.append([])
                left = most_tokens
            members[-1].append(b)
            left -= needed
    return members


def divided(
    step: StepInput, program: HoldsSteps, *, decodes: bool = False
) -> Iterator[tuple[StepInput, npt.NDArray[np.int64]]]:
    """Yields the parts of a step that run together, with the indices of their rows in the whole step.

    The part is the whole step if one profile holds it: one for decode steps if ``decodes``, otherwise one for prompts.
    Raises RequestError as ``parts`` does.
    """
    tokens, requests = program.most(decodes=decodes)
    if len(step.ids) <= tokens and len(step.kv_len) <= requests:
        yield step, np.arange(len(step.rows))
        return
    for members in parts(step.counts, program):
        yield part_of(step, members)


def padded(
    step: StepInput, rows: Int32Array, groups: Sequence[CacheGroup], shape: StepShape, ports: Sequence[str] = ()
) -> dict[str, Array]:
    """Returns the inputs of a step, padded to ``shape``, by their names in ``step_schema``.

    Padding tokens belong to no request and aren't written to the cache; padding requests have no tokens.

    Args:
        step: the step.
        rows: the indices of the tokens whose logits are computed.
        groups: the cache groups.
        shape: the sizes to pad to.
        ports: the names of further inputs, as in ``ExecutorCaps.ports``.
    """
    windows = {group_port(BLOCK_TABLE, group.name) for group in groups if group.window}
    arrays = {}
    for name, shape_of in input_shapes(groups, shape, ports).items():
        array = rows if name == ROWS else step.arrays[name]
        if name in windows:
            # A tile may begin before the window: there it may read, and mask, another block of its request.
            before = (array < 0) & (np.cumsum(array >= 0, axis=1) == 0)
            array = np.where(before, array.max(axis=1, keepdims=True), array)
        arrays[name] = filled(port_of(name), array, shape_of)
    return arrays


def owners_of_bad_rows(step: StepInput, logits: FloatArray | None, tokens: Int32Array | None) -> Int32Array:
    """Returns the indices of requests that have a row of logits with NaN or infinity.

    ``tokens`` are the sampled tokens, which tell if a row is bad; None takes ``logits``.
    """
    if tokens is not None:
        bad = tokens == NO_TOKEN
    else:
        assert logits is not None
        bad = ~np.isfinite(logits).all(axis=-1)
    if not bad.any():
        return np.empty(0, np.int32)
    return np.unique(step.requests_at(step.rows[bad])).astype(np.int32)


def rounded(size: int, sizes: Sequence[int]) -> int:
    """Rounds ``size`` up to a power of two within the range (least, best, most), so that few graphs serve all steps."""
    return min(max(1 << (size - 1).bit_length(), sizes[0]), sizes[2])


def bucketed(size: int, sizes: Sequence[int]) -> int:
    """Rounds the tokens of a prompt step up to one of a few sizes, within the range (least, best, most).

    There are four sizes for each doubling, all multiples of 16. Sizes are few because an engine stores data for each
    that it has run, such as a compiled kernel.
    """
    unit = max(16, (1 << (size - 1).bit_length()) >> 3)
    return min(max(-(-size // unit) * unit, sizes[0]), sizes[2])


def input_shapes(
    groups: Sequence[CacheGroup], of: StepShape | StepLimits, ports: Sequence[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Returns each input's shape in a step of these sizes, by name. ``ports``: further inputs, as in
    ``ExecutorCaps.ports``.
    """
    named = ports_of((group.name for group in groups), ports)
    return {name: port.sizes(of.tokens, of.requests, of.rows, of.blocks) for name, port in named}


def input_sizes(groups: Sequence[CacheGroup], limits: StepLimits | StepShape) -> dict[str, int]:
    """Returns the number of elements of each input in a step of these sizes, by name, in the order of ``padded``."""
    return {name: math.prod(shape) for name, shape in input_shapes(groups, limits).items()}
