"""Policies: the order of requests, the share of a step for prompts, preemption by priority, and admission.

``Policy`` is first come, first served. ``RankedPolicy`` orders requests by rank: (priority, deadline of the first
token, arrival). The request with the lowest rank goes first, and the running request with the highest is preempted. A
rank never changes while a request runs, so that two requests don't preempt each other again and again.

1. A missed deadline is replaced by a later one: twice the time after the request's arrival, then four times, and so on.
   So a late request doesn't wait forever after requests that can still be in time, and doesn't make them late.
2. Prompts get the time of a step that the decoding requests' time per token leaves (``step_times``).
3. Requests without a time per token pause if a step with them would be too long for the requests that have one.
4. Admission: a request whose targets can't be met is refused when it arrives, with the time after which they could be
   met.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path

from enginewright.runtime.requests.request import Request

from ..shared.counters import Counters
from ..shared.errors import EnginewrightError, OverloadError, RequestError
from .base import Chunk
from .helpers import helper
from .options import Scheduling, parse_seconds
from .step_times import StepSize, StepTimes
from .waiting import Shares, WaitingQueue

DECODE_SHARE = 0.8
"""The share of a class's target time per token that a step without prompts may take. The rest is left for prompts."""
MARGIN = 0.95
"""The share of a class's target time per token that a step with prompts is planned to take, because times vary."""
LEAST_PROMPT = 16
"""The least number of prompt tokens that every step has room for, so that requests before their first token advance."""
_MEASURED_PROMPTS = 8
"""Steps with prompts to measure before a request is refused because its targets can't be met."""
_PROBE = 16
"""One in this many requests that would miss their targets even alone is served all the same; the others are refused.

It is served to measure if the machine has become faster.
"""
_DECODES_A_SAMPLE = 16
"""One in this many steps without prompts is measured, because they are many and similar."""
_RANK = attrgetter("rank")


class Policy:
    """First come, first served. Other policies derive from this.

    Args:
        most_running: most requests that run at a time.

    Attributes:
        waiting: the waiting requests; the first is the next to run.
        paused: running requests that get no token in this step.
    """

    paused: frozenset[Request] = frozenset()

    def __init__(self, most_running: int) -> None:
        self.waiting: deque[Request] | WaitingQueue = deque()
        self._most_running = most_running

    def arrives(self, request: Request, running: Sequence[Request]) -> None:
        """Sets the rank of a request that arrives. Raises OverloadError or RequestError if it is refused."""

    def place(self, request: Request, running: Sequence[Request]) -> int:
        """Returns the position of a request that begins to run among the running ones."""
        return len(running)

    def ended(self, request: Request) -> None:
        """Notes that a request has ended, or is about to end."""

    def after_step(self, chunks: Sequence[Chunk], tokens: int, seconds: float) -> None:
        """Learns from a step.

        Args:
            chunks: the chunks of the step.
            tokens: the number of its tokens.
            seconds: the time that it took.
        """

    def describe(self) -> dict[str, float] | None:
        """Returns counts of requests, and estimated times of steps in microseconds, for ``LLM.info``."""
        return None

    def begin_step(self, running: Sequence[Request]) -> bool:
        """Decides, before a step, which waiting request comes first, and sets ``paused``.

        Returns True if the last running request must be preempted for the first waiting one. ``running``: the running
        requests.
        """
        return False

    def comes_first(self, running: Sequence[Request]) -> bool:
        """Returns True if the first waiting request precedes a running one whose prompt isn't computed yet."""
        return False

    def most_running(self, running: Sequence[Request]) -> int:
        """Returns the most requests that may run together with the first waiting one."""
        return self._most_running

    def prompt_tokens(self, decodes: Sequence[Chunk], most: int) -> int:
        """Returns the prompt tokens, at most ``most``, that a step with these decodes may have."""
        return most


class RankedPolicy(Policy):
    """Orders requests by rank; see the module.

    Args:
        scheduling: the options of scheduling.
        times: estimates of the time of steps, updated by this scheduler's steps.
        most_running: maximum requests that run at a time.
        most_prompt: maximum prompt tokens of a step.
        clock: the clock of the requests' times, in seconds.
        found: returns the number of a request's tokens that are in the prefix cache.
        counters: counts the errors of the tenants' shares.
    """

    waiting: WaitingQueue

    def __init__(
        self,
        scheduling: Scheduling,
        times: StepTimes,
        most_running: int,
        most_prompt: int,
        clock: Callable[[], float],
        found: Callable[[Request], int],
        counters: Counters,
    ) -> None:
        super().__init__(most_running)
        self.scheduling = scheduling
        self.times = times
        if scheduling.plan is not None:
            times.begin_with(Path(scheduling.plan))
        self.shares: Shares | None = None
        if scheduling.fair or scheduling.shares:
            self.shares = helper("shares", Shares(scheduling.shares), counters)
        self.waiting = WaitingQueue(self.shares)
        self.refused = 0
        self._patience = parse_seconds(scheduling.patience, "scheduling: patience")
        self._most_prompt, self._clock, self._found = most_prompt, clock, found
        self._arrived = self._ended = self._decodes = self._prompts = self._denied = 0
        self._mean_output = 0.0  # new tokens of those that have ended
        self._seen_running = 0, -1  # when ``paused`` was chosen: that many, and the last number

    # Who comes, begins and ends

    def arrives(self, request: Request, running: Sequence[Request]) -> None:
        self._arrived += 1
        ttft = request.request_class.ttft
        deadline = request.queued + (self._patience if ttft is None else ttft)
        request.rank = (request.priority, deadline, self._arrived)
        try:
            self._check_room(running)
            if self.scheduling.refuse and self.times.known:
                self._check_alone(request)
                if ttft is not None:
                    self._check_first_token(request, ttft, running)
        except EnginewrightError:
            self.refused += 1
            raise

    def place(self, request: Request, running: Sequence[Request]) -> int:
        self._seen_running = 0, -1
        if self.shares is not None:
            self.shares.begins(request)
        return bisect_right(running, request.rank, key=_RANK)

    def ended(self, request: Request) -> None:
        if request.finish_reason in ("stop", "length"):
            self._ended += 1
            self._mean_output += (request.output_length - self._mean_output) / min(self._ended, 32)
        if self.shares is not None:
            self.shares.ends(request, self.times.row_tokens)

    def after_step(self, chunks: Sequence[Chunk], tokens: int, seconds: float) -> None:
        if tokens == len(chunks):
            self._decodes += 1
            if self._decodes % _DECODES_A_SAMPLE and self.times.known:
                return
        else:
            self._prompts += 1
        self.times.observe(StepSize.from_chunks(chunks), seconds)

    def describe(self) -> dict[str, float]:
        return {"waiting": len(self.waiting), "refused": self.refused} | self.times.describe()

    # What a step holds

    def begin_step(self, running: Sequence[Request]) -> bool:
        if self.waiting:
            if self.shares is not None:
                self.shares.count(running, self.times.row_tokens)
                self.waiting.look_again()
            self._renew_deadlines()
        if self._seen_running != (seen := (len(running), self._decodes >> 5)):
            self._seen_running = seen
            self.paused = self._pausing(running)
        return bool(self.waiting and running) and self.waiting[0].rank[0] < running[-1].rank[0]

    def comes_first(self, running: Sequence[Request]) -> bool:
        rank = self.waiting[0].rank if self.waiting else ()
        return bool(rank) and any(r.rank > rank and r.remaining > 1 for r in running)

    def most_running(self, running: Sequence[Request]) -> int:
        """Returns the maximum number of running requests with which all targets of time per token are met."""
        first = self.waiting[0]
        tpots = [tpot for r in running if (tpot := r.request_class.tpot) is not None]
        first_tpot = first.request_class.tpot
        if not self.times.known or (first_tpot is None and not tpots):
            return self._most_running
        context = _mean([*(r.computed for r in running), len(first.tokens)])
        most = self.times.rows_within(DECODE_SHARE * min([*tpots, first_tpot or math.inf]), context)
        if first_tpot is not None:  # the others pause
            most += len(running) - len(tpots)
        return min(most, self._most_running)

    def prompt_tokens(self, decodes: Sequence[Chunk], most: int) -> int:
        if not self.times.known:
            return most
        now, rows, context = self._clock(), len(decodes), sum(c.start for c in decodes)
        alone = self.times.seconds(StepSize(rows, 0, context))
        left = math.inf
        for chunk in decodes:
            request = chunk.request
            tpot, times = request.request_class.tpot, request.token_times
            if tpot is None or times is None:
                continue
            until = times[0] + MARGIN * tpot * request.output_length - now
            behind = alone - until
            if behind > 0 and behind > (request.max_tokens - request.output_length) * (tpot - alone):
                continue  # it won't be met whatever the others do
            left = min(left, until)
        if left == math.inf:
            return most
        return min(most, max(int(min(self.times.prompt_within(left, rows, context), most)), LEAST_PROMPT))

    def _pausing(self, running: Sequence[Request]) -> frozenset[Request]:
        tpots = [tpot for r in running if (tpot := r.request_class.tpot) is not None]
        if not tpots or len(tpots) == len(running) or not self.times.known:
            return frozenset()
        most = self.times.rows_within(DECODE_SHARE * min(tpots), _mean([r.computed for r in running]))
        # Not the first, which always advances; and the sequences of a beam search wait for each other.
        others = [r for r in running[1:] if r.request_class.tpot is None and r.search is None]
        return frozenset(others[max(0, len(others) - max(0, len(running) - most)) :])

    def _renew_deadlines(self) -> None:
        now = self._clock()
        for _ in range(len(self.waiting)):
            first = self.waiting[0]
            ttft = first.request_class.ttft
            if ttft is None or first.started is not None or first.output_length:
                return
            ready = now + self._alone(first, first.remaining)
            if ready <= first.rank[1]:
                return
            times = 2.0 ** max(1, math.ceil(math.log2((ready - first.queued) / ttft)))
            rank = (first.rank[0], max(first.queued + ttft * times, ready), first.rank[2])
            self.waiting.remove(first)  # nothing raises from here on: it would be lost
            first.rank = rank
            self.waiting.append(first)

    # Who is refused

    def _check_room(self, running: Sequence[Request]) -> None:
        most = self.scheduling.max_waiting
        if most is None or len(self.waiting) < most + max(self._most_running - len(running), 0):
            return
        raise OverloadError(
            f"max_waiting: {len(self.waiting)} requests wait already",
            retry_after=max(self._slot_seconds(self._most_running, running), 0.001),
        )

    def _check_alone(self, request: Request) -> None:
        """Raises RequestError if a request's targets couldn't be met even if it ran alone; one of ``_PROBE`` passes."""
        of = request.request_class
        if self._prompts < _MEASURED_PROMPTS or (of.tpot is None and of.ttft is None):
            return
        token = self.times.seconds(StepSize(1, 0, len(request.tokens) + request.max_tokens / 2))
        option, target, needed = "tpot", of.tpot, token
        if of.tpot is None or token <= of.tpot:
            option, target = "ttft", of.ttft
            needed = 0.0 if target is None else self._alone(request, self._lacking(request))
        if target is None or needed <= target:
            return
        self._denied += 1
        if self._denied % _PROBE:
            raise RequestError(
                f"request_class: {of.name!r} has a {option} of {target * 1e3:.4g} ms, and this request would take "
                f"about {needed * 1e3:.4g} ms even alone",
                hint="Name a class with a longer one, or shorten the prompt.",
            )

    def _check_first_token(self, request: Request, ttft: float, running: Sequence[Request]) -> None:
        """Raises OverloadError if a request's first token would be late, or make another request's first token late."""
        now, lacking = self._clock(), self._lacking(request)
        tokens = sum(r.remaining - 1 for r in running if r.remaining > 1 and r.rank <= request.rank)
        ahead, placed = 0, False
        needed = self._waits(request, running)
        for other in self.waiting.by_rank():
            if not placed and other.rank > request.rank:
                placed = True
                self._promise(needed(tokens + lacking, ahead) - ttft, ttft)
                tokens, ahead = tokens + lacking, ahead + 1
            tokens, ahead = tokens + other.remaining, ahead + 1
            if not placed or other.rank[0] > request.rank[0] or other.request_class.ttft is None:
                continue
            left = other.rank[1] - now
            if needed(tokens, ahead - 1) > left >= needed(tokens - lacking, ahead - 2):
                self._promise(needed(tokens, ahead - 1) - left, ttft, "that of a request which waits")
        if not placed:
            self._promise(needed(tokens + lacking, ahead) - ttft, ttft)

    @staticmethod
    def _promise(late: float, ttft: float, whose: str = "its first token") -> None:
        if late > 0:
            raise OverloadError(
                f"request_class: with a ttft of {ttft:.4g} s, {whose} would come {late:.2g} s late",
                retry_after=max(late, 0.001),
            )

    def _waits(self, request: Request, running: Sequence[Request]) -> Callable[[float, int], float]:
        """Returns a function (tokens, ahead) that estimates the seconds until the first token of a request.

        ``tokens`` is the number of prompt tokens to compute before it, ``ahead`` the number of requests that begin
        earlier.
        """
        tpots = [tpot for r in (*running, request) if (tpot := r.request_class.tpot) is not None]
        rows = min(len(running) + 1, self._most_running)
        context = rows * _mean([r.computed for r in running] or [len(request.tokens)])
        most: float = self._most_prompt
        slots = self._most_running
        if tpots:
            most = max(LEAST_PROMPT, min(most, self.times.prompt_within(min(tpots), rows, context)))
            slots = min(slots, self.times.rows_within(DECODE_SHARE * min(tpots), context / rows))
        each = self.times.seconds(StepSize(rows, most, context, most * len(request.tokens) / 2)) / most
        step = self.times.seconds(StepSize(rows, 0, context))
        slot, free = self._slot_seconds(slots, running), slots - len(running)
        return lambda tokens, ahead: step + max(tokens * each, max(0, ahead + 1 - free) * slot)

    def _slot_seconds(self, slots: int, running: Sequence[Request]) -> float:
        """Returns the mean seconds from the end of one request to the end of the next, while ``slots`` requests run."""
        step = self.times.seconds(StepSize(slots, 0, slots * _mean([r.computed for r in running])))
        return self._mean_output * step / slots

    def _lacking(self, request: Request) -> int:
        return request.remaining - self._found(request)

    def _alone(self, request: Request, tokens: int) -> float:
        """Returns the seconds to compute the last ``tokens`` tokens of a request's prompt if it runs alone."""
        seen = len(request.tokens) - tokens / 2
        return self.times.seconds(StepSize(0, tokens, 0, tokens * seen, -(-tokens // self._most_prompt)))


def _mean(values: Iterable[float]) -> float:
    of = list(values)
    return sum(of) / len(of) if of else 0.0
