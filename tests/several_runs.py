"""The runs of a step, each made anew from the tokens of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from enginewright.runtime.shared.contracts import NO_TOKEN, CacheGroup, Int32Array, StepInput, StepOutput


def next_run(step: StepInput, tokens: Int32Array, groups: Iterable[CacheGroup]) -> StepInput:
    """Returns the step with the next token of each request of ``step``, which drew ``tokens``."""
    assert step.sampling is not None
    return StepInput.packed(
        ids=tokens,
        counts=np.ones(len(tokens), np.int32),
        kv_len=step.kv_len + 1,
        tables=step.block_tables,
        groups=groups,
        rows=np.arange(len(tokens)),
        sampling=step.sampling.following(),
    )


def run_several(
    step: StepInput,
    groups: Iterable[CacheGroup],
    run: Callable[[StepInput], StepOutput],
    *,
    most: int = 8,
    heedless: bool = False,
) -> StepOutput:
    """Runs a step as often as it says, and at most ``most`` times.

    Args:
        step: the step.
        groups: the cache groups.
        run: runs a step once.
        most: the most runs.
        heedless: True if tokens of ``StepInput.until`` don't end it.
    """
    tokens = list[Int32Array]()
    current = step.changed(runs=1)
    while True:
        drawn = run(current).tokens
        assert drawn is not None
        tokens.append(drawn)
        ended = not heedless and bool(np.isin(drawn, step.until).any())
        if ended or len(tokens) == min(step.runs, most) or NO_TOKEN in drawn:
            return StepOutput(tokens=np.array(tokens))
        current = next_run(current, drawn, groups)
