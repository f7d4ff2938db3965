"""Pads the steps of any executor to fixed sizes: each step runs in the tightest bucket that holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..bundle.buckets import Bucket, BucketPlan
from ..shared.contracts import (
    NO_TOKEN,
    SAMPLING_LISTS,
    SAMPLING_OPTIONS,
    CacheGroup,
    ExecutorCaps,
    SamplingBatch,
    StepInput,
    StepOutput,
)
from ..shared.errors import RequestError
from ..shared.step_arrays import with_padding
from .base import Executor, Pending

Number = TypeVar("Number", bound=np.generic)


@dataclass
class BucketUse:
    """Counts of the steps that ran in one bucket.

    Attributes:
        name: name of the bucket.
        steps: number of steps.
        tokens, rows: tokens and rows of logits that the steps had before padding.
        padded_tokens, padded_rows: tokens and rows that were added.
    """

    name: str
    steps: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    rows: int = 0
    padded_rows: int = 0

    @property
    def waste(self) -> float:
        """The share of padding in the computed tokens, from 0 to 1."""
        return self.padded_tokens / max(self.tokens + self.padded_tokens, 1)


class StaticShapes:
    """An executor that pads each step to the size of a bucket, and runs it on another executor.

    The padding is requests of token 0. Their keys and values are written to the last blocks of each pool, which no
    request gets, and their rows are removed from the output. A request's numbers don't depend on the batch, so padding
    changes no result. A step that needs more rows of logits than its bucket has, as when a prompt is scored, keeps its
    rows.

    Args:
        inner: the other executor, whose pools have ``padding_blocks`` additional blocks. It is closed with this one.
        plan: the buckets.
    """

    def __init__(self, inner: Executor, plan: BucketPlan) -> None:
        self.inner = inner
        self.plan = plan
        self.cache_groups: tuple[CacheGroup, ...] = inner.cache_groups
        padding = padding_blocks(plan, inner.cache_groups)
        self.blocks: Mapping[str, int] = {name: count - padding[name] for name, count in inner.blocks.items()}
        self.caps: ExecutorCaps = replace(
            inner.caps,
            max_tokens=min(inner.caps.max_tokens, plan.most_tokens),
            max_requests=min(inner.caps.max_requests, plan.most_requests),
            most_runs=1,  # a padded step knows no next token of its padding
        )
        self.use = {bucket.name: BucketUse(bucket.name) for bucket in plan.buckets}

    @property
    def lost(self) -> str:
        """The reason why the executor can run no more steps; "" if it can."""
        return str(getattr(self.inner, "lost", ""))

    def submit(self, step: StepInput) -> Pending:
        """Submits a step, padded to its bucket. Raises RequestError if no bucket holds the step."""
        bucket = self.bucket_of(step)
        use = self.use[bucket.name]
        tokens, rows = len(step.ids), len(step.rows)
        padded = pad(step, bucket, self.cache_groups, self.blocks)
        use.steps += 1
        use.tokens += tokens
        use.padded_tokens += len(padded.ids) - tokens
        use.rows += rows
        use.padded_rows += len(padded.rows) - rows
        return _Stripped(self.inner.submit(padded), rows)

    def bucket_of(self, step: StepInput) -> Bucket:
        """Returns the bucket with the fewest tokens, then requests, that holds the step.

        Raises RequestError if there is none.
        """
        tokens, requests = len(step.ids), len(step.kv_len)
        fitting = [b for b in self.plan.buckets if _holds(b, tokens, requests)]
        if not fitting:
            raise RequestError(
                f"step: no bucket holds {tokens} tokens of {requests} requests; the largest is of "
                f"{self.plan.most_tokens} tokens and {self.plan.most_requests} requests",
                hint="Plan steps by the executor's caps.",
            )
        return min(fitting, key=lambda b: (b.tokens, b.requests))

    def statistics(self) -> list[dict[str, str | int | float]]:
        """Returns the use of each bucket so far: ``BucketUse`` as plain values, with the share of padding."""
        return [asdict(use) | {"waste": use.waste} for use in self.use.values()]

    def describe(self) -> dict[str, str | int]:
        return self.inner.describe() | {"buckets": len(self.plan.buckets)}

    def close(self) -> None:
        self.inner.close()


def padding_blocks(plan: BucketPlan, groups: Sequence[CacheGroup]) -> dict[str, int]:
    """Returns the number of blocks for padding in each cache group, enough for the most padding of a step."""
    smallest = min((g.block_size for g in groups), default=1)
    return {g.name: -(-plan.most_padding // smallest) for g in groups}


def _holds(bucket: Bucket, tokens: int, requests: int) -> bool:
    if bucket.kind == "batch":
        return tokens == requests <= bucket.tokens
    return tokens <= bucket.tokens and requests + (tokens < bucket.tokens) <= bucket.requests


def pad(step: StepInput, bucket: Bucket, groups: Sequence[CacheGroup], padding: Mapping[str, int]) -> StepInput:
    """Returns ``step`` padded to the size of ``bucket``, which must hold it.

    In a bucket of kind "tokens", one additional request at positions 0, 1, ... has all padding tokens, and further
    requests have none. In one of kind "batch", each additional request has one token. Additional rows repeat the first
    row.

    Args:
        step: the step before padding.
        bucket: the bucket.
        groups: cache groups of the executor.
        padding: the first block for padding in each cache group.
    """
    tokens, requests, rows = len(step.ids), len(step.kv_len), len(step.rows)
    more, new = bucket.tokens - tokens, bucket.requests - requests
    if not (more or new or rows < bucket.rows):
        return step
    numbers = np.arange(more, dtype=np.int32)  # positions of the padding tokens
    smallest = min((g.block_size for g in groups), default=1)
    if bucket.kind == "batch":
        counts = np.ones(new, np.int32)
        lengths = numbers % np.int32(smallest) + np.int32(1)
    else:
        counts = np.zeros(new, np.int32)
        counts[:1] = more
        lengths = counts
    tables = {}
    for group in groups:
        first = np.int32(padding[group.name])
        if bucket.kind == "batch":
            table = (first + numbers // smallest)[:, None]  # [new, 1]: those before a block's end share it
        else:
            width = -(-more // group.block_size)
            table = np.full((new, max(width, 1)), -1, np.int32)
            table[:1, :width] = first + np.arange(width, dtype=np.int32)
        tables[group.name] = table
    requests_of_padding = StepInput.packed(
        ids=np.zeros(more, np.int32), counts=counts, kv_len=lengths, tables=tables, groups=groups, rows=()
    )
    filled = max(bucket.rows, rows)
    return StepInput(
        with_padding(step, requests_of_padding.arrays, filled),
        sampling=None if step.sampling is None else _greedy(step.sampling, filled - rows),
        outputs=step.outputs,
        clears=step.clears,
        copies=step.copies,
    )


def _greedy(sampling: SamplingBatch, more: int) -> SamplingBatch:
    """Returns a batch with ``more`` additional rows, which choose the likeliest token and draw no random numbers."""
    longer: dict[str, Any] = {
        name: _longer(array, more, SAMPLING_OPTIONS[name])
        for name, array in sampling.options().items()
        if name in SAMPLING_OPTIONS
    }
    if sampling.scored is not None:
        longer["scored"] = _longer(sampling.scored, more, NO_TOKEN)
    if sampling.top_allowed is not None:
        longer["top_allowed"] = _longer(sampling.top_allowed, more)
    if sampling.masks is not None:
        longer["masks"] = sampling.masks.longer(more)
    for name in SAMPLING_LISTS:
        if (starts := getattr(sampling, name)) is not None:
            longer[name] = _longer(starts, more, int(starts[-1]))
    return replace(sampling, **longer)


def _longer(array: npt.NDArray[Number], more: int, value: float = 0) -> npt.NDArray[Number]:
    return np.concatenate([array, np.full(more, value, array.dtype)])


class _Stripped:
    """A submitted step whose output loses the rows of padding."""

    def __init__(self, pending: Pending, rows: int) -> None:
        self._pending, self._rows = pending, rows

    def result(self) -> StepOutput:
        output = self._pending.result()
        outputs = {name: array[: self._rows] for name, array in output.outputs.items()}
        of_rows = ("tokens", "token_logprobs", "top_ids", "top_logprobs")
        row_arrays = {name: array[: self._rows] for name in of_rows if (array := getattr(output, name)) is not None}
        return replace(output, outputs=outputs, **row_arrays)


def use_lines(statistics: Sequence[Mapping[str, str | int | float]]) -> list[str]:
    """Returns the use of each bucket, from ``LLM.info()``, as the lines of a table; empty without buckets."""
    if not statistics:
        return []
    lines = [f"{'bucket':<14}{'steps':>8}{'tokens':>10}{'padded':>10}{'waste':>8}"]
    total = [0, 0, 0]
    for use in statistics:
        steps, tokens, padded = (int(use[key]) for key in ("steps", "tokens", "padded_tokens"))
        lines.append(_use_line(str(use["name"]), steps, tokens, padded))
        total = [a + b for a, b in zip(total, (steps, tokens, padded), strict=True)]
    return [*lines, _use_line("all", *total)]


def _use_line(name: str, steps: int, tokens: int, padded: int) -> str:
    return f"{name:<14}{steps:>8,}{tokens:>10,}{padded:>10,}{padded / max(tokens + padded, 1):>8.1%}"
