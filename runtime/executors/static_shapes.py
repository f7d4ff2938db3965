"""Steps of fixed sizes around any executor: each is padded to the tightest bucket that holds it, which is counted."""

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
    """The steps that one bucket has run so far.

    Attributes:
        tokens, rows: that were asked for; ``padded_tokens`` and ``padded_rows`` were computed on top.
    """

    name: str
    steps: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    rows: int = 0
    padded_rows: int = 0

    @property
    def waste(self) -> float:
        """The share of padding in the tokens that were computed."""
        return self.padded_tokens / max(self.tokens + self.padded_tokens, 1)


class StaticShapes:
    """An executor whose steps have the sizes of a plan's buckets. See ``executors.base.Executor``.

    Padding are requests of token 0, whose keys and values go to blocks of their own, which no request gets: the last
    of each pool. Nothing of theirs is sampled or given back, and no request's numbers depend on the batch, so results
    are those of the steps as they came. A step that wants logits of more rows than its bucket has (a prompt that is
    scored) keeps its rows.

    Args:
        inner: with ``padding_blocks`` more in each pool than requests will get. It is closed with this one.
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
        )
        self.use = {bucket.name: BucketUse(bucket.name) for bucket in plan.buckets}

    @property
    def lost(self) -> str:
        """Why no step can run any more, as ``inner`` says it; "" where one can."""
        return str(getattr(self.inner, "lost", ""))

    def submit(self, step: StepInput) -> Pending:
        """Raises RequestError for a step that no bucket holds."""
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
        """The tightest bucket: of the fewest tokens, then requests. Raises RequestError if none holds the step."""
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
    """Cache group -> blocks that padding is written to: each token of the most padding there can be has a slot."""
    smallest = min((g.block_size for g in groups), default=1)
    return {g.name: -(-plan.most_padding // smallest) for g in groups}


def _holds(bucket: Bucket, tokens: int, requests: int) -> bool:
    if bucket.kind == "batch":
        return tokens == requests <= bucket.tokens
    return tokens <= bucket.tokens and requests + (tokens < bucket.tokens) <= bucket.requests


def pad(step: StepInput, bucket: Bucket, groups: Sequence[CacheGroup], padding: Mapping[str, int]) -> StepInput:
    """``step`` with the sizes of ``bucket``, which holds it.

    In a bucket of kind tokens all padding is one more request, at positions 0, 1, ...; further requests have no tokens.
    In one of kind batch each is a request of one token. Rows are filled up with the first one again.

    Args:
        step: as it came.
        bucket: that holds it.
        groups: of the executor's caches.
        padding: cache group -> the first of the blocks that padding is written to.
    """
    tokens, requests, rows = len(step.ids), len(step.kv_len), len(step.rows)
    more, new = bucket.tokens - tokens, bucket.requests - requests
    if not (more or new or rows < bucket.rows):
        return step
    numbers = np.arange(more, dtype=np.int32)  # of the tokens of padding
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
    """Returns a batch with ``more`` rows, which take the likeliest token and draw nothing."""
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
    """A step's result without what was padding."""

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
