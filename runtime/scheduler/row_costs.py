"""What steps in which requests decode take, by their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..shared.step_costs import DRAFT_ROWS


class RowCosts:
    """What steps in which requests decode take, by how many rows they have.

    Expected is what ``optimize tune`` measured, or else a line as of small models on CPUs with 512-bit vectors. What
    steps take is a line through what is expected of the last ones, and how far those of each number of rows are from
    it: kernels take rows by twos, fours or sixteens. Numbers of rows that weren't seen lately are as far from it as
    the last steps were: what changed is the speed of the machine, then.

    Args:
        measured: tokens of a request -> seconds of steps in which it has 1, 2, ... rows.

    Attributes:
        measured: the same; empty where nobody measured that.
    """

    _ROW = 0.07
    """Seconds of a further row, in steps of one row."""
    _KEPT = 0.995
    """Of the weight of a step in the line, at each further one: the load of a machine changes."""
    _LATELY = 0.97
    """The same of steps of one number of rows."""
    _LIKE_OTHERS = 2.0
    """Steps of a number of rows that are taken to be as far from the line as all last ones."""
    _PRIOR = ((1, 4.0), (4, 2.0), (16, 0.25))
    """Rows and weights of steps that take what is expected."""

    def __init__(self, measured: Mapping[int, Sequence[float]] | None = None) -> None:
        self.measured = {context: of for context, of in sorted((measured or {}).items()) if len(of) == DRAFT_ROWS}
        self._expected = [1 + self._ROW * (rows - 1) for rows in range(DRAFT_ROWS + 1)]
        self._context = -math.inf
        self.at(0)
        self._base, self._slope = 0.0, 1.0  # seconds are base + slope * expected
        self._weight = self._sum = self._squares = self._seconds = self._products = 0.0
        self._scale = 0.0  # seconds of a step, over what is expected
        self._apart = [1.0] * (DRAFT_ROWS + 1)  # seconds of so many rows, over what the line says
        self._counts = [0.0] * (DRAFT_ROWS + 1)  # steps whose mean that is
        self._all_apart = 1.0  # the same of the last steps of any number of rows

    def at(self, context: float) -> None:
        """Steps are now of requests with so many tokens each, on average."""
        if not self.measured or abs(context - self._context) < 32:
            return
        self._context = context
        known, seconds = list(self.measured), list(self.measured.values())
        self._expected[1:] = [float(np.interp(context, known, of)) for of in zip(*seconds, strict=True)]

    def took(self, rows: int, seconds: float) -> None:
        """A step took so long."""
        if rows > DRAFT_ROWS:
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
        apart = seconds / self._line(rows)
        self._counts = [self._LATELY * count for count in self._counts]
        self._counts[rows] += 1
        self._apart[rows] += (apart - self._apart[rows]) / self._counts[rows]
        self._all_apart += (apart - self._all_apart) * max(1 - self._LATELY, 1 / self._weight)

    @property
    def known(self) -> bool:
        """Whether a step was timed."""
        return self._weight > 0

    def _line(self, rows: int) -> float:
        return max(self._base + self._slope * self._expected[rows], 1e-9)

    def of(self, rows: int) -> float:
        """Seconds of a step of so many rows."""
        count, others = self._counts[rows], self._LIKE_OTHERS
        return self._line(rows) * (count * self._apart[rows] + others * self._all_apart) / (count + others)

    def describe(self) -> dict[str, float]:
        """Microseconds."""
        if not self.known:
            return {}
        one = self._line(1)
        return {"step_us": 1e6 * one, "row_us": 1e6 * (self._line(DRAFT_ROWS) - one) / (DRAFT_ROWS - 1)}
