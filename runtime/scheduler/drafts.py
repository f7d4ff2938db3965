"""Speculation: tokens that are likely next are computed together with the last known one, and drawn as always.

Logits are bit for bit the same however rows are batched, and each position has its own random number, so what is drawn
behind a draft is what plain decoding would have drawn there: a draft is accepted as far as it is equal to that. Nothing
but time depends on it. Keys and values of what was rejected lie behind the request's last token, where nobody looks,
until they are overwritten.

A draft is as long as makes the step's tokens a second the most (``_Step.best``), by what is measured meanwhile: the
acceptance rate of proposals of its kind, what steps of more rows take, and what a proposal takes where a draft model
makes it. Where it wouldn't pay there is none. What drafts of a kind may lose is bounded (``acceptance.Credit``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from enginewright.runtime.requests.lookup import MODEL, NOTHING, SOURCES, Proposal, Proposer, lookups, source
from enginewright.runtime.requests.request import Generation, Request

from ..shared.contracts import NO_TOKEN, ExecutorCaps, StepOutput
from ..shared.errors import RequestError
from ..shared.helpers import HelperErrors
from ..shared.step_costs import DRAFT_ROWS
from .acceptance import AcceptanceRates, Credit
from .base import Batch, Chunk
from .helpers import helper
from .step_outputs import logprobs_of
from .step_times import DecodeTimes

LEAST_GAIN = 1.05
"""A draft is expected to give so many times as many tokens a second: what it costs besides rows isn't measured."""
LEAST_LEFT = 32
"""An answer is expected to go on for as many tokens as it has, and so many at least, unless it ends by max_tokens."""


class TimedProposer(Proposer, Protocol):
    """A proposer that takes time: a draft model (``runtime.engine.draft_model``). It fails without raising."""

    @property
    def off(self) -> str | None:
        """Says why it proposes nothing any more."""

    def seconds(self, rows: int) -> float:
        """Gives the time of one more token for so many requests."""

    def behind(self, request: Generation) -> float:
        """Gives the seconds that it needs for a request before it can propose; 0 if it lacks few tokens."""

    def describe(self) -> dict[str, Any]:
        """Says what it is, for ``LLM.info``."""

    def close(self) -> None:
        """Frees its memory."""


class NoDrafts:
    """Every request that decodes has one row. What speculates overrides what it does otherwise."""

    def begin(self, running: Sequence[Request], paused: Collection[Request]) -> bool:
        """Begins a step of these requests, without those ``paused``. Says whether it may have drafts at all."""
        return False

    def draft(self, request: Request) -> Sequence[int]:
        """Gives tokens to compute behind the last one of a request that decodes."""
        return ()

    def after_step(self, batch: Batch, seconds: float) -> None:
        """Learns from a step, which took so long with making it. Its drafts are verified after this."""

    def verify(self, chunk: Chunk, tokens: Sequence[int], output: StepOutput, first: int) -> None:
        """Gives a request what was drawn, ``tokens`` in rows from ``first`` on, as far as its draft is equal to it."""
        request, count = chunk.request, 0
        assert isinstance(request, Generation), "only these have drafts"
        for at, token in enumerate(tokens):
            if token == NO_TOKEN:
                break
            request.accept(token, logprobs_of(request, output, first + at))
            count += 1
            if request.finished or at == len(chunk.draft) or token != chunk.draft[at]:
                break
        request.computed = chunk.start + count
        request.drafted, request.accepted = request.drafted + len(chunk.draft), request.accepted + count - 1

    def learn(self, chunk: Chunk, accepted: int) -> None:
        """Learns how many tokens of a draft were accepted, after ``verify``."""

    def release(self, request: Request) -> None:
        """Frees what is held for a request that has ended, or was preempted and will come back."""

    def forget(self, tenant: str | None) -> None:
        """Forgets what requests of a tenant, or of any, have said."""

    def describe(self) -> dict[str, object] | None:
        """Counts tokens, for ``LLM.info``; None where nothing is drafted."""
        return None


class _Choice(NamedTuple):
    """Drafts of ``length`` tokens each; ``tokens`` are expected of the step then, and ``speed`` of them a second."""

    speed: float
    length: int
    tokens: float


@dataclass(slots=True)
class _Step:
    """Keeps what belongs to one step that may have drafts, from ``begin`` to the last ``verify``.

    Attributes:
        times: what steps take.
        decoding: requests that run when it begins.
        plain_seconds: what it takes without drafts.
        rows, tokens: its rows so far, and the new tokens that are expected of them.
        proposed: drafts of the draft model.
        proposal_seconds, proposal_took: what these are expected to take, and what they took.
        late: seconds of each drafted row beyond those that were expected.
    """

    times: DecodeTimes
    decoding: int
    plain_seconds: float
    rows: int
    tokens: float
    proposed: dict[Request, Sequence[int]] = field(default_factory=dict)
    proposal_seconds: float = 0.0
    proposal_took: float = 0.0
    late: float = 0.0

    def best(self, rates: Sequence[float], most: int, credit: float, each: float = 0.0) -> _Choice:
        """Decides how long further drafts are, where these pay at all.

        Args:
            rates: acceptance rates of the requests that get one.
            most: tokens that each may have.
            credit: seconds that they may cost.
            each: seconds that it takes to propose one token more for all of them.
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


@dataclass(slots=True)
class _History:
    """Keeps what is known of one request's drafts.

    Attributes:
        rates: its own acceptance rates; before there were many, those of all requests.
        found: the step in which it had its last draft, or began.
        next_look: the step in which to look for one again.
        kind: how its last one was found.
    """

    rates: AcceptanceRates
    found: int
    next_look: int
    kind: int = 0


class Drafts(NoDrafts):
    """Drafts for all requests. Raises RequestError if the executor can't compute several rows of a request ahead.

    Attributes:
        times: what steps take.
        by_source: drafted and accepted tokens so far, of each source.
    """

    def __init__(
        self,
        caps: ExecutorCaps,
        times: DecodeTimes,
        draft_model: TimedProposer | None = None,
        clock: Callable[[], float] = time.monotonic,
        errors: HelperErrors | None = None,
    ) -> None:
        if not caps.verifies:
            raise RequestError(
                "speculate: this target doesn't promise a token's bits with others behind it",
                hint="Use the cpu target.",
            )
        self.times = times
        self.by_source = {name: [0, 0] for name in SOURCES}
        self._clock = clock
        errors = errors or HelperErrors()
        self._guarded = helper("drafts", self, errors)
        self._draft_model = None if draft_model is None else helper("draft model", draft_model, errors)
        self._lookups = [helper("proposer", proposer, errors) for proposer in lookups()]
        models = [] if self._draft_model is None else [self._draft_model]
        self._proposers: Sequence[Proposer] = [*self._lookups, *models]
        self._rates, self._credit = AcceptanceRates(), Credit()
        self._histories: WeakKeyDictionary[Request, _History] = WeakKeyDictionary()
        self._steps = self._next_look = 0  # steps so far, and the next that may have drafts
        self._newest: Request | None = None
        self._step: _Step | None = None  # None where it has no drafts

    def describe(self) -> dict[str, object]:
        drafted, accepted = (sum(counts) for counts in zip(*self.by_source.values(), strict=True))
        sources = {name: {"drafted": of[0], "accepted": of[1]} for name, of in self.by_source.items()}
        found = {"drafted": drafted, "accepted": accepted, "sources": sources, **self.times.describe()}
        if (model := self._draft_model) is not None:
            own, least = model.seconds(1), self.times.seconds(1)
            slow = f"a step of it takes {own * 1e3:.2f} ms, and one of the model {least * 1e3:.2f} ms"
            found["draft_model"] = model.describe() | {"off": model.off or (slow if own > least else None)}
        return found

    # Before a step

    def begin(self, running: Sequence[Request], paused: Collection[Request]) -> bool:
        """Begins a step, and has the draft model propose. This is called for each step, so it has to be quick."""
        self._steps += 1
        self._step = None
        if running and running[-1] is not self._newest:
            self._newest, self._next_look = running[-1], 0
        if len(running) >= DRAFT_ROWS or self._steps < self._next_look:
            return False
        prompts = any(request.remaining > 1 for request in running)  # who may decode in the next step
        self._next_look = self._steps + (1 if prompts else 16)
        if self.times.measured and running:
            self.times.at(sum(request.computed for request in running) / len(running))
        decoding = len(running)
        self._step = _Step(self.times, decoding, self.times.seconds(decoding), rows=decoding, tokens=decoding)
        if self._draft_model is not None and self._draft_model.off is None:
            decodes = [one for one in running if isinstance(one, Generation) and one.remaining == 1]
            self._propose(self._draft_model, self._step, [one for one in decodes if one not in paused])
        return True

    def draft(self, request: Request) -> Sequence[int]:
        """Gives the draft model's tokens, or such as are looked up, if that pays."""
        step = self._step
        assert step is not None, "this step may have drafts"
        if not isinstance(request, Generation):
            return ()
        if (proposed := step.proposed.get(request)) is not None:
            return proposed
        most = min(DRAFT_ROWS - step.rows, self._most(request))
        if most < 1:
            return ()
        own, proposal = self._history(request), NOTHING
        if self._steps >= own.next_look:
            own.next_look = _next_look(self._steps, own.found)
            (proposal,) = self._looked_up([(request, most)])
        self._next_look = min(self._next_look, own.next_look)
        if not proposal.tokens:
            return ()
        kind = proposal.kind
        best = step.best([own.rates.rate(kind)], len(proposal.tokens), self._credit_seconds(step, kind))
        if not best.length:
            own.rates.fade(kind)
            self._rates.fade(kind)
            return ()
        more = self.times.seconds(step.rows + best.length) - self.times.seconds(step.rows)
        self._spend(step, kind, more + (LEAST_GAIN - 1) * step.plain_seconds)
        step.rows, step.tokens = step.rows + best.length, best.tokens
        self._found(own, kind)
        return proposal.tokens[: best.length]

    def _most(self, request: Generation) -> int:
        """Says how many tokens may be drafted for a request."""
        if not request.params.speculate or request.search is not None:
            return 0
        return request.max_tokens - request.output_length - 1

    def _history(self, request: Request) -> _History:
        if (found := self._histories.get(request)) is None:
            found = _History(AcceptanceRates(self._rates), self._steps, self._steps)
            self._histories[request] = found
        return found

    def _looked_up(self, wanted: Sequence[tuple[Generation, int]]) -> list[Proposal]:
        """Gives the best proposals that cost no time: those behind the longest n-grams."""
        of_each = zip(*(proposer.propose(wanted) for proposer in self._lookups), strict=True)
        return [max(proposals, key=lambda proposal: abs(proposal.kind)) for proposals in of_each]

    def _found(self, own: _History, kind: int) -> None:
        """Notes that a request has a draft in this step, so that the next one looks for one, too."""
        own.kind, own.found, own.next_look = kind, self._steps, self._steps + 1
        self._next_look = self._steps + 1

    def _credit_seconds(self, step: _Step, kind: int) -> float:
        """Says how many seconds drafts of this kind may cost now."""
        return self._credit.left(kind, self._steps) * step.plain_seconds

    def _spend(self, step: _Step, kind: int, seconds: float) -> None:
        """Notes what drafts of this kind cost; less than 0 is what they saved."""
        self._credit.spend(kind, seconds / step.plain_seconds, self._steps)

    def _propose(self, model: TimedProposer, step: _Step, requests: Sequence[Generation]) -> None:
        """Has the draft model propose for those requests for which that pays, and pays more than what is looked up."""
        # Who may have a draft of it: it draws by rules that stay as they are.
        plain = [one for one in requests if one.rules is None or not one.rules.changing]
        able = [(request, most) for request in plain if (most := self._most(request)) > 0]
        if not able or (room := DRAFT_ROWS - step.rows) < 1:
            return
        # Who gains more by it than by a look-up.
        each, credit = model.seconds(len(able)) / len(able), self._credit_seconds(step, MODEL)
        candidates = []  # acceptance rate, most tokens, request
        for (request, most), proposal in zip(able, self._looked_up([(one, room) for one, _ in able]), strict=True):
            rates, kind = self._history(request).rates, proposal.kind
            rate = rates.rate(MODEL)
            by_lookup = step.best([rates.rate(kind)], len(proposal.tokens), self._credit_seconds(step, kind))
            if not by_lookup.length or by_lookup.speed < step.best([rate], min(most, room), credit, each).speed:
                candidates.append((rate, most, request))
        # How many of them get drafts, those with the largest rates first, and how long these are.
        candidates.sort(key=lambda candidate: -candidate[0])
        choices = [
            step.best([rate for rate, _, _ in candidates[:count]], room // count, credit, model.seconds(count))
            for count in range(1, min(len(candidates), room) + 1)
        ]
        best = max(choices, key=lambda choice: choice.speed, default=_Choice(0.0, 0, 0.0))
        if not best.length:
            for _, _, request in candidates:
                self._history(request).rates.fade(MODEL)
            self._rates.fade(MODEL)
            return
        saved = 1 / (step.tokens / step.plain_seconds) - 1 / best.speed  # seconds, for each token
        wanted = [
            (request, min(best.length, most))
            for _, most, request in candidates[: choices.index(best) + 1]
            if model.behind(request) <= saved * min(most, max(request.output_length, LEAST_LEFT))
        ]
        # What it proposes.
        began = self._clock()
        proposals = model.propose(wanted)
        step.proposal_took = self._clock() - began
        for (request, _), proposal in zip(wanted, proposals, strict=True):
            if proposal.tokens:
                own = self._history(request)
                self._found(own, MODEL)
                rate, length = own.rates.rate(MODEL), len(proposal.tokens)
                step.proposed[request] = proposal.tokens
                step.rows, step.tokens = step.rows + length, step.tokens + sum(rate**at for at in range(1, length + 1))
        if step.proposed:
            step.proposal_seconds = best.length * model.seconds(len(step.proposed))
            self._spend(step, MODEL, self.times.seconds(step.rows) - step.plain_seconds + step.proposal_seconds)

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
        self._guarded.learn(chunk, chunk.request.computed - chunk.start - 1)

    def learn(self, chunk: Chunk, accepted: int) -> None:
        request, step, drafted = chunk.request, self._step, len(chunk.draft)
        assert step is not None, "only these have drafts"
        own = self._history(request)
        counts = self.by_source[source(own.kind)]
        counts[0], counts[1] = counts[0] + drafted, counts[1] + accepted
        tried = accepted if request.finished else min(accepted + 1, drafted)
        for rates in (own.rates, self._rates):
            rates.saw(own.kind, accepted, tried)
        self._spend(step, own.kind, drafted * step.late - accepted * step.plain_seconds / step.decoding)

    def release(self, request: Request) -> None:
        for proposer in self._proposers:
            proposer.release(request)

    def forget(self, tenant: str | None) -> None:
        for proposer in self._proposers:
            proposer.forget(tenant)


def _next_look(step: int, found: int) -> int:
    """Says in which step to look for drafts again, after one without; the last was found in ``found``.

    Looking takes time, so where none was found for long not each step looks. What repeats itself is found later, too.
    Requests look in the same steps.
    """
    misses = step - found
    every = 1 if misses < 4 else min(1 << misses.bit_length() - 2, 16)
    return (step // every + 1) * every


def drafts_for(
    speculate: bool | None,
    caps: ExecutorCaps,
    times: DecodeTimes,
    draft_model: TimedProposer | None,
    clock: Callable[[], float] = time.monotonic,
    errors: HelperErrors | None = None,
) -> NoDrafts:
    """Makes what drafts: see ``SchedulerConfig.speculate``. Raises RequestError if the executor can't verify drafts."""
    wanted = caps.verifies if speculate is None else speculate
    return Drafts(caps, times, draft_model, clock, errors) if wanted else NoDrafts()
