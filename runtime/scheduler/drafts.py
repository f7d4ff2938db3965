"""Speculation: tokens that are likely next are computed together with the last known one, and drawn as always.

Logits are bit for bit the same however rows are batched, and each position has its own random number, so what is drawn
behind a draft is what plain decoding would have drawn there: a draft is accepted as far as it is equal to that. Nothing
but time depends on it. Keys and values of what wasn't accepted lie behind the request's last token, where nobody looks,
until they are overwritten.

How long a draft is follows from what is measured meanwhile: how often guesses of its kind were right, what steps of
more rows take, and what a guess takes where another model makes it. Where it wouldn't pay there is none. Guesses of a
kind that were wrong more often than was expected have cost time, and what they may cost is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from enginewright.runtime.requests.lookup import (
    FORCED,
    MODEL,
    Credit,
    Guess,
    Guesses,
    PastAnswers,
    RightTokens,
    next_look,
)
from enginewright.runtime.requests.request import Generation, Request

from ..shared.contracts import NO_TOKEN, ExecutorCaps, StepOutput
from ..shared.errors import RequestError
from ..shared.step_costs import DRAFT_ROWS
from .base import Batch, Chunk
from .row_costs import RowCosts
from .step_outputs import logprobs_of

LEAST_GAIN = 1.05
"""A draft is expected to give so many times as many tokens a second: what it costs besides rows isn't measured."""
LEAST_LEFT = 32
"""An answer is expected to go on for as many tokens as it has, and so many at least, unless it ends by max_tokens."""
_SOURCES = {MODEL: "model", FORCED: "forced"}


class Guesser(Protocol):
    """What guesses at a price, such as another model (``runtime.draft_model``). It fails without raising."""

    @property
    def off(self) -> str | None:
        """Why it makes no guesses any more."""

    def seconds(self, rows: int) -> float:
        """Of one more token for so many requests."""

    def behind(self, request: Generation) -> float:
        """Seconds that it takes to compute tokens of a request before it can guess; 0 if they are few."""

    def guess(self, wanted: Sequence[tuple[Generation, int]]) -> list[Sequence[int]]:
        """For each request up to so many tokens that may follow its own; none while it is behind, or without room."""

    def release(self, request: Request) -> None:
        """Frees what it holds for a request, which may come back."""

    def forget(self, namespace: tuple[str, ...] | None) -> None:
        """Finds nothing again that it has computed for a namespace, or for any."""

    def describe(self) -> dict[str, Any]:
        """For ``LLM.info``."""

    def close(self) -> None:
        """Frees its memory."""


class Drafts:
    """Of all requests. Raises RequestError if the executor can't compute several rows of a request ahead.

    Attributes:
        drafted, accepted: tokens so far; by_source: both, of each source.
        costs: of steps.
        looks: whether the next step may have drafts; ``begin_step``, ``of`` and ``stepped`` aren't called for others.
        guesser: makes guesses where none is looked up that is expected to give more.
    """

    def __init__(self, caps: ExecutorCaps, guesser: Guesser | None = None) -> None:
        if not caps.verifies:
            raise RequestError(
                "speculate: this target doesn't promise a token's bits with others behind it",
                hint="Use the cpu target.",
            )
        self.drafted = self.accepted = 0
        self.by_source = {name: [0, 0] for name in ("own_text", "past_answers", "model", "forced")}
        self.costs = RowCosts(caps.row_seconds)
        self.guesser = guesser
        self._answers = PastAnswers()
        self._right = RightTokens()
        self._rows = 0  # of the step that is being made
        self._tokens = 0.0  # that are expected of it
        self._decoding, self._step_seconds = 1, 0.0  # requests in it, and what it takes without drafts
        self.looks, self._next_look = False, 0
        self._newest: Request | None = None
        self._off = 0.0  # seconds of a drafted row of the last step beyond those that were expected
        self._credit = Credit()
        self._guessing = 0.0  # seconds that guesses for it are expected to take
        self._guessed_in = 0.0  # seconds that they took
        self._guessed: dict[Request, Sequence[int]] = {}  # for it

    def describe(self) -> dict[str, object]:
        """For ``LLM.info``."""
        found: dict[str, object] = {"drafted": self.drafted, "accepted": self.accepted}
        sources = {name: dict(zip(("drafted", "accepted"), of, strict=True)) for name, of in self.by_source.items()}
        found |= {"sources": sources, **self.costs.describe()}
        if self.guesser is not None:
            found["draft_model"] = self.guesser.describe() | {"off": self.guesser.off or self._too_slow()}
        return found

    def _too_slow(self) -> str | None:
        assert self.guesser is not None
        own, least = self.guesser.seconds(1), self.costs.of(1)
        return (
            f"a step of it takes {own * 1e3:.2f} ms, and one of the model {least * 1e3:.2f} ms" if own > least else None
        )

    def next_step(self, running: Sequence[Request]) -> None:
        """Sets ``looks`` for a step in which at most these decode. Called before each, so it has to be quick."""
        self._credit.steps += 1
        if running and running[-1] is not self._newest:
            self._newest, self._next_look = running[-1], 0
        self.looks = len(running) < DRAFT_ROWS and self._credit.steps >= self._next_look

    def begin_step(self, running: Sequence[Request], paused: Collection[Request] = ()) -> None:
        """Prepares a step that may have drafts (``looks``), and has the guesser make its guesses.

        Args:
            running: the requests that run.
            paused: those of them that get no token in this step.
        """
        prompts = any(request.remaining > 1 for request in running)  # who may decode in the next step
        self._next_look = self._credit.steps + (1 if prompts else 16)
        self._rows, self._tokens = len(running), float(len(running))
        self._decoding = max(len(running), 1)
        self._guessed, self._guessing, self._guessed_in = {}, 0.0, 0.0
        if self.costs.measured and running:
            self.costs.at(sum(request.computed for request in running) / len(running))
        self._step_seconds = self.costs.of(self._decoding)
        if self.guesser is not None and self.guesser.off is None:
            decoding = [one for one in running if isinstance(one, Generation) and one.remaining == 1]
            self._guess(self.guesser, [one for one in decoding if one not in paused])

    def of(self, request: Generation) -> Sequence[int]:
        """A draft for a request that decodes; empty where there is none that would pay."""
        if (guessed := self._guessed.get(request)) is not None:
            return guessed
        most = min(DRAFT_ROWS - self._rows, self._most(request))
        if most < 1:
            return ()
        own = self._guesses_of(request)
        step = self._credit.steps
        if step >= own.next_look:
            own.next_look = next_look(step, own.found)
            guess = self._looked_up(request, own, most)
        else:
            guess = None
        self._next_look = min(self._next_look, own.next_look)
        if guess is None:
            return ()
        _, length, expected = self._best(own.right.share(guess.by), len(guess.tokens), self._credit_of(guess.by))
        if not length:
            own.right.forget(guess.by)
            self._right.forget(guess.by)
            return ()
        more = self.costs.of(self._rows + length) - self.costs.of(self._rows)
        self._pay(guess.by, more + (LEAST_GAIN - 1) * self._step_seconds)
        self._rows, self._tokens = self._rows + length, expected
        own.last = Guess(guess.tokens[:length], guess.by)
        own.found, own.next_look = step, step + 1
        self._next_look = step + 1
        return own.last.tokens

    def _credit_of(self, kind: int) -> float:
        """Seconds that drafts of this kind may cost now."""
        return self._credit.of(kind) * self._step_seconds

    def _pay(self, kind: int, seconds: float) -> None:
        """Drafts of this kind cost so much, or have saved it if it's less than 0."""
        self._credit.pay(kind, seconds / self._step_seconds)

    def _most(self, request: Generation) -> int:
        """Tokens that may be drafted for a request."""
        if not request.params.speculate or request.search is not None:
            return 0
        return request.max_tokens - request.output_length - 1

    def _guesses_of(self, request: Generation) -> Guesses:
        if request.guesses is None:
            request.guesses = Guesses(request.tokens, self._right, self._credit.steps)
        return request.guesses

    def _looked_up(self, request: Generation, own: Guesses, most: int) -> Guess | None:
        if request.rules is not None and (forced := request.rules.forced(most)):
            return Guess(forced, FORCED)
        guess = own.lookup.next(most)
        found = 0 if guess is None else guess.by
        return self._answers.next(request.tenant, request.tokens, most, found) or guess

    def _best(self, share: float, most: int, credit: float, each: float = 0.0) -> tuple[float, int, float]:
        """Of a guess whose tokens are right with this probability, each behind right ones, and cost ``each`` seconds.

        Args:
            share, most: the probability, and how many tokens the guess has at most.
            credit: seconds that the guess and its rows may cost.
            each: seconds of a guessed token.

        Returns:
            The step's tokens a second, how many tokens of the guess make these the most, and the step's tokens then.
        """
        rows, tokens, seconds = self._rows, self._tokens, self.costs.of(self._rows) + self._guessing
        best, found, with_found = LEAST_GAIN * tokens / seconds, 0, tokens
        expected, right = tokens, 1.0
        for length in range(1, most + 1):
            right *= share
            expected += right
            more = self.costs.of(rows + length) + self._guessing + length * each
            if more - seconds > credit:
                break
            if (rate := expected / more) > best:
                best, found, with_found = rate, length, expected
        return best, found, with_found

    def _guess(self, guesser: Guesser, requests: Sequence[Generation]) -> None:
        """Has guesses made for the requests for which that pays, and pays more than what is looked up."""
        # A guesser draws by rules that stay as they are.
        requests = [one for one in requests if one.rules is None or not one.rules.changing]
        able = [(most, request) for request in requests if (most := self._most(request)) > 0]
        if not able or (room := DRAFT_ROWS - self._rows) < 1:
            return
        each, credit = guesser.seconds(len(able)) / len(able), self._credit_of(MODEL)
        candidates = []  # share, most tokens, request
        for most, request in able:
            own = self._guesses_of(request)
            share = own.right.share(MODEL)
            if (looked_up := self._looked_up(request, own, room)) is not None:
                by, length = looked_up.by, len(looked_up.tokens)
                rate, length, _ = self._best(own.right.share(by), length, self._credit_of(by))
                if length and rate >= self._best(share, min(most, room), credit, each)[0]:
                    continue
            candidates.append((share, most, request))
        candidates.sort(key=lambda candidate: -candidate[0])
        count, length, gain = self._plan(guesser, [share for share, _, _ in candidates])
        if not count:
            for _, _, request in candidates:
                self._guesses_of(request).right.forget(MODEL)
            self._right.forget(MODEL)
            return
        wanted, shares = [], []
        for share, most, request in candidates[:count]:
            left = min(most, max(request.output_length, LEAST_LEFT))
            if guesser.behind(request) <= gain * left:
                wanted.append((request, min(length, most)))
                shares.append(share)
        began = time.perf_counter()
        found = guesser.guess(wanted) if wanted else []
        self._guessed_in = time.perf_counter() - began
        for (request, _), share, tokens in zip(wanted, shares, found, strict=True):
            if tokens:
                own = self._guesses_of(request)
                own.last = Guess(tokens, MODEL)
                own.found, own.next_look = self._credit.steps, self._credit.steps + 1
                self._next_look = own.next_look
                self._guessed[request] = tokens
                self._rows += len(tokens)
                self._tokens += sum(share**at for at in range(1, len(tokens) + 1))
        if self._guessed:
            self._guessing = length * guesser.seconds(len(self._guessed))
            self._pay(MODEL, self.costs.of(self._rows) - self._step_seconds + self._guessing)

    def _plan(self, guesser: Guesser, shares: Sequence[float]) -> tuple[int, int, float]:
        """How many of the requests, those of the largest shares first, get guesses of how many tokens; and the seconds
        that are saved then for each token."""
        rows, tokens, credit = self._rows, self._tokens, self._credit_of(MODEL)
        plain = tokens / self.costs.of(rows)
        best, found = LEAST_GAIN * plain, (0, 0)
        for count in range(1, min(len(shares), DRAFT_ROWS - rows) + 1):
            each, expected = guesser.seconds(count), tokens
            rights = [1.0] * count
            for length in range(1, (DRAFT_ROWS - rows) // count + 1):
                rights = [right * share for right, share in zip(rights, shares, strict=False)]
                expected += sum(rights)
                seconds = self.costs.of(rows + count * length) + length * each
                if seconds - self._step_seconds > credit:
                    break
                if (rate := expected / seconds) > best:
                    best, found = rate, (count, length)
        return *found, 1 / plain - 1 / best

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
        drafted, accepted = len(chunk.draft), count - 1
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        request.drafted, request.accepted = request.drafted + drafted, request.accepted + accepted
        assert request.guesses is not None
        guesses, by = request.guesses, request.guesses.last.by
        source = self.by_source[_SOURCES.get(by, "own_text" if by > 0 else "past_answers")]
        source[0], source[1] = source[0] + drafted, source[1] + accepted
        tried = accepted if request.finished else min(accepted + 1, drafted)
        guesses.right.saw(by, accepted, tried)
        self._right.saw(by, accepted, tried)
        self._pay(by, drafted * self._off - accepted * self._step_seconds / self._decoding)

    def stepped(self, batch: Batch, seconds: float) -> None:
        """A step that looked took so long, with making it; what it teaches, if there were no prompts in it."""
        rows, drafted = len(batch.step.ids), 0
        for chunk in batch.chunks:
            drafted += len(chunk.draft)
        self._off = 0.0
        if rows > DRAFT_ROWS or rows != len(batch.chunks) + drafted:  # requests that begin with one token come on top
            return
        if drafted and self.costs.known:
            expected = self.costs.of(rows) + self._guessing
            self._off = (min(seconds, 2 * expected) - expected) / drafted
        if drafted or self._credit.steps < 64 or not self._credit.steps % 16:  # plain ones are known by then
            self.costs.took(rows, seconds - self._guessed_in)

    def ended(self, request: Request) -> None:
        """Its answer may come again."""
        self._answers.add(request.tenant, request.tokens, request.prompt_length)

    def release(self, request: Request) -> None:
        """Frees what the guesser holds for a request that ended, or was preempted and will come back."""
        if self.guesser is not None:
            self.guesser.release(request)

    def forget(self, namespace: tuple[str, ...] | None) -> None:
        """Nothing is known any more of what requests of a namespace, or of any, have said."""
        self._answers.forget(None if namespace is None else namespace[0])
        if self.guesser is not None:
            self.guesser.forget(namespace)
