"""The phase of a step that takes the last token of each request that decodes."""

from __future__ import annotations

from enginewright.runtime.requests.request import FailedRequestError, Request

from .base import Chunk
from .request_queues import RequestQueues


class DecodePhase:
    """Makes the chunks of the running requests that decode: each request's last token, with a draft after it.

    Args:
        queues: the running requests, with their blocks and drafts.
        steps_in_flight: maximum number of the executor's steps in flight; each step has its share of the requests.
    """

    def __init__(self, queues: RequestQueues, steps_in_flight: int) -> None:
        self._queues, self._steps_in_flight = queues, steps_in_flight

    def chunks(self, *, alone: bool) -> list[Chunk]:
        """Makes the chunks, oldest request first. If no blocks are left, the newest request is preempted.

        ``alone``: True if no other step is in flight, so that drafts are possible.
        """
        queues, paused = self._queues, self._queues.policy.paused
        drafting = alone and queues.drafts.begin(queues.running, paused)
        most = -(-len(queues.running) // self._steps_in_flight)
        chunks: list[Chunk] = []
        for request in queues.running:
            if paused and request in paused:
                continue
            if queues.in_flight and len(queues.in_flight) > len(queues.ahead) and queues.is_in_flight(request):
                continue
            if len(chunks) >= most and (request.search is None or chunks[-1].request.search is not request.search):
                break
            try:
                if request.decodes and (request.capacity >= len(request.tokens) or self._make_room(request)):
                    plain = Chunk(request, request.computed, request.remaining)
                    chunks.append(self._with_draft(plain) if drafting else plain)
            except Exception as e:
                raise FailedRequestError(request) from e
        return queues.still_running(chunks)

    def _with_draft(self, plain: Chunk) -> Chunk:
        """Adds a draft to a request's chunk, if there are blocks for that."""
        request, cache = plain.request, self._queues.cache
        draft = self._queues.drafts.draft(request)
        if not draft or not (cache.grow(request, plain.known + len(draft)) and cache.before_drafts(request)):
            return plain
        return Chunk(request, plain.start, plain.count + len(draft), draft)

    def _make_room(self, request: Request) -> bool:
        """Allocates a block for the request's next token if needed.

        Returns False if ``request`` itself was preempted for it.
        """
        queues = self._queues
        while not queues.cache.grow(request, len(request.tokens), force=queues.is_first(request)):
            newest = queues.newest()
            if not newest:
                return False
            queues.preempt(newest)
            if request in newest:
                return False
        return True
