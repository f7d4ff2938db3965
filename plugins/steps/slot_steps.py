"""A step over slots, whatever holds them: its runs, its logits in order, and what is done about numbers that aren't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from enginewright.runtime.shared.contracts import (
    CacheGroup,
    FloatArray,
    Int32Array,
    SamplingBatch,
    StepInput,
    StepOutput,
    as_outputs,
)
from enginewright.runtime.shared.errors import RequestError

from ..native.sampling import RowSampler
from .packed_steps import owners_of_bad_rows
from .slots import SlotRun, plan_runs, slots_of


class Slots(Protocol):
    """The caches of all slots, and what runs over them."""

    @property
    def length(self) -> int:
        """Places that a slot has now."""

    def fit(self, slot_of: Int32Array, kv_len: Int32Array) -> None:
        """Makes room for these requests, [B] each. Raises CapacityError where there is none."""

    def run(self, run: SlotRun) -> FloatArray:
        """Logits of the wanted tokens of a run: [R, V], valid until the next one."""

    def forget(self, slots: Int32Array) -> None:
        """Makes these slots zero: after numbers that were not finite, which would go on to who gets the slot next."""


class Draws(Protocol):
    """Slots whose tokens can be drawn where their logits are."""

    def draw(self, run: SlotRun, sampling: SamplingBatch, *, logits: bool) -> tuple[Int32Array, FloatArray | None]:
        """Draws the tokens after the wanted ones of a run, [R]. Returns them, and their logits if requested; options
        are the step's."""


class SlotSteps:
    """Runs steps.

    Args:
        slots: the caches.
        groups: the executor's cache groups, with slots as their blocks.
        count: the number of slots.
        threads: the number of threads of the sampler.
        chunks_together, prompts_alone: see ``plan_runs``.
        draws: draws tokens in the sampler's place.
    """

    def __init__(
        self,
        slots: Slots,
        groups: Sequence[CacheGroup],
        count: int,
        threads: int,
        *,
        chunks_together: bool = True,
        prompts_alone: bool = False,
        draws: Draws | None = None,
    ) -> None:
        self._slots = slots
        self._draws = draws
        self._groups = groups
        self._count = count
        self._sampler = RowSampler(threads)
        self._how = {"chunks_together": chunks_together, "prompts_alone": prompts_alone}

    def run(self, step: StepInput) -> StepOutput:
        """Raises RequestError or CapacityError for a step that can't be; then no slot was written."""
        slot_of = slots_of(step, self._groups, self._count)
        self._slots.fit(slot_of, step.kv_len)
        runs = plan_runs(step, slot_of, self._slots.length, **self._how)
        logits = None
        if self._draws is not None and step.sampling is not None and len(step.rows):
            output = self._drawn(self._draws, runs, step, step.sampling)
        else:
            logits = self._logits(runs, len(step.rows), keep=step.wants_logits)
            if step.sampling is None:
                output = StepOutput(tokens=None, outputs=as_outputs(logits if step.wants_logits else None))
            else:
                output = self._sampler.sample(logits, step.sampling, return_logits=step.wants_logits)
        if len(owners := owners_of_bad_rows(step, logits, output.tokens)):
            self._slots.forget(slot_of[owners])  # in the caches, these numbers would spread to who gets the slot next
        return output

    def _drawn(self, draws: Draws, runs: Sequence[SlotRun], step: StepInput, sampling: SamplingBatch) -> StepOutput:
        """A step's output, with tokens drawn where the logits are."""
        rows, logits = len(step.rows), None
        with_logits, tokens = step.wants_logits or sampling.logprobs is not None, np.empty(rows, np.int32)
        for run in runs:
            tokens[run.order], run_logits = draws.draw(run, sampling, logits=with_logits)
            if run_logits is not None:
                logits = np.empty((rows, run_logits.shape[1]), np.float32) if logits is None else logits
                logits[run.order] = run_logits
        return self._sampler.of_drawn(tokens, logits, sampling, return_logits=step.wants_logits)

    def _logits(self, runs: Sequence[SlotRun], rows: int, *, keep: bool) -> FloatArray:
        """Logits of the step's rows: [R, V]. Unless they are to be kept, valid until the next step."""
        if not runs:
            raise RequestError("step: it has no tokens", hint="Give it one at least.")
        if len(runs) == 1:  # it has all rows, in their order
            run_logits = self._slots.run(runs[0])
            return run_logits.copy() if keep else run_logits
        logits: FloatArray | None = None
        for run in runs:
            run_logits = self._slots.run(run)
            if logits is None:
                logits = np.empty((rows, run_logits.shape[1]), np.float32)
            logits[run.order] = run_logits
        assert logits is not None
        return logits
