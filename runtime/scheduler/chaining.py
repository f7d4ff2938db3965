"""Steps that follow one in flight: their requests go on as if it had run, before the host knows the drawn tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from enginewright.runtime.requests.request import Generation, Request

from ..shared.contracts import Int32Array
from .base import Batch, Chunk
from .request_queues import RequestQueues

_UNKNOWN = 0
"""A placeholder for a token that a step in flight draws. The executor replaces it."""


class Chain:
    """Makes the requests of the newest step in flight available to the next step.

    A request may go on if its next token depends on no result of the step but the drawn token. If that token ends the
    request, the next step has computed one token in vain. The scheduler then ignores that one and frees its block.

    Args:
        queues: the requests.

    Attributes:
        newest: the newest step in flight; None if there is none, or if executors don't support such steps.
    """

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self.newest: Batch | None = None

    @contextmanager
    def ahead(self) -> Iterator[Mapping[Request, int]]:
        """Within the context, puts the requests of the newest step into their state after it, with a placeholder for
        the token.

        Yields request -> the row of the newest step that draws its last token.
        """
        changed: list[Chunk] = []
        rows: dict[Request, int] = {}
        row = 0
        for chunk in () if self.newest is None else self.newest.chunks:
            row += chunk.rows
            if goes_on(chunk):
                changed.append(chunk)
                chunk.request.computed += chunk.count
                if chunk.samples:
                    chunk.request.tokens.append(_UNKNOWN)
                    rows[chunk.request] = row - 1
        self._queues.ahead.update(chunk.request for chunk in changed)
        try:
            yield rows
        finally:
            self._queues.ahead.clear()
            for chunk in changed:
                chunk.request.computed -= chunk.count
                if chunk.samples:
                    chunk.request.tokens.pop()

    def over(self, batch: Batch) -> None:
        """Forgets the newest step if it is ``batch``, which has run or failed."""
        if batch is self.newest:
            self.newest = None


def sources_of(chunks: Sequence[Chunk], rows: Mapping[Request, int]) -> Int32Array:
    """Returns ``StepInput.sources`` of a step with these chunks; ``rows`` is the value of ``Chain.ahead``."""
    counts = [chunk.count for chunk in chunks]
    sources = np.full(sum(counts), -1, np.int32)
    sources[np.cumsum([0, *counts[:-1]])] = [rows.get(chunk.request, -1) for chunk in chunks]
    return sources


def goes_on(chunk: Chunk) -> bool:
    """Returns True if a request can be in the next step before the result of this chunk is known.

    The next step then needs nothing of the result but the drawn token, and the token isn't the request's last.
    """
    request = chunk.request
    if not isinstance(request, Generation) or request.finished or request.search is not None or chunk.scores:
        return False
    if chunk.draft or (request.rules is not None and request.rules.needs_tokens):
        return False
    return not chunk.samples or request.output_length + 1 < request.max_tokens
