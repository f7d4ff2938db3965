"""Speculation: tokens that are likely next are computed together with the last known one, and drawn as always.

Logits are bit for bit the same however rows are batched, and each position has its own random number, so what is drawn
behind a draft is what plain decoding would have drawn there: a draft is accepted as far as it is equal to that. Nothing
but time depends on it. Keys and values of what wasn't accepted lie behind the request's last token, where nobody looks,
until they are overwritten.

How long a draft is follows from two things that are measured meanwhile: how often guesses of its kind were right, and
what steps of more rows take. Where it wouldn't pay there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from enginewright.plugins.shared.contracts import NO_TOKEN, ExecutorCaps, StepOutput
from enginewright.plugins.shared.errors import RequestError
from enginewright.runtime.requests.lookup import Guess, Guesses, PastAnswers, RightTokens
from enginewright.runtime.requests.request import Request

from .base import Batch, Chunk
from .step_outputs import logprobs_of

ROWS = 16
"""Rows of all requests that decode in a step, drafts among them: more cost as much as they bring."""
LEAST_GAIN = 1.03
"""A draft is expected to give so many times as many tokens a second, as what it costs besides isn't measured."""


class RowCosts:
    """What steps in which requests decode take, by how many rows they have.

    Expected is what ``optimize tune`` measured, or else a line as of small models on CPUs with 512-bit vectors. What
    steps take is a line through what is expected of the last ones, and how far those of each number of rows are from
    it: kernels take rows by twos, fours or sixteens, and the machine may have become slower.

    Args:
        measured: tokens of a request -> seconds of steps in which it has 1, 2, ... rows.

    Attributes:
        measured: the same; empty where nobody measured that.
    """

    _ROW = 0.07
    """Seconds of a further row, in steps of one row."""
    _KEPT = 0.995
    """Of the weight of a step, at each further one: the load of a machine changes."""
    _PRIOR = ((1, 4.0), (4, 2.0), (16, 0.25))
    """Rows and weights of steps that take what is expected."""

    def __init__(self, measured: Mapping[int, Sequence[float]] | None = None) -> None:
        self.measured = {context: of for context, of in sorted((measured or {}).items()) if len(of) == ROWS}
        self._expected = [1 + self._ROW * (rows - 1) for rows in range(ROWS + 1)]
        self._context = -math.inf
        self.at(0)
        self._base, self._slope = 0.0, 1.0  # seconds are base + slope * expected
        self._weight = self._sum = self._squares = self._seconds = self._products = 0.0
        self._scale = 0.0  # seconds of a step, over what is expected
        self._apart = [1.0] * (ROWS + 1)  # seconds of so many rows, over what the line says
        self._counts = [2] * (ROWS + 1)  # steps whose mean that is; two that are on the line to begin with

    def at(self, context: float) -> None:
        """Steps are now of requests with so many tokens each, on average."""
        if not self.measured or abs(context - self._context) < 32:
            return
        self._context = context
        known, seconds = list(self.measured), list(self.measured.values())
        self._expected[1:] = [float(np.interp(context, known, of)) for of in zip(*seconds, strict=True)]

    def took(self, rows: int, seconds: float) -> None:
        """A step took so long."""
        if rows > ROWS:
            return
        if self._weight:
            seconds = min(seconds, 2 * self.of(rows))  # something else ran
        expected = self._expected[rows]
        self._weight = self._KEPT * self._weight + 1
        self._sum = self._KEPT * self._sum + expected
        self._squares = self._KEPT * self._squares + expected * expected
        self._seconds = self._KEPT * self._seconds + seconds
        self._products = self._KEPT * self._products + expected * seconds
        self._scale += (seconds / expected - self._scale) / self._weight
        weight, x, xx, y, xy = self._weight, self._sum, self._squares, self._seconds, self._products
        for at, prior in self._PRIOR:
            value = self._expected[at]
            weight, x, xx = weight + prior, x + prior * value, xx + prior * value * value
            y, xy = y + prior * self._scale * value, xy + prior * self._scale * value * value
        spread = weight * xx - x * x
        self._slope = max((weight * xy - x * y) / spread, 0.0) if spread > 0 else self._scale
        self._base = (y - self._slope * x) / weight
        self._counts[rows] = min(self._counts[rows] + 1, 32)
        apart = seconds / self._line(rows)
        self._apart[rows] += (apart - self._apart[rows]) / self._counts[rows]

    def _line(self, rows: int) -> float:
        return max(self._base + self._slope * self._expected[rows], 1e-9)

    def of(self, rows: int) -> float:
        """Seconds of a step of so many rows."""
        return self._line(rows) * self._apart[rows]

    def describe(self) -> dict[str, float]:
        """Microseconds."""
        if not self._weight:
            return {}
        one = self._line(1)
        return {"step_us": 1e6 * one, "row_us": 1e6 * (self._line(ROWS) - one) / (ROWS - 1)}


class Drafts:
    """Of all requests. Raises RequestError if the executor can't compute several rows of a request ahead.

    Attributes:
        drafted, accepted: tokens so far; past: of both, those that were found in past answers.
        costs: of steps.
    """

    def __init__(self, caps: ExecutorCaps) -> None:
        if not caps.verifies:
            raise RequestError(
                "speculate: this target doesn't promise a token's bits with others behind it",
                hint="Use the cpu target.",
            )
        self.drafted = self.accepted = 0
        self.past = [0, 0]
        self.costs = RowCosts(caps.row_seconds)
        self._answers = PastAnswers()
        self._right = RightTokens()
        self._rows = 0  # of the step that is being made
        self._tokens = 0.0  # that are expected of it

    def describe(self) -> dict[str, object]:
        """For ``LLM.info``."""
        found = {"drafted": self.drafted, "accepted": self.accepted}
        found |= {"drafted_from_past_answers": self.past[0], "accepted_from_past_answers": self.past[1]}
        return {**found, **self.costs.describe()}

    def begin_step(self, running: Sequence[Request]) -> None:
        """These decode in the next one, at most."""
        self._rows, self._tokens = len(running), float(len(running))
        if self.costs.measured and running:
            self.costs.at(sum(request.computed for request in running) / len(running))

    def of(self, request: Request) -> Sequence[int]:
        """A draft for a request that decodes; empty where there is none that would pay."""
        most = min(ROWS - self._rows, request.max_tokens - request.output_length - 1)
        if most < 1 or not request.params.speculate or request.search is not None:
            return ()
        if request.guesses is None:
            request.guesses = Guesses(request.tokens, self._right)
        own = request.guesses
        guess = own.lookup.next(most)
        found = 0 if guess is None else guess.by
        guess = self._answers.next(request.tenant, request.tokens, most, found) or guess
        if guess is None:
            return ()
        length = self._length(own.right.share(guess.by), len(guess.tokens))
        if not length:
            own.right.forget(guess.by)
            self._right.forget(guess.by)
            return ()
        own.last = Guess(guess.tokens[:length], guess.by)
        return own.last.tokens

    def _length(self, share: float, most: int) -> int:
        """How many tokens of a guess make the step's tokens a second the most, each right with this probability."""
        seconds, rows, tokens = self.costs.of(self._rows), self._rows, self._tokens
        best, found, expected, right = LEAST_GAIN * tokens / seconds, 0, tokens, 1.0
        for length in range(1, most + 1):
            right *= share
            expected += right
            if (rate := expected / self.costs.of(rows + length)) > best:
                best, found, self._tokens = rate, length, expected
        self._rows += found
        return found

    def verify(self, chunk: Chunk, tokens: Sequence[int], output: StepOutput, first: int) -> None:
        """Gives a request what was drawn, ``tokens`` in rows from ``first`` on, as far as its draft is equal to it."""
        request, count = chunk.request, 0
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
        if by < 0:
            self.past = [self.past[0] + drafted, self.past[1] + accepted]
        tried = accepted if request.finished else min(accepted + 1, drafted)
        guesses.right.saw(by, accepted, tried)
        self._right.saw(by, accepted, tried)

    def stepped(self, batch: Batch, seconds: float) -> None:
        """A step took so long, with making it; what it teaches, if there were no prompts in it."""
        if all(chunk.count == 1 + len(chunk.draft) for chunk in batch.chunks):
            self.costs.took(len(batch.step.ids), seconds)

    def ended(self, request: Request) -> None:
        """Its answer may come again."""
        self._answers.add(request.tenant, request.tokens, request.prompt_length)
