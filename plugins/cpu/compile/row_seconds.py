"""Measures decode steps in which one request has several rows, as with speculation."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.requests.logit_rules import PLAIN, sampling_batch
from enginewright.runtime.shared.contracts import DRAFT_ROWS, StepInput
from enginewright.runtime.shared.step_costs import StepSizes

from .step_runner import StepRunner

CONTEXTS = (64, 1024, 4096)
_FEWEST, _MOST = 3, 25
"""The least and the largest number of rounds."""


def row_seconds(
    bundle: Bundle,
    contexts: tuple[int, ...],
    seconds: float,
    *,
    others: int = 0,
    threads: int = 0,
    choices: Mapping[str, int] | None = None,
) -> dict[int, tuple[float, ...]]:
    """Measures steps in which one request has 1, 2, ... ``DRAFT_ROWS`` rows. Returns their seconds, by context.

    Each time is the minimum of some rounds, as other load can only slow a step. Every row's token is drawn greedily.
    When the time is over, the remaining contexts are omitted.

    Args:
        bundle: an open bundle with a ready target cpu.
        contexts: the tokens of each request, including those of the step.
        seconds: the maximum time of the measurement, without opening the program.
        others: the number of other requests in the step, each with one row.
        threads, choices: see ``CpuProgram``.

    Raises:
        BundleError, CapacityError: as for a program that is opened to be served.
    """
    sizes = {
        context: [StepSizes((rows, *(1,) * others), (context,) * (1 + others)) for rows in range(1, DRAFT_ROWS + 1)]
        for context in contexts
    }
    runner = StepRunner(bundle, [one for of in sizes.values() for one in of], threads=threads, tuning=choices)
    runner.fill_caches()
    until = time.perf_counter() + seconds
    seconds_of_rows: dict[int, tuple[float, ...]] = {}
    for left, context in zip(range(len(contexts), 0, -1), contexts, strict=True):
        steps = [_all_rows(runner.step(one)) for one in sizes[context]]
        runner.program.run(steps[-1])  # brings the weights into memory
        times: list[list[float]] = [[] for _ in steps]
        began = time.perf_counter()
        share = began + (until - began) / left
        while len(times[-1]) < _MOST and (start := time.perf_counter()) < (
            until if len(times[-1]) < _FEWEST else share
        ):
            for step, of in zip(steps, times, strict=True):
                runner.program.run(step)
                of.append((now := time.perf_counter()) - start)
                start = now
                if now > until:
                    break
        if len(times[-1]) < _FEWEST:
            break
        seconds_of_rows[context] = tuple(map(min, times))
    return seconds_of_rows


def _all_rows(step: StepInput) -> StepInput:
    count = len(step.ids)
    step = step.changed(rows=np.arange(count, dtype=np.int32), sampling=sampling_batch([PLAIN] * count))
    return step
