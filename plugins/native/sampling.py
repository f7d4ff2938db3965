"""The sampler alone, for targets whose programs end with logits. It draws the same tokens as the cpu target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from enginewright.runtime.shared.contracts import (
    NO_TOKEN,
    FloatArray,
    Int32Array,
    SamplingBatch,
    StepOutput,
    as_outputs,
)
from enginewright.runtime.shared.errors import CapacityError, RequestError

from ..cpu.extension import cpu_extension as _cpu
from .executable import logprobs_wanted


class RowSampler:
    """The sampler, with threads of its own, which sleep between calls. Calls from several threads run one at a time.

    Results don't depend on the number of threads. Raises CapacityError if the system refuses to start them.
    """

    def __init__(self, threads: int = 1) -> None:
        try:
            self._sampler = _cpu.RowSampler(threads)
        except RuntimeError as e:
            raise CapacityError(f"{threads} threads could not be started: {e}", hint="Use fewer threads.") from e

    def sample(self, logits: FloatArray, sampling: SamplingBatch, *, return_logits: bool = False) -> StepOutput:
        """Draws a token from each row of logits [R, V] float32, and computes the logprobs that ``sampling`` requests.

        A row with a logit that is NaN or +infinity gets ``NO_TOKEN``; other rows aren't affected.

        Args:
            logits: the logits.
            sampling: the options of each row.
            return_logits: True adds the logits to the output.

        Raises:
            RequestError: a value of ``sampling`` is out of range, or there isn't one for each row.
        """
        rows = np.ascontiguousarray(logits, np.float32)
        try:
            samples = self._sampler.sample(rows, sampling.options(), logprobs_wanted(sampling))
        except ValueError as e:
            raise RequestError(f"step: {e}") from e
        return StepOutput(outputs=as_outputs(rows if return_logits else None), **samples)

    def of_drawn(
        self, tokens: Int32Array, logits: FloatArray | None, sampling: SamplingBatch, *, return_logits: bool
    ) -> StepOutput:
        """Returns the output of ``sample`` for tokens [R] that a GPU has drawn.

        Args:
            tokens: the tokens.
            logits: the logits [R, V] from which they were drawn; None if neither they nor logprobs are requested.
            sampling: the options of each row.
            return_logits: True adds the logits to the output.

        Raises:
            RequestError: logprobs are requested that can't be computed.
        """
        output = StepOutput(tokens=tokens, outputs=as_outputs(logits if return_logits else None))
        if sampling.logprobs is None:
            return output
        assert logits is not None
        scored = tokens if sampling.scored is None else np.where(sampling.scored == NO_TOKEN, tokens, sampling.scored)
        scores = self.sample(logits, replace(sampling, temperature=np.zeros_like(sampling.temperature), scored=scored))
        assert scores.token_logprobs is not None
        output.token_logprobs = np.where(tokens == NO_TOKEN, np.float32(np.nan), scores.token_logprobs)
        output.top_ids, output.top_logprobs = scores.top_ids, scores.top_logprobs
        return output
