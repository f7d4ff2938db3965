"""Admission: waiting requests begin to run when there are blocks and places for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from enginewright.runtime.requests.request import FailedRequestError, Request

from ..kv_cache.candidate import Candidate
from ..shared.contracts import ExecutorCaps
from .base import Chunk
from .branching import places_taken, sequences_to_come
from .limits import SchedulerConfig
from .request_queues import RequestQueues


class Admission:
    """Begins the first waiting requests, each with its cached prefix.

    Args:
        queues: the running and the waiting requests, with their policy and blocks.
        config: limits of a step.
        caps: the executor's capabilities.
        clock: seconds.
    """

    def __init__(
        self, queues: RequestQueues, config: SchedulerConfig, caps: ExecutorCaps, clock: Callable[[], float]
    ) -> None:
        self._queues, self._config = queues, config
        self._most_running, self._divided, self._clock = config.most_running(caps), caps.owners > 1, clock
        self._refused: tuple[Request, int] | None = None  # the request without blocks, and ``cache.changes`` then

    def make_way(self) -> None:
        """Preempts the newest running request if the first waiting one has a higher priority and needs its blocks or
        place."""
        queues, cache = self._queues, self._queues.cache
        if queues.policy.begin_step(queues.running):
            first = queues.waiting[0]
            needed = self._with_branches(first, cache.lacking(first, len(first.tokens)))
            full = any(pool.available(first.tenant) < needed[name] for name, pool in cache.pools.items())
            if full or not self._fits(first):
                queues.preempt(queues.newest())
        queues.preempted = False

    def chunks(self, tokens_left: int) -> list[Chunk]:
        """Makes the first chunks of waiting requests: at most ``tokens_left`` tokens in all.

        A request begins only if there are blocks for all of its tokens so far. A sequence of a beam search also needs
        places for all the search's other sequences, and blocks of the kinds of which each sequence has a fixed number.
        A request that is computed whole waits for a step that has room for all of it.
        """
        queues = self._queues
        if not queues.waiting or (queues.running and self._refused == (queues.waiting[0], queues.cache.changes)):
            return []
        chunks: list[Chunk] = []
        promised = dict.fromkeys(queues.cache.pools, 0)  # blocks that running prefills will still take
        for request in queues.running:
            self._promise(request, promised)
        while tokens_left > 0 and queues.waiting and self._has_place(queues.waiting[0]):
            request = queues.waiting[0]
            if not self._config.chunk_tokens(request, tokens_left):
                break
            try:
                chunk = self._first_chunk(request, tokens_left, promised)
            except Exception as e:
                raise FailedRequestError(request) from e
            if chunk is None:
                self._refused = request, queues.cache.changes
                break
            chunks.append(chunk)
            tokens_left -= chunk.count
            self._promise(request, promised)
        return chunks

    def _has_place(self, request: Request) -> bool:
        """Returns True if the first waiting request, ``request``, may run together with the running ones."""
        running = self._queues.running
        # The policy may leave a search waiting, but never a part of it: its sequences wait for each other.
        begun = request.search is not None and any(one.search is request.search for one in running)
        return self._fits(request) and (begun or places_taken(running) < self._queues.policy.most_running(running))

    def _fits(self, request: Request) -> bool:
        """Returns True if ``request`` and all later sequences of the beam searches are within the limit of running
        requests.
        """
        return places_taken([*self._queues.running, request]) <= self._most_running

    def _with_branches(self, request: Request, blocks: Mapping[str, int]) -> dict[str, int]:
        """Returns ``blocks`` plus the blocks that all later sequences of the beam searches will take, whatever tokens
        they have.

        Args:
            request: a waiting request, whose search is counted too.
            blocks: cache group -> number of blocks.
        """
        queues = self._queues
        to_come = sequences_to_come([*queues.running, request])
        if not to_come:
            return dict(blocks)
        more = queues.cache.fixed_blocks(to_come)
        return {name: count + more[name] for name, count in blocks.items()}

    def _first_chunk(self, request: Request, tokens_left: int, promised: Mapping[str, int]) -> Chunk | None:
        """Begins the first waiting request, and makes its first chunk; returns None if there are no blocks for it."""
        queues, cache = self._queues, self._queues.cache
        first = not queues.running or queues.is_first(request)
        promised = self._with_branches(request, promised)
        if not cache.begin(Candidate(request, queues.running, promised, force=first, in_flight=queues.in_flight)):
            return None
        queues.running.insert(queues.policy.place(request, queues.running), queues.waiting.popleft())
        request.started = request.started or self._clock()
        chunk = Chunk(request, request.computed, self._config.chunk_tokens(request, tokens_left))
        grown = cache.grow(request, request.computed + chunk.count, force=first)
        assert grown or self._divided, "there are blocks for all of its tokens"
        if not grown:  # what came from a disk lies so that no owner has the rest of a split
            queues.preempt([request])
            return None
        return chunk

    def _promise(self, request: Request, promised: dict[str, int]) -> None:
        """Adds to ``promised`` the blocks that a request still needs to compute its tokens so far."""
        for name, needed in self._queues.cache.lacking(request, len(request.tokens)).items():
            promised[name] += needed
