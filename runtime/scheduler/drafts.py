"""Speculation: the likely next tokens of a request, its draft, are computed together with its last known token.

Logits are bit for bit the same however rows are batched, and each position has its own random number. So the token that
is drawn after a draft's token is the one that plain decoding would have drawn there, and a draft is accepted up to its
first token that differs from the drawn one. Only time depends on drafts. Keys and values of rejected tokens are after
the request's last token, where attention never reads, until they are overwritten.

A draft has the length with the most expected tokens per second (``_Step.best``). The estimate uses measurements: the
acceptance rate of proposals of its kind, the time of steps with more rows, and the time to compute a proposal. Without
an expected gain there is no draft. The time that drafts of a kind may lose is bounded (``acceptance.Credit``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from enginewright.runtime.requests.proposers import NOTHING, Proposal, ProposalKind, Proposer, TimedProposer
from enginewright.runtime.requests.request import Generation, Request

from ..shared.contracts import DRAFT_ROWS, NO_TOKEN, ExecutorCaps, StepOutput
from ..shared.counters import Counters
from ..shared.errors import RequestError
from ..shared.step_schema import LOGITS
from .acceptance import AcceptanceRates, Credit
from .base import Batch, Chunk
from .helpers import helper
from .step_outputs import logprobs_of
from .step_times import DecodeTimes

NOT_EXACT = "Use the cpu target, or export for the cuda target with exact = true in [engines] of the recipe."
"""The hint of the error for a target on which a token's bits depend on the batch."""

LEAST_GAIN = 1.05
"""The least expected speedup of a draft, as a factor of tokens per second. It allows for costs that aren't measured."""
LEAST_LEFT = 32
"""The least number of further tokens that an answer is expected to have, within ``max_tokens``.

A longer answer is expected to go on for as many tokens as it has.
"""


class NoDrafts:
    """No speculation: every request that decodes has one row. ``Drafts`` derives from this.

    Attributes:
        outputs: names of the outputs that ``learn`` needs from every step.
    """

    outputs: tuple[str, ...] = ()

    def begin(self, running: Sequence[Request], paused: Collection[Request]) -> bool:
        """Begins a step. Returns True if the step may have drafts.

        Args:
            running: the running requests.
            paused: running requests that get no token in this step.
        """
        return False

    def draft(self, request: Request) -> Sequence[int]:
        """Returns the tokens to compute after the last one of a request that decodes."""
        return ()

    def skip(self, most: int) -> int:
        """Skips the drafts of the next steps. Returns the number of steps without drafts, from 1 to ``most``.

        The first of these is the step that has just begun. The others count as begun too.
        """
        return most

    def after_step(self, batch: Batch, seconds: float) -> None:
        """Learns from the time of a step, before its drafts are verified.

        ``seconds``: the time that it took, with its scheduling.
        """

    def verify(self, chunk: Chunk, tokens: Sequence[int], output: StepOutput, first: int) -> None:
        """Gives a request the drawn tokens of its chunk, up to the first one that differs from the draft.

        Args:
            chunk: the chunk, with a draft.
            tokens: the tokens that the step drew at the chunk's rows.
            output: the output of the step.
            first: the chunk's first row in ``output``.
        """
        request, count = chunk.request, 0
        assert isinstance(request, Generation), "only these have drafts"
        for at, token in enumerate(tokens):
            if token == NO_TOKEN:
                break
            request.accept(token, logprobs_of(request, output, first + at))
            count += 1
            if request.finished or at == len(chunk.draft) or token != chunk.draft[at]:
                break
        request.computed = chunk.known - 1 + count
        request.drafted, request.accepted = request.drafted + len(chunk.draft), request.accepted + count - 1

    def learn(self, chunk: Chunk, accepted: int, output: StepOutput, first: int) -> None:
        """Learns from the results of a chunk with drawn tokens. It is called for each draft, and with ``outputs`` for
        each chunk.

        Args:
            chunk: the chunk, whose tokens its request has.
            accepted: the tokens of its draft that were accepted.
            output: the output of the step.
            first: the chunk's first row in ``output``.
        """

    def release(self, request: Request) -> None:
        """Frees the drafts' state of a request that has ended or was preempted."""

    def forget(self, tenant: str | None) -> None:
        """Forgets the texts of a tenant's requests; of all requests if ``tenant`` is None."""

    def describe(self) -> dict[str, object] | None:
        """Returns the counts of tokens for ``LLM.info``; None if nothing is ever drafted."""
        return None


class _Choice(NamedTuple):
    """A length of drafts, with what it is expected to bring.

    Attributes:
        speed: the new tokens per second of the step.
        length: the tokens of each draft.
        tokens: the new tokens of the step.
    """

    speed: float
    length: int
    tokens: float


class _Candidate(NamedTuple):
    """A request that may get a draft: its expected acceptance rate, and the most tokens of the draft."""

    rate: float
    most: int
    request: Generation


class _Step(msgspec.Struct):
    """The state of one step that may have drafts, from ``begin`` to the last ``verify``.

    Attributes:
        times: estimates of the time of a step by its rows.
        decoding: the number of running requests when the step begins.
        plain_seconds: the expected time of the step without drafts.
        rows: the rows of the step so far.
        tokens: the new tokens that are expected of these rows.
        proposed: the drafts of timed proposers.
        proposal_seconds: the expected seconds to compute these drafts.
        proposal_took: the measured seconds to compute these drafts.
        late: the seconds by which the step took longer than expected, for each drafted row.
    """

    times: DecodeTimes
    decoding: int
    plain_seconds: float
    rows: int
    tokens: float
    proposed: dict[Request, Sequence[int]] = msgspec.field(default_factory=dict)
    proposal_seconds: float = 0.0
    proposal_took: float = 0.0
    late: float = 0.0

    @property
    def room(self) -> int:
        """The number of tokens that may still be drafted in this step."""
        return DRAFT_ROWS - self.rows

    def best(self, rates: Sequence[float], most: int, credit: float, each: float = 0.0) -> _Choice:
        """Returns the best length of further drafts; 0 if drafts aren't expected to gain ``LEAST_GAIN``.

        Args:
            rates: acceptance rates of the requests that get a draft.
            most: most tokens of each draft.
            credit: seconds that the drafts may cost.
            each: seconds to propose one more token for all of the requests.
        """
        before, expected = self.times.seconds(self.rows) + self.proposal_seconds, self.tokens
        best = _Choice(LEAST_GAIN * expected / before, 0, expected)
        accepted = [1.0] * len(rates)
        for length in range(1, most + 1):
            accepted = [share * rate for share, rate in zip(accepted, rates, strict=True)]
            expected += sum(accepted)
            seconds = self.times.seconds(self.rows + len(rates) * length) + self.proposal_seconds + length * each
            if seconds - before > credit:
                break
            if expected / seconds > best.speed:
                best = _Choice(expected / seconds, length, expected)
        return best


class _History(msgspec.Struct):
    """The history of one request's drafts.

    Attributes:
        rates: the request's acceptance rates; close to those of all requests while it has had few drafts.
        found: the number of the step in which the request had its last draft, or began.
        next_look: the number of the next step in which proposers are called for it.
        kind: the kind of its last draft.
    """

    rates: AcceptanceRates
    found: int
    next_look: int
    kind: ProposalKind = NOTHING.kind


class Drafts(NoDrafts):
    """The drafts of all requests.

    Args:
        caps: the executor's capabilities.
        times: estimates of the time of a step by its rows.
        proposers: the sources of drafts.
        clock: returns the time in seconds.
        errors: counts the errors of proposers; None makes a new counter.

    Attributes:
        by_source: proposer -> the numbers of its drafted and of its accepted tokens so far.

    Raises:
        RequestError: the executor can't verify drafts, or lacks an output that a proposer needs.
    """

    def __init__(
        self,
        caps: ExecutorCaps,
        times: DecodeTimes,
        proposers: Sequence[Proposer],
        clock: Callable[[], float] = time.monotonic,
        counters: Counters | None = None,
    ) -> None:
        if not caps.verifies:
            raise RequestError(
                "speculate: this target doesn't promise a token's bits with others behind it",
                hint=NOT_EXACT,
            )
        self.times = times
        self._clock = clock
        counters = counters or Counters()
        self._guarded = helper("drafts", self, counters)
        self._timed = [helper("timed proposer", one, counters) for one in proposers if isinstance(one, TimedProposer)]
        self._free = [helper("proposer", one, counters) for one in proposers if not isinstance(one, TimedProposer)]
        self._proposers: dict[str, Proposer] = {one.name: one for one in (*self._free, *self._timed)}
        self.by_source = {name: [0, 0] for name in self._proposers}
        self.outputs = tuple(dict.fromkeys(name for one in proposers for name in one.outputs))
        for one in proposers:
            if missing := [name for name in one.outputs if name not in (LOGITS, *caps.outputs)]:
                raise RequestError(
                    f"speculate: proposer {one.name!r} needs the output {missing[0]!r} of each step, which this bundle "
                    "doesn't give",
                    hint=f"Export it with that output. It gives {', '.join((LOGITS, *caps.outputs))}.",
                )
        self._rates, self._credit = AcceptanceRates(), Credit()
        self._histories: WeakKeyDictionary[Request, _History] = WeakKeyDictionary()
        self._steps = self._next_look = 0  # steps so far, and the next that may have drafts
        self._newest: Request | None = None
        self._step: _Step | None = None  # None where it has no drafts

    def describe(self) -> dict[str, object]:
        drafted, accepted = (sum(counts) for counts in zip(*self.by_source.values(), strict=True))
        sources = {name: {"drafted": of[0], "accepted": of[1]} for name, of in self.by_source.items()}
        report = {"drafted": drafted, "accepted": accepted, "sources": sources, **self.times.describe()}
        for proposer in self._timed:
            draft_seconds, least = proposer.seconds(1), self.times.seconds(1)
            slow = f"a step of it takes {draft_seconds * 1e3:.2f} ms, and one of the model {least * 1e3:.2f} ms"
            off = proposer.off or (slow if draft_seconds > least else None)
            report[f"draft_{proposer.name}"] = proposer.describe() | {"off": off}
        return report

    # Before a step

    def begin(self, running: Sequence[Request], paused: Collection[Request]) -> bool:
        """Begins a step, and calls timed proposers. Returns True if the step may have drafts.

        Args:
            running: the running requests.
            paused: requests that get no token in this step.
        """
        self._steps += 1
        self._step = None
        if running and running[-1] is not self._newest:
            self._newest, self._next_look = running[-1], 0
        if len(running) >= DRAFT_ROWS or self._steps < self._next_look:
            return False
        prompts = any(not request.decodes for request in running)  # who may decode in the next step
        self._next_look = self._steps + (1 if prompts else 16)
        if self.times.measured and running:
            self.times.at(sum(request.computed for request in running) / len(running))
        decoding = len(running)
        self._step = _Step(self.times, decoding, self.times.seconds(decoding), rows=decoding, tokens=decoding)
        for proposer in self._timed:
            if proposer.off is None:
                decodes = [one for one in running if isinstance(one, Generation) and one.decodes]
                lacking = [one for one in decodes if one not in paused and one not in self._step.proposed]
                self._propose(proposer, self._step, lacking)
        return True

    def draft(self, request: Request) -> Sequence[int]:
        """Returns the draft of a timed proposer, or a proposal that costs no time, if a gain is expected."""
        step = self._step
        assert step is not None, "this step may have drafts"
        if not isinstance(request, Generation):
            return ()
        if (proposed := step.proposed.get(request)) is not None:
            return proposed
        most = min(step.room, self._most(request))
        if most < 1:
            return ()
        history, proposal = self._history(request), NOTHING
        if self._steps >= history.next_look:
            history.next_look = _next_look(self._steps, history.found)
            (proposal,) = self._looked_up([(request, most)])
        self._next_look = min(self._next_look, history.next_look)
        if not proposal.tokens:
            return ()
        kind = proposal.kind
        best = step.best([history.rates.rate(kind)], len(proposal.tokens), self._credit_seconds(step, kind))
        if not best.length:
            history.rates.fade(kind)
            self._rates.fade(kind)
            return ()
        more = self.times.seconds(step.rows + best.length) - self.times.seconds(step.rows)
        self._spend(step, kind, more + (LEAST_GAIN - 1) * step.plain_seconds)
        step.rows, step.tokens = step.rows + best.length, best.tokens
        self._found(history, kind)
        return proposal.tokens[: best.length]

    def skip(self, most: int) -> int:
        count = max(min(most, self._next_look - self._steps), 1)
        self._steps += count - 1
        return count

    def _most(self, request: Generation) -> int:
        """Returns the most tokens of a draft of a request."""
        if not request.params.speculate or request.search is not None:
            return 0
        return request.max_tokens - request.output_length - 1

    def _history(self, request: Request) -> _History:
        if (history := self._histories.get(request)) is None:
            history = _History(AcceptanceRates(self._rates), self._steps, self._steps)
            self._histories[request] = history
        return history

    def _looked_up(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        """Returns for each request its proposal of the highest rank, among those that cost no time.

        ``wanted``: (request, most tokens of its proposal).
        """
        nothing = [NOTHING] * len(wanted)
        of_each = zip(nothing, *(proposer.propose(wanted) for proposer in self._free), strict=True)
        return [max(proposals, key=lambda proposal: proposal.kind.rank) for proposals in of_each]

    def _found(self, own: _History, kind: ProposalKind) -> None:
        """Records that a request has a draft of this kind in this step.

        So proposers are called for it in the next step too.
        """
        own.kind, own.found, own.next_look = kind, self._steps, self._steps + 1
        self._next_look = self._steps + 1

    def _credit_seconds(self, step: _Step, kind: ProposalKind) -> float:
        """Returns the seconds that drafts of this kind may cost now."""
        return self._credit.left(kind, self._steps) * step.plain_seconds

    def _spend(self, step: _Step, kind: ProposalKind, seconds: float) -> None:
        """Records the seconds that drafts of this kind have cost; negative if they saved time."""
        self._credit.spend(kind, seconds / step.plain_seconds, self._steps)

    def _propose(self, proposer: TimedProposer, step: _Step, requests: Sequence[Generation]) -> None:
        """Calls a timed proposer for the requests whose expected gain exceeds the proposer's time."""
        able = [(one, most) for one in requests if proposer.takes(one) and (most := self._most(one)) > 0]
        if not able or step.room < 1:
            return
        candidates = self._candidates(proposer, step, able)
        best, count = self._best_count(proposer, step, candidates)
        if not best.length:
            for candidate in candidates:
                self._history(candidate.request).rates.fade(proposer.kind)
            self._rates.fade(proposer.kind)
            return
        saved = step.plain_seconds / step.tokens - 1 / best.speed  # seconds, for each token
        request_lengths = [
            (request, min(best.length, most))
            for _, most, request in candidates[:count]
            if proposer.behind(request) <= saved * min(most, max(request.output_length, LEAST_LEFT))
        ]
        began = self._clock()
        proposals = proposer.propose(request_lengths)
        step.proposal_took += self._clock() - began
        self._add_proposals(proposer, step, best.length, request_lengths, proposals)

    def _candidates(
        self, proposer: TimedProposer, step: _Step, able: Sequence[tuple[Generation, int]]
    ) -> list[_Candidate]:
        """Returns the requests for which a timed proposer pays: its drafts gain more than those of the lookup, which
        cost no time.

        Those with the highest acceptance rate are first.

        Args:
            proposer: the timed proposer.
            step: the step for which drafts are made.
            able: the requests that it can draft for, each with the most tokens to draft.
        """
        kind, credit = proposer.kind, self._credit_seconds(step, proposer.kind)
        each = proposer.seconds(len(able)) / len(able)
        candidates = []
        lookups = self._looked_up([(request, step.room) for request, _ in able])
        for (request, most), proposal in zip(able, lookups, strict=True):
            rates, free = self._history(request).rates, proposal.kind
            rate = rates.rate(kind)
            by_lookup = step.best([rates.rate(free)], len(proposal.tokens), self._credit_seconds(step, free))
            if not by_lookup.length or by_lookup.speed < step.best([rate], min(most, step.room), credit, each).speed:
                candidates.append(_Candidate(rate, most, request))
        candidates.sort(key=lambda candidate: -candidate.rate)
        return candidates

    def _best_count(
        self, proposer: TimedProposer, step: _Step, candidates: Sequence[_Candidate]
    ) -> tuple[_Choice, int]:
        """Returns the best length of the drafts, and the number of candidates, from the first on, that get one."""
        credit = self._credit_seconds(step, proposer.kind)
        best, best_count = _Choice(0.0, 0, 0.0), 0
        for count in range(1, min(len(candidates), step.room) + 1):
            rates = [candidate.rate for candidate in candidates[:count]]
            choice = step.best(rates, step.room // count, credit, proposer.seconds(count))
            if choice.speed > best.speed:
                best, best_count = choice, count
        return best, best_count

    def _add_proposals(
        self,
        proposer: TimedProposer,
        step: _Step,
        length: int,
        request_lengths: Sequence[tuple[Generation, int]],
        proposals: Sequence[Proposal],
    ) -> None:
        """Adds the proposals of a timed proposer to the step, and records their cost.

        Args:
            proposer: the proposer.
            step: the step.
            length: the largest number of tokens requested from it.
            request_lengths: the requests, and the number of tokens requested for each.
            proposals: a proposal for each request.
        """
        kind, before = proposer.kind, self.times.seconds(step.rows)
        for (request, _), proposal in zip(request_lengths, proposals, strict=True):
            if proposal.tokens:
                history = self._history(request)
                self._found(history, kind)
                rate, tokens = history.rates.rate(kind), len(proposal.tokens)
                step.proposed[request] = proposal.tokens
                step.rows, step.tokens = step.rows + tokens, step.tokens + sum(rate**at for at in range(1, tokens + 1))
        if count := sum(bool(proposal.tokens) for proposal in proposals):
            seconds = length * proposer.seconds(count)
            step.proposal_seconds += seconds
            self._spend(step, kind, self.times.seconds(step.rows) - before + seconds)

    # After it

    def after_step(self, batch: Batch, seconds: float) -> None:
        step, rows = self._step, len(batch.step.ids)
        if step is None or rows > DRAFT_ROWS:
            return
        drafted = sum(len(chunk.draft) for chunk in batch.chunks)
        if rows != len(batch.chunks) + drafted:  # it has prompts
            return
        if drafted and self.times.known:
            expected = self.times.seconds(rows) + step.proposal_seconds
            step.late = (min(seconds, 2 * expected) - expected) / drafted
        if drafted or self._steps < 64 or not self._steps % 16:  # plain ones are known by then
            self.times.took(rows, seconds - step.proposal_took)

    def verify(self, chunk: Chunk, tokens: Sequence[int], output: StepOutput, first: int) -> None:
        super().verify(chunk, tokens, output, first)
        self._guarded.learn(chunk, chunk.request.computed - chunk.known, output, first)

    def learn(self, chunk: Chunk, accepted: int, output: StepOutput, first: int) -> None:
        request, source = chunk.request, ""
        assert isinstance(request, Generation), "only these draw tokens"
        if chunk.draft:
            source = self._count_accepted(chunk, accepted)
        row = first + chunk.rows - 1 - len(chunk.draft)  # of the last known token
        for proposer in self._proposers.values():
            proposed = proposer.name == source
            if proposed or proposer.outputs:
                outputs = {name: output.outputs[name][row : row + 1 + accepted] for name in proposer.outputs}
                proposer.observe(request, chunk.draft if proposed else (), accepted if proposed else 0, outputs)

    def _count_accepted(self, chunk: Chunk, accepted: int) -> str:
        """Counts the accepted tokens of a draft, and the time that the draft saved; returns the name of its
        proposer.
        """
        request, step, drafted = chunk.request, self._step, len(chunk.draft)
        assert step is not None, "only these have drafts"
        history = self._history(request)
        counts = self.by_source[history.kind.source]
        counts[0], counts[1] = counts[0] + drafted, counts[1] + accepted
        tried = accepted if request.finished else min(accepted + 1, drafted)
        for rates in (history.rates, self._rates):
            rates.saw(history.kind, accepted, tried)
        self._spend(step, history.kind, drafted * step.late - accepted * step.plain_seconds / step.decoding)
        return history.kind.source

    def release(self, request: Request) -> None:
        for proposer in self._proposers.values():
            proposer.release(request)

    def forget(self, tenant: str | None) -> None:
        for proposer in self._proposers.values():
            proposer.forget(tenant)


def _next_look(step: int, found: int) -> int:
    """Returns the number of the next step in which proposers are called, at the same steps for all requests.

    Calls take time. So after many steps without a draft, proposers aren't called in every step.

    Args:
        step: the number of a step without a draft.
        found: the number of the last step with a draft.
    """
    misses = step - found
    every = 1 if misses < 4 else min(1 << misses.bit_length() - 2, 16)
    return (step // every + 1) * every


def drafts_for(
    speculate: bool | None,
    caps: ExecutorCaps,
    times: DecodeTimes,
    proposers: Sequence[Proposer],
    clock: Callable[[], float] = time.monotonic,
    counters: Counters | None = None,
) -> NoDrafts:
    """Returns the object that makes drafts for a scheduler: a ``Drafts``, or a ``NoDrafts`` if speculation is off.

    Args:
        speculate: as in ``SchedulerConfig``.
        caps, times, proposers, clock, counters: see ``Drafts``.

    Raises the errors of ``Drafts``.
    """
    enabled = caps.verifies if speculate is None else speculate
    return Drafts(caps, times, proposers, clock, counters) if enabled else NoDrafts()
