"""Estimates the times of steps on this machine from measured ones, for the policy, for drafts, and for a draft model.

Times of kernels aren't linear in sizes. So an estimate is a fitted line, plus the residual of steps of the same size.

- ``DecodeTimes``: decode steps of few requests, by number of rows. Drafts need the time of one more row from the first
  step on; so the line begins with an expectation, and then follows the last steps.
- ``StepTimes``: any step. It takes ``a + b rows + c prompt tokens + d context + e products`` seconds: the requests that
  decode, the tokens of prompts, the tokens that decoding requests see, and those that prompts' tokens see. The five
  numbers, none below 0, are fitted to the mean steps of each size, so that rare sizes count as much as common ones. The
  first steps may come from a plan (``optimize plan BUNDLE --json``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular

from ..shared.contracts import DRAFT_ROWS
from ..shared.errors import RequestError, shown
from ..shared.targets import PROCESSOR
from .base import Chunk

_ROW = 0.07
"""The assumed time of a further row, as a share of a step of one row.

It fits small models on CPUs with 512-bit vectors.
"""
_KEPT = 0.995
"""The factor by which each new step lowers the weight of earlier ones in the fitted line, as a machine's load
changes.
"""
_LATELY = 0.97
"""The factor by which each new step lowers the weight of earlier ones in the mean residual of a number of rows."""
_LIKE_OTHERS = 2.0
"""The weight of the mean residual over all numbers of rows, in the estimated residual of one number: that of two
steps.
"""
_PRIOR = ((1, 4.0), (4, 2.0), (16, 0.25))
"""(rows, weight in steps) of assumed steps, which take the expected time. They steady the line before measurements."""
_MEMORY = 16.0
"""The approximate number of last steps of one size over which their time is averaged."""
_OUTLIER = 4.0
"""The limit for a measured time, as a multiple of the predicted one. A longer step was disturbed by another program."""
_LEAST_STEPS = 12
"""The number of steps that must be measured before ``StepTimes`` predicts anything."""
_MOST_BETWEEN_FITS = 128
_LEAST_OF_SIZE = 8
"""Steps of a size before its distance from the fit counts, and it is half or twice the fit at most."""
LEAST_SECONDS = 1e-6
"""The floor of every estimate, and of every measured step: no step with its Python code is shorter."""
_MOST_SECONDS = 1e6
"""The ceiling of every measured step, so that no sum over steps overflows."""
_MOST_ROW_TOKENS = 1000.0
"""The most prompt tokens that a decoded token counts as."""


def _bounded(seconds: float) -> float | None:
    """Returns a measured time limited to the bounds of a step; None for NaN, infinity or a negative time."""
    if not 0 <= seconds < math.inf:  # false for NaN
        return None
    return min(max(seconds, LEAST_SECONDS), _MOST_SECONDS)


class DecodeTimes:
    """Estimates the times of decode steps from their numbers of rows.

    Whatever times it gets, it never raises, and never estimates NaN, infinity or less than ``LEAST_SECONDS``. Before
    measurements, the estimate comes from ``optimize tune``, or from a line. A number of rows without recent steps gets
    the residual of recent steps of other numbers, because a changed speed of the machine affects all of them.

    Args:
        measured: tokens of a request -> seconds of steps in which it has 1, 2, ... rows, from ``optimize tune``.

    Attributes:
        measured: as passed; empty if nothing was measured.
        known: True if a step was timed.
    """

    def __init__(self, measured: Mapping[int, Sequence[float]] | None = None) -> None:
        self.measured = {context: of for context, of in sorted((measured or {}).items()) if _are_times(of)}
        self.known = False
        self._expected = [1 + _ROW * (rows - 1) for rows in range(DRAFT_ROWS + 1)]
        self._context = -math.inf
        self.at(0)
        self._base, self._slope = 0.0, 1.0  # seconds are base + slope * expected
        self._sums = [0.0] * 5  # over the steps, by weight: 1, expected, its square, seconds, expected * seconds
        self._scale = 0.0  # seconds of a step, over what is expected
        self._apart = [1.0] * (DRAFT_ROWS + 1)  # seconds of so many rows, over what the line says
        self._counts = [0.0] * (DRAFT_ROWS + 1)  # steps whose mean that is
        self._all_apart = 1.0  # the same of the last steps of any number of rows

    def at(self, context: float) -> None:
        """Sets the mean number of tokens of the requests in the next steps."""
        if not self.measured or abs(context - self._context) < 32:
            return
        self._context = context
        known, seconds = list(self.measured), list(self.measured.values())
        self._expected[1:] = [float(np.interp(context, known, of)) for of in zip(*seconds, strict=True)]

    def took(self, rows: int, seconds: float) -> None:
        """Learns from a step of ``rows`` rows that took ``seconds``.

        Steps of more than ``DRAFT_ROWS`` rows are ignored, and so are times that are NaN, infinite or negative.
        """
        if (bounded := _bounded(seconds)) is None or not 0 < rows <= DRAFT_ROWS:
            return
        seconds = min(bounded, 2 * self.seconds(rows)) if self.known else bounded  # where something else ran
        self.known, expected = True, self._expected[rows]
        of_step = 1, expected, expected * expected, seconds, expected * seconds
        self._sums = [_KEPT * before + now for before, now in zip(self._sums, of_step, strict=True)]
        steps, x, xx, y, xy = self._sums
        self._scale += (seconds / expected - self._scale) / steps
        weight = steps
        for at, prior in _PRIOR:
            value = self._expected[at]
            weight, x, xx = weight + prior, x + prior * value, xx + prior * value * value
            y, xy = y + prior * self._scale * value, xy + prior * self._scale * value * value
        spread = weight * xx - x * x
        self._slope = max((weight * xy - x * y) / spread, 0.0) if spread > 0 else self._scale
        self._base = (y - self._slope * x) / weight
        apart = seconds / self._line(rows)
        self._counts = [_LATELY * count for count in self._counts]
        self._counts[rows] += 1
        self._apart[rows] += (apart - self._apart[rows]) / self._counts[rows]
        self._all_apart += (apart - self._all_apart) * max(1 - _LATELY, 1 / steps)

    def _line(self, rows: int) -> float:
        return max(self._base + self._slope * self._expected[rows], LEAST_SECONDS)

    def seconds(self, rows: int) -> float:
        """Returns the estimated seconds of a step of ``rows`` rows, at most ``DRAFT_ROWS``."""
        rows = min(max(rows, 0), DRAFT_ROWS)
        count = self._counts[rows]
        apart = (count * self._apart[rows] + _LIKE_OTHERS * self._all_apart) / (count + _LIKE_OTHERS)
        return max(self._line(rows) * apart, LEAST_SECONDS)

    def describe(self) -> dict[str, float]:
        """Returns the estimates in microseconds, for ``LLM.info``."""
        if not self.known:
            return {}
        one = self._line(1)
        return {"step_us": 1e6 * one, "row_us": 1e6 * (self._line(DRAFT_ROWS) - one) / (DRAFT_ROWS - 1)}


def _are_times(seconds: Sequence[float]) -> bool:
    """Returns True if there is one time for each number of rows, each within the bounds of a step."""
    return len(seconds) == DRAFT_ROWS and all(_bounded(each) == each for each in seconds)


class StepSize(msgspec.Struct, frozen=True):
    """The sizes that determine the time of a step.

    Attributes:
        rows: the number of requests that decode.
        prompt: the number of prompt tokens.
        context: the tokens that the decoding requests see, in total.
        products: the tokens that the prompts' tokens see, in total.
        steps: the number of steps over which the sizes are summed.
    """

    rows: float = 0
    prompt: float = 0
    context: float = 0
    products: float = 0
    steps: float = 1

    @classmethod
    def from_chunks(cls, chunks: Sequence[Chunk]) -> StepSize:
        """Returns the sizes of a step with these chunks."""
        rows = prompt = context = products = 0
        for chunk in chunks:
            if chunk.count == 1:
                rows += 1
                context += chunk.start + 1
            else:
                prompt += chunk.count
                products += chunk.count * (2 * chunk.start + chunk.count) // 2
        return cls(rows, prompt, context, products)


class StepTimes:
    """Estimates the times of steps of any size.

    Whatever times it gets, it never raises, and never estimates NaN, infinity or less than ``LEAST_SECONDS``. Numbers
    for a kind of step that hasn't been measured are 0 until the first such step.

    Args:
        row_seconds: ``measured`` of ``DecodeTimes``.

    Attributes:
        decodes: the estimates of decode steps by rows.
        known: True if other steps can be estimated.
    """

    def __init__(self, row_seconds: Mapping[int, Sequence[float]] | None = None) -> None:
        self.decodes = DecodeTimes(row_seconds)
        self.known = False
        self._means: dict[tuple[int, int, int], list[float]] = {}  # weight, five features, seconds
        self._apart: dict[tuple[int, int, int], float] = {}  # seconds of a size, over what the five numbers say
        self._kinds: set[tuple[bool, bool]] = set()  # of the steps that the five numbers are fitted to
        self._fixed = self._row = self._prompt = self._context = self._product = 0.0
        self._steps = 0
        self._next_fit = _LEAST_STEPS

    def seconds(self, size: StepSize) -> float:
        """Returns the estimated seconds of a step of this size."""
        return max(self._fitted(size) * self._apart.get(_key(size), 1.0), LEAST_SECONDS)

    def _fitted(self, size: StepSize) -> float:
        seconds = (
            size.steps * self._fixed
            + size.rows * self._row
            + size.prompt * self._prompt
            + size.context * self._context
            + size.products * self._product
        )
        return max(seconds, LEAST_SECONDS)

    def prompt_within(self, seconds: float, rows: int, context: float) -> float:
        """Returns the number of prompt tokens that fit into a step of ``seconds`` in which ``rows`` requests decode."""
        left = seconds - self.seconds(StepSize(rows, 0, context))
        return max(left, 0.0) / self._prompt if self._prompt else math.inf

    def rows_within(self, seconds: float, context: float) -> int:
        """Returns the number of requests with ``context`` tokens each that can decode in a step of ``seconds``; at
        least 1.
        """
        each = self._row + context * self._context
        return max(1, int(min((seconds - self._fixed) / each, 1 << 20))) if each else 1 << 20

    @property
    def row_tokens(self) -> float:
        """The number of prompt tokens that take as long as one decoded token in a step with other requests."""
        return min(self._row / self._prompt, _MOST_ROW_TOKENS) if self._row and self._prompt else 2.0

    def describe(self) -> dict[str, float]:
        """Returns the fitted numbers in microseconds; 0 until they are known."""
        values = self._fixed, self._row, self._prompt, self._context, self._product
        names = "step_us", "row_us", "prompt_token_us", "context_token_us", "product_us"
        return {name: value * 1e6 for name, value in zip(names, values, strict=True)}

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learns from a step that took ``seconds``. NaN, infinity and negative times are ignored."""
        if (bounded := _bounded(seconds)) is None:
            return
        # Only a size that was measured says what is too long for it: the fit may know nothing of another one.
        mean = self._means.get(_key(size))
        if self.known and mean is not None:
            bounded = min(bounded, _OUTLIER * max(self.seconds(size), mean[6]))
        self._add(size, bounded)
        self._steps += 1
        if self._steps >= self._next_fit or (self.known and _kind(size.rows, size.prompt) not in self._kinds):
            self._fit()
            self._next_fit = self._steps + min(self._steps, _MOST_BETWEEN_FITS)

    def begin_with(self, plan: Path) -> None:
        """Takes the steps of a plan for this machine as measured ones. Raises RequestError if the file has none."""
        for size, seconds in planned_steps(plan):
            self._add(size, min(max(seconds, LEAST_SECONDS), _MOST_SECONDS))
        self._fit()

    def _add(self, size: StepSize, seconds: float) -> None:
        mean = self._means.setdefault(_key(size), [0.0] * 7)
        if mean[0] == 1 and 2 * seconds < mean[6]:  # the first of a size may have waited for memory
            mean[0] = 0
        mean[0] = weight = min(mean[0] + 1, _MEMORY)
        of_step = size.steps, size.rows, size.prompt, size.context, size.products, seconds
        mean[1:] = [before + (now - before) / weight for before, now in zip(mean[1:], of_step, strict=True)]

    def _fit(self) -> None:
        """Fits the numbers by least squares of relative errors. A number that would be negative is set to 0, and the
        rest are fitted again.

        Every mean is at least ``LEAST_SECONDS``, so that relative errors are finite.
        """
        means = np.array(list(self._means.values()))
        left = means[:, 1:6] / means[:, 6:]  # [sizes, 5]
        weights = np.sqrt(means[:, :1])
        scale = np.abs(left).max(0)
        used = [i for i in range(5) if scale[i] > 0]
        coefficients = np.zeros(5)
        while used:
            part, *_ = np.linalg.lstsq(left[:, used] / scale[used] * weights, weights[:, 0], rcond=1e-6)
            if (part >= 0).all():
                coefficients[used] = part / scale[used]
                break
            used.pop(int(part.argmin()))
        self._fixed, self._row, self._prompt, self._context, self._product = coefficients.tolist()
        self._apart = {
            key: min(max(mean[6] / self._fitted(StepSize(mean[2], mean[3], mean[4], mean[5], mean[1])), 0.5), 2.0)
            for key, mean in self._means.items()
            if mean[0] >= _LEAST_OF_SIZE
        }
        self._kinds = {_kind(mean[2], mean[3]) for mean in self._means.values()}
        self.known = True


def _kind(rows: float, prompt: float) -> tuple[bool, bool]:
    """Returns (decodes, has_prompt): True if a step decodes, and True if it has prompt tokens."""
    return rows > 0, prompt > 0


def _key(size: StepSize) -> tuple[int, int, int]:
    return int(size.rows).bit_length(), int(size.prompt).bit_length(), int(size.context).bit_length()


def planned_steps(plan: Path) -> list[tuple[StepSize, float]]:
    """Reads (size, seconds) of the steps of this machine from the output of ``optimize plan --json``.

    Raises RequestError naming the option.
    """
    try:
        plans = json.loads(read_regular(plan, most=MOST_JSON_BYTES))["plans"]
        steps = [s for p in plans if p["device"] == PROCESSOR for s in p["steps"]]
        timed_steps = [(_planned(step), float(step["seconds"])) for step in steps]
    except OSError as e:
        raise RequestError(f"scheduling: plan: {plan.name}: {e.strerror}", hint="Pass the path of a file.") from e
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
        raise RequestError(
            f"scheduling: plan: {plan.name} isn't a plan with steps: {shown(e, 300)}",
            hint="Write one with: optimize plan BUNDLE --gpu cpu --json > plan.json",
        ) from e
    recipes = {tuple(p["recipes"]) for p in plans if p["device"] == PROCESSOR}
    wrong = len(recipes) != 1 or any(not (math.isfinite(s) and s > 0) for _, s in timed_steps)
    if wrong or not timed_steps:
        raise RequestError(
            f"scheduling: plan: {plan.name} has steps of {len(recipes)} programs on the cpu, or times that are wrong",
            hint="Plan the bundle that is served: optimize plan BUNDLE --gpu cpu --json > plan.json",
        )
    return timed_steps


def _planned(step: dict[str, float]) -> StepSize:
    rows, prompt, context = int(step["rows"]), int(step["prompt"]), int(step["context"])
    return StepSize(rows, prompt, rows * context, prompt * prompt / 2)
