"""The requests of a scheduler: running ones, waiting ones, and those whose step is in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from enginewright.runtime.requests.request import Request

from ..kv_cache.cache_manager import CacheManager
from ..shared.counters import Counters
from .base import Chunk
from .branching import together
from .drafts import NoDrafts
from .policy import Policy
from .waiting import WaitingQueue


class RequestQueues:
    """Moves requests between running and waiting, and frees the blocks and drafts of a request that stops running.

    Args:
        policy: the order of the waiting requests.
        cache: the blocks of the running requests.
        drafts: the drafts of the running requests.

    Attributes:
        running: requests with blocks, oldest first. The newest ones are preempted, so a loop over the list that
            preempts requests doesn't come to them.
        waiting: requests without blocks; the first is the next to run.
        in_flight: request -> the number of its steps that were scheduled and aren't committed yet.
        ahead: requests in flight that the step being made may have nevertheless (``chaining``).
        leaving: ended requests in flight. They keep their blocks until the step that writes to them is over.
        preempted: True if a request was preempted in the step being made, so that no request begins in it.
    """

    def __init__(self, policy: Policy, cache: CacheManager, drafts: NoDrafts, counters: Counters) -> None:
        self.policy, self.cache, self.drafts, self._counters = policy, cache, drafts, counters
        self.running: list[Request] = []
        self.waiting: deque[Request] | WaitingQueue = policy.waiting
        self.in_flight = Counter[Request]()
        self.ahead: set[Request] = set()
        self.leaving: set[Request] = set()
        self.preempted = False

    # Look at the running requests

    def is_first(self, request: Request) -> bool:
        """Returns True for the oldest running request and for all sequences of its beam search."""
        first = self.running[0]
        return request is first or (request.search is not None and request.search is first.search)

    def newest(self) -> list[Request]:
        """Returns the newest running request that isn't in flight, with all running sequences of its beam search.

        Returns [] if there is none. It also returns [] at a newer request in flight that the next step could have: that
        request is left out of the next step, and can be preempted after that.
        """
        for request in reversed(self.running):
            if request in self.ahead:
                self.ahead.remove(request)
                return []
            if not self.in_flight or not any(one in self.in_flight for one in together(request)):
                return [request] if request.search is None else [r for r in self.running if r.search is request.search]
        return []

    def is_in_flight(self, request: Request) -> bool:
        """Returns True if a step in flight has the request, or another sequence of its beam search, and the next step
        can't have it.
        """
        return any(one in self.in_flight and one not in self.ahead for one in together(request))

    def still_running(self, chunks: list[Chunk]) -> list[Chunk]:
        """Returns the chunks without those of preempted requests, such as older sequences of a beam search."""
        if not self.preempted:
            return chunks
        running = set(self.running)
        return [chunk for chunk in chunks if chunk.request in running]

    # Change them

    def preempt(self, requests: Sequence[Request]) -> None:
        """Moves running requests back to the waiting ones, and frees their blocks."""
        if not requests:
            return
        for request in reversed(requests):
            self.running.remove(request)
            self.release(request)
            self.waiting.appendleft(request)
            if request.search is not None:
                request.search.forget()
        self._counters.count("num_preemptions")
        self.preempted = True

    def gather_first_search(self) -> None:
        """Moves all sequences of the first waiting beam search to the front, before other searches."""
        if self.waiting:
            sequences = [one for one in together(self.waiting[0]) if one in self.waiting]
            for request in reversed(sequences):
                self.waiting.remove(request)
                self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Removes a request that ends, and frees its blocks and drafts."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
                break
        self.release(request)
        self.policy.ended(request)

    def release(self, request: Request) -> None:
        """Frees the blocks and drafts of a request at once, or after its step in flight."""
        if request in self.in_flight:  # what the next owner of its blocks reads from the disk would be written over
            self.leaving.add(request)
            self.cache.doubt(request)  # nobody looks at what the step gives
            return
        self.cache.release(request)
        self.drafts.release(request)

    def step_over(self, requests: Iterable[Request]) -> None:
        """Notes that the step in flight of these requests has run, or has failed."""
        for request in requests:
            self.in_flight[request] -= 1
            if self.in_flight[request] <= 0:
                del self.in_flight[request]
                if request in self.leaving:
                    self.leaving.remove(request)
                    self.release(request)
