"""The sampler alone, for targets whose programs end with logits: the tokens that the cpu target draws from these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..contracts import FloatArray, SamplingBatch, StepOutput
from ..errors import EnginewrightError, RequestError
from .executable import _sampling_arrays
from .extension import cpu_extension as _cpu

_ROWS_OF_A_THREAD = 4
"""Threads are started for a call, which pays from some rows on."""


def sample(logits: FloatArray, sampling: SamplingBatch, *, threads: int = 1, return_logits: bool = False) -> StepOutput:
    """Draws a token from each row of logits [R, V] float32, and gives the logprobs that ``sampling`` wants.

    Args:
        threads: at most; they change no result.
        return_logits: put the logits into the output as well.

    Raises:
        RequestError: a value of ``sampling`` is out of range, or there is not one for each row.
        EnginewrightError: a row has a logit that is NaN or infinite.
    """
    rows = np.ascontiguousarray(logits, np.float32)
    try:
        found = _cpu.sample(
            rows, _sampling_arrays(sampling), sampling.logprobs, max(1, min(threads, len(rows) // _ROWS_OF_A_THREAD))
        )
    except ValueError as e:
        raise RequestError(f"step: {e}") from e
    except RuntimeError as e:
        raise EnginewrightError(f"step: {e}", hint="The weights are damaged, or numbers overflow.") from e
    return replace(StepOutput(tokens=None, logits=rows if return_logits else None), **found)
