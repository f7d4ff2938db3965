"""The phase of a step that computes prompts: of running requests, then of waiting ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from enginewright.runtime.requests.request import FailedRequestError, Request

from ..shared.contracts import ExecutorCaps
from .admission import Admission
from .base import Chunk
from .limits import SchedulerConfig
from .request_queues import RequestQueues


class PrefillPhase:
    """Makes the chunks of requests that lack several tokens, up to a budget of tokens.

    Args:
        queues: the running and the waiting requests, with their policy and blocks.
        admission: begins the waiting ones.
        config: limits of a step.
        caps: the executor's capabilities.

    Attributes:
        decoded_last: True if the last step had decodes. Without ``caps.ragged`` steps of decodes and of prompts
            alternate.
    """

    def __init__(
        self, queues: RequestQueues, admission: Admission, config: SchedulerConfig, caps: ExecutorCaps
    ) -> None:
        self._queues, self._admission, self._config, self._caps = queues, admission, config, caps
        self.decoded_last = False

    def chunks(self, decodes: Sequence[Chunk]) -> list[Chunk]:
        """Makes the chunks of prompts for a step with ``decodes``, in the order in which requests get tokens of the
        budget.

        The order is: a waiting request that precedes the running ones, the running ones, then other waiting ones. If a
        request was preempted in the step, no request begins in it.
        """
        queues, ragged = self._queues, self._caps.ragged
        if not queues.waiting and len(decodes) == len(queues.running):  # as in most steps
            return []
        if not ragged and decodes and not self.decoded_last:
            return []
        budget = self._budget(decodes)
        chunks: list[Chunk] = []
        if ragged and queues.policy.comes_first(queues.running) and not queues.preempted:
            chunks = self._admission.chunks(budget)
        chunks += self._running_chunks([*decodes, *chunks], budget - _tokens(chunks))
        if not queues.preempted:
            chunks += self._admission.chunks(budget - _tokens(chunks))
        return chunks

    def chunks_of_first_search(self) -> list[Chunk]:
        """Makes the first chunks of the oldest beam search, if no request can advance otherwise.

        Pending snapshots may hold the last blocks; they are cancelled first. Otherwise beam searches hold all blocks
        while each waits for one of its own sequences. Then all running requests are preempted, because the oldest
        search fits alone.
        """
        queues, budget = self._queues, self._budget([])
        if queues.cache.cancel_snapshots() and (chunks := self._admission.chunks(budget)):
            return chunks
        queues.preempt(list(queues.running))
        queues.gather_first_search()
        return self._admission.chunks(budget)

    def _budget(self, decodes: Sequence[Chunk]) -> int:
        """Returns the most tokens of prompts in a step with ``decodes``.

        If the next request is computed whole, the budget is at least its tokens.
        """
        queues, room = self._queues, self._caps.max_tokens - _tokens(decodes)
        most = queues.policy.prompt_tokens(decodes, min(self._config.prefill_tokens, room))
        begun = (request for request in queues.running if request.whole and request not in queues.in_flight)
        first = next(begun, queues.waiting[0] if queues.waiting else None)
        return max(most, min(first.remaining, room)) if first is not None and first.whole else most

    def _running_chunks(self, others: Sequence[Chunk], tokens_left: int) -> list[Chunk]:
        """Makes the chunks of running requests that lack several tokens: at most ``tokens_left`` tokens in all.

        ``others``: the step's other chunks, whose requests aren't preempted. A request that decodes and isn't
        among them is paused, or belongs to another step in flight.
        """
        queues = self._queues
        if len(others) == len(queues.running):
            return []
        excluded = {id(chunk.request) for chunk in others}
        chunks: list[Chunk] = []
        for request in queues.running:
            if id(request) in excluded or tokens_left < 1 or request.decodes:
                continue
            if queues.in_flight and queues.is_in_flight(request):
                continue
            try:
                count = self._fitting(request, self._config.chunk_tokens(request, tokens_left), excluded)
            except Exception as e:
                raise FailedRequestError(request) from e
            if count:
                chunks.append(Chunk(request, request.computed, count))
                tokens_left -= count
        return queues.still_running(chunks)

    def _fitting(self, request: Request, count: int, excluded: Collection[int]) -> int:
        """Returns the number of a request's next ``count`` tokens that get blocks.

        Newer requests are preempted for these tokens, except those whose id is in ``excluded``.
        """
        queues, oldest = self._queues, self._queues.is_first(request)
        while not queues.cache.grow(request, request.computed + count, force=oldest):
            newest = queues.newest()
            if not newest or any(one is request or id(one) in excluded for one in newest):
                count = queues.cache.fitting(request, count, force=oldest)
            else:
                queues.preempt(newest)
        return count


def _tokens(chunks: Sequence[Chunk]) -> int:
    return sum([chunk.count for chunk in chunks]) if chunks else 0
