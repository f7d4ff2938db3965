"""Steps that run several times before the host sees their tokens: Python between two steps takes a while from a small
model, because the step's weights have replaced Python's data in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from enginewright.runtime.requests.request import Generation

from ..shared.contracts import ExecutorCaps
from .base import Chunk
from .chaining import goes_on
from .limits import SchedulerConfig
from .request_queues import RequestQueues


class SeveralRuns:
    """Decides how often a step runs.

    A step runs several times only if nothing waits, all running requests decode, and their next tokens depend on the
    host for nothing but the tokens themselves. A request that ends in a run ignores the tokens of the runs after it.

    Args:
        queues: the requests, with their blocks and drafts.
        config: the limits of a step.
        caps: the executor's capabilities.
        outputs: names of the outputs that the host needs from every step.
    """

    def __init__(
        self, queues: RequestQueues, config: SchedulerConfig, caps: ExecutorCaps, outputs: Sequence[str]
    ) -> None:
        self._queues, self._budget = queues, config.runs_seconds
        self._most = 1 if outputs or caps.in_flight > 1 or not config.runs_seconds else caps.most_runs
        self._rows, self._seconds = 0, math.inf  # the rows of the last step, and the seconds of one of its runs

    def took(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Learns from a step with these chunks. ``seconds``: the time of one of its runs."""
        self._rows, self._seconds = len(chunks), max(seconds, 1e-6)

    def count(self, decodes: Sequence[Chunk], prefills: Sequence[Chunk]) -> int:
        """Returns the number of runs for a step with these chunks, and allocates the blocks for the tokens of all
        runs.
        """
        queues = self._queues
        if self._most == 1 or prefills or queues.waiting or not self._rows == len(decodes) == len(queues.running):
            return 1
        most = min(self._most, int(self._budget / self._seconds))
        if most > 1:
            most = min([most, *map(_tokens_left, decodes)])
        for chunk in decodes if most > 1 else ():
            request = chunk.request
            known = len(request.tokens)
            if request.capacity < known + most - 1 and not queues.cache.grow(request, known + most - 1):
                most = request.capacity - known + 1
        return queues.drafts.skip(most) if most > 1 else 1


def until(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Returns the tokens that end at least one of the requests of these chunks."""
    requests = [chunk.request for chunk in chunks]
    return tuple(frozenset[int]().union(*(one.end_tokens for one in requests if isinstance(one, Generation))))


def _tokens_left(chunk: Chunk) -> int:
    """Returns the number of tokens that the chunk's request can draw in a row without the host."""
    request = chunk.request
    if chunk.count > 1 or not goes_on(chunk) or not isinstance(request, Generation):
        return 1
    if request.params.logprobs is not None or (request.rules is not None and request.rules.changing):
        return 1
    return request.max_tokens - request.output_length
