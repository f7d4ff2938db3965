"""Runs steps over slots: plans the runs of a step, orders their logits, and clears slots with NaN or infinity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from enginewright.runtime.shared.contracts import (
    CacheGroup,
    FloatArray,
    Int32Array,
    StepInput,
    StepOutput,
    as_outputs,
)
from enginewright.runtime.shared.errors import RequestError

from ..native.sampling import RowSampler
from .packed_steps import owners_of_bad_rows
from .slots import SlotRun, plan_runs, slots_of


class Slots(Protocol):
    """The caches of all slots, with the model that runs over them."""

    @property
    def length(self) -> int:
        """The number of positions that a slot has now."""

    def fit(self, slot_of: Int32Array, kv_len: Int32Array) -> None:
        """Makes slots long enough for requests: ``slot_of`` [B] are their slots, ``kv_len`` [B] their tokens. Raises
        CapacityError.
        """

    def run(self, run: SlotRun) -> FloatArray:
        """Returns the logits of the tokens ``run.wanted``, [R, V]. They are valid until the next run."""

    def forget(self, slots: Int32Array) -> None:
        """Sets slots to zero, so that NaN or infinity in them doesn't affect later requests."""


class SlotSteps:
    """Runs steps over slots.

    Args:
        slots: the caches of all slots.
        groups: the executor's cache groups, with slots as their blocks.
        count: the number of slots.
        threads: the number of threads of the sampler.
        chunks_together, prompts_alone: see ``plan_runs``.
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
    ) -> None:
        self._slots = slots
        self._groups = groups
        self._count = count
        self._sampler = RowSampler(threads)
        self._how = {"chunks_together": chunks_together, "prompts_alone": prompts_alone}

    def run(self, step: StepInput) -> StepOutput:
        """Runs a step. Raises RequestError or CapacityError for a step that can't run; then no slot was written."""
        slot_of = slots_of(step, self._groups, self._count)
        self._slots.fit(slot_of, step.kv_len)
        runs = plan_runs(step, slot_of, self._slots.length, **self._how)
        logits = self._logits(runs, len(step.rows), keep=step.wants_logits)
        if step.sampling is None:
            output = StepOutput(tokens=None, outputs=as_outputs(logits if step.wants_logits else None))
        else:
            output = self._sampler.sample(logits, step.sampling, return_logits=step.wants_logits)
        if len(owners := owners_of_bad_rows(step, logits, output.tokens)):
            self._slots.forget(slot_of[owners])  # in the caches, these numbers would spread to who gets the slot next
        return output

    def _logits(self, runs: Sequence[SlotRun], rows: int, *, keep: bool) -> FloatArray:
        """Runs the model; returns the logits of the step's rows, [R, V]. They are valid until the next step, or longer
        if ``keep``.
        """
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
