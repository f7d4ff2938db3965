"""The sampler alone, for targets whose programs end with logits: the tokens that the cpu target draws from these."""

from __future__ import annotations

import numpy as np

from enginewright.plugins.shared.contracts import FloatArray, SamplingBatch, StepOutput
from enginewright.plugins.shared.errors import CapacityError, RequestError

from .executable import logprobs_wanted
from .extension import cpu_extension as _cpu


class RowSampler:
    """The sampler with threads of its own, which sleep between calls. They change no result; calls run one at a time.

    Raises CapacityError if the system refuses to start the threads.
    """

    def __init__(self, threads: int = 1) -> None:
        try:
            self._sampler = _cpu.RowSampler(threads)
        except RuntimeError as e:
            raise CapacityError(f"{threads} threads could not be started: {e}", hint="Use fewer threads.") from e

    def sample(self, logits: FloatArray, sampling: SamplingBatch, *, return_logits: bool = False) -> StepOutput:
        """Draws a token from each row of logits [R, V] float32, and gives the logprobs that ``sampling`` wants.

        A row with a logit that is NaN or +infinity gets ``NO_TOKEN``; the others are as they would be without it.

        Args:
            return_logits: put the logits into the output as well.

        Raises:
            RequestError: a value of ``sampling`` is out of range, or there is not one for each row.
        """
        rows = np.ascontiguousarray(logits, np.float32)
        try:
            found = self._sampler.sample(rows, sampling.options(), logprobs_wanted(sampling))
        except ValueError as e:
            raise RequestError(f"step: {e}") from e
        return StepOutput(logits=rows if return_logits else None, **found)
