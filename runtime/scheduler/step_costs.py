"""What a step takes on this machine, by what steps took.

A step takes ``a + b rows + c prompt tokens + d context + e products`` seconds: so many requests that decode, the tokens
that they read, and for each prompt token those that it sees. The five numbers are fitted, none below 0, to the mean
steps of each size, so that sizes that are rare count as much as those that are common; how far the mean of a size is
from the fit is kept, as kernels aren't straight lines. The first steps may come from a plan
(``optimize plan BUNDLE --json``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginewright.runtime.bundle.regular_file import MOST_JSON_BYTES, read_regular

from ..shared.errors import RequestError, shown
from .base import Chunk

_MEMORY = 16.0
"""Steps of one size that the mean of their times goes back to."""
_OUTLIER = 4.0
"""A step that takes so many times as long as predicted counts as one that takes so long: something else ran."""
_LEAST_STEPS = 12
"""Before so many steps were measured, nothing is predicted."""
_MOST_BETWEEN_FITS = 128
_LEAST_OF_SIZE = 8
"""Steps of a size before its distance from the fit counts, and it is half or twice the fit at most."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What decides how long a step takes.

    Attributes:
        rows: requests that decode.
        prompt: tokens of prompts.
        context: tokens that the decoding requests see, over all of them.
        products: tokens that the prompts' tokens see, over all of them.
        steps: over so many steps together.
    """

    rows: float = 0
    prompt: float = 0
    context: float = 0
    products: float = 0
    steps: float = 1

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> StepSize:
        """Of a step."""
        rows = prompt = context = products = 0
        for chunk in chunks:
            if chunk.count == 1:
                rows += 1
                context += chunk.start + 1
            else:
                prompt += chunk.count
                products += chunk.count * (2 * chunk.start + chunk.count) // 2
        return cls(rows, prompt, context, products)


class StepCosts:
    """See the module. ``known`` says whether anything can be predicted yet."""

    def __init__(self) -> None:
        self.known = False
        self._means: dict[tuple[int, int, int], list[float]] = {}  # weight, five features, seconds
        self._apart: dict[tuple[int, int, int], float] = {}  # seconds of a size, over what the five numbers say
        self._fixed = self._row = self._prompt = self._context = self._product = 0.0
        self._steps = 0
        self._next_fit = _LEAST_STEPS

    def seconds(self, size: StepSize) -> float:
        """Of such a step."""
        return self._fitted(size) * self._apart.get(_key(size), 1.0)

    def _fitted(self, size: StepSize) -> float:
        return (
            size.steps * self._fixed
            + size.rows * self._row
            + size.prompt * self._prompt
            + size.context * self._context
            + size.products * self._product
        )

    def prompt_within(self, seconds: float, rows: int, context: float) -> float:
        """How many tokens of prompts fit into a step of ``seconds`` in which ``rows`` requests decode."""
        left = seconds - self.seconds(StepSize(rows, 0, context))
        return max(left, 0.0) / self._prompt if self._prompt else math.inf

    def rows_within(self, seconds: float, context: float) -> int:
        """How many requests with ``context`` tokens each can decode in a step of ``seconds``; 1 at least."""
        each = self._row + context * self._context
        return max(1, int(min((seconds - self._fixed) / each, 1 << 20))) if each else 1 << 20

    @property
    def row_tokens(self) -> float:
        """How many prompt tokens cost as much as a token that is decoded in a step with others."""
        return self._row / self._prompt if self._row and self._prompt else 2.0

    def describe(self) -> dict[str, float]:
        """Microseconds of a step, and of each of what it has; 0 until they are known."""
        found = self._fixed, self._row, self._prompt, self._context, self._product
        names = "step_us", "row_us", "prompt_token_us", "context_token_us", "product_us"
        return {name: value * 1e6 for name, value in zip(names, found, strict=True)}

    def observe(self, size: StepSize, seconds: float) -> None:
        """A step took so long."""
        if self.known:
            seconds = min(seconds, _OUTLIER * self.seconds(size))
        self._add(size, seconds)
        self._steps += 1
        if self._steps >= self._next_fit:
            self._fit()
            self._next_fit = self._steps + min(self._steps, _MOST_BETWEEN_FITS)

    def begin_with(self, plan: Path) -> None:
        """Takes the steps of a plan of this machine. Raises RequestError if the file has none."""
        for size, seconds in planned_steps(plan):
            self._add(size, seconds)
        self._fit()

    def _add(self, size: StepSize, seconds: float) -> None:
        mean = self._means.setdefault(_key(size), [0.0] * 7)
        if mean[0] == 1 and 2 * seconds < mean[6]:  # the first of a size may have waited for memory
            mean[0] = 0
        mean[0] = weight = min(mean[0] + 1, _MEMORY)
        mean[1] += (size.steps - mean[1]) / weight
        mean[2] += (size.rows - mean[2]) / weight
        mean[3] += (size.prompt - mean[3]) / weight
        mean[4] += (size.context - mean[4]) / weight
        mean[5] += (size.products - mean[5]) / weight
        mean[6] += (seconds - mean[6]) / weight

    def _fit(self) -> None:
        """Least squares of the relative errors; a number that comes out negative is 0, and the others are fitted."""
        means = np.array(list(self._means.values()))
        left = means[:, 1:6] / means[:, 6:]  # [sizes, 5]
        weights = np.sqrt(means[:, :1])
        scale = np.abs(left).max(0)
        used = [i for i in range(5) if scale[i] > 0]
        found = np.zeros(5)
        while used:
            part, *_ = np.linalg.lstsq(left[:, used] / scale[used] * weights, weights[:, 0], rcond=1e-6)
            if (part >= 0).all():
                found[used] = part / scale[used]
                break
            used.pop(int(part.argmin()))
        self._fixed, self._row, self._prompt, self._context, self._product = found.tolist()
        self._apart = {
            key: min(
                max(mean[6] / max(self._fitted(StepSize(mean[2], mean[3], mean[4], mean[5], mean[1])), 1e-9), 0.5), 2.0
            )
            for key, mean in self._means.items()
            if mean[0] >= _LEAST_OF_SIZE
        }
        self.known = True


def _key(size: StepSize) -> tuple[int, int, int]:
    return int(size.rows).bit_length(), int(size.prompt).bit_length(), int(size.context).bit_length()


def planned_steps(plan: Path) -> list[tuple[StepSize, float]]:
    """The steps of this machine in what ``optimize plan --json`` printed. Raises RequestError naming the option."""
    try:
        plans = json.loads(read_regular(plan, most=MOST_JSON_BYTES))["plans"]
        steps = [s for p in plans if p["device"] == "cpu" for s in p["steps"]]
        found = [(_planned(step), float(step["seconds"])) for step in steps]
    except OSError as e:
        raise RequestError(f"scheduling: plan: {plan.name}: {e.strerror}", hint="Pass the path of a file.") from e
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
        raise RequestError(
            f"scheduling: plan: {plan.name} isn't a plan with steps: {shown(e, 300)}",
            hint="Write one with: optimize plan BUNDLE --gpu cpu --json > plan.json",
        ) from e
    recipes = {tuple(p["recipes"]) for p in plans if p["device"] == "cpu"}
    wrong = len(recipes) != 1 or any(not (math.isfinite(s) and s > 0) for _, s in found)
    if wrong or not found:
        raise RequestError(
            f"scheduling: plan: {plan.name} has steps of {len(recipes)} programs on the cpu, or times that are wrong",
            hint="Plan the bundle that is served: optimize plan BUNDLE --gpu cpu --json > plan.json",
        )
    return found


def _planned(step: dict[str, float]) -> StepSize:
    rows, prompt, context = int(step["rows"]), int(step["prompt"]), int(step["context"])
    return StepSize(rows, prompt, rows * context, prompt * prompt / 2)
