"""When two values of a point are one value but for what has to be expected, and when they are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.plugins.shared.contracts import FloatArray

from .points import Point, Values, in_layers
from .values import Difference, difference

ROUNDING = 1e-4
"""Largest relative error between two orders of the same float32 sums. Up to 2e-6 is seen on models of all families; a
weight that is off by 0.1 % shows 1e-3."""

SAME_INTEGERS = 8e-3
"""The same where activations are rounded to integers or bf16 within: one in ten thousand falls on the other side, and
makes 1e-3 of the values that it goes into, and 4e-3 in the worst of a trained model."""

COARSENESS: Mapping[str, float] = {"f32": ROUNDING, "bf16": 0.02, "int8": 0.2, "fp8": 0.4, "int4": 0.6}
"""Largest relative error that rounding a weight to such a format, and what it is multiplied with, may make of a column
of a product. A quarter of it is usual in the worst one, of some 100,000 columns of a trained model."""

SPARSE = 1.0
"""The same where a format keeps two of every four: what goes of a column of a product is a third of it on average, and
may be all of it."""

GAIN = 2e-3
"""Rounding weights may make values larger or smaller on the whole by this much, and by what chance makes of it."""

SAME_GAIN = 1e-3
"""The same of two programs that round alike: what falls on the other side does so as often upwards as downwards. Up to
2e-4 is seen on a trained model."""


@dataclass(frozen=True)
class Judge:
    """What is allowed between two values.

    Attributes:
        tolerance: of the largest relative error (``Difference.error``).
        chance: values may be apart by chance, as after rounding to fewer bits: then the lack of a bias is looked for in
            what the tolerance would let pass.
        gain: what a common factor may be off from 1, which is looked for as well; None: nothing is looked for.
    """

    tolerance: float
    chance: bool = False
    gain: float | None = None

    def parts(
        self, a: FloatArray, b: FloatArray, bias: FloatArray | None = None, apart: Difference | None = None
    ) -> Difference | None:
        """How b is apart from a, [T, N] each, if it is by more than is allowed.

        ``bias`` [N]: what a was added to. ``apart``: their difference, where it is known.
        """
        found = apart or difference(a, b)
        if not found.error <= self.tolerance:
            return found
        if self.gain is None:
            return None
        # Errors of relative size s, independent from column to column and from one direction of the tokens' values to
        # the next, leave the gain off by s / sqrt(columns * directions); integers that are chosen for the least error
        # of the output, and not one by one, shrink it by s**2.
        beyond = abs(found.gain - 1) - self.gain - found.scatter**2
        if beyond > 0 and beyond > 5 * found.scatter / np.sqrt(a.shape[1] * directions(a)):
            return found
        missing = self.chance and bias is not None and bias.shape == a.shape[1:] and lacks(a, b, bias)
        return found if missing else None

    def smallest_factor(self, a: FloatArray, found: Difference) -> float:
        """The least factor that would be seen for certain, if b were all multiplied by it.

        ``found``: how b is apart from ``a`` as it is. A factor f adds (f - 1) to the relative error of each column, of
        which at least one is no smaller than the average.
        """
        least = self.tolerance + found.error
        if self.gain is not None and a.shape[1]:
            # A factor is apart from a by chance and by itself; ``parts`` sees it beyond what it allows to that.
            tried = np.geomspace(self.gain / 2, max(least, self.gain), _TRIED)
            scatter = np.hypot(found.scatter, tried)
            beyond = tried - abs(found.gain - 1) - self.gain - scatter**2
            seen = tried[beyond > 5 * scatter / np.sqrt(a.shape[1] * directions(a))]
            least = min(least, float(seen.min(initial=np.inf)))
        return 1 + least


_TRIED = 400
"""Factors that are tried, each larger than the one before by a hundredth or so."""


def directions(a: FloatArray) -> float:
    """How many directions the rows of a, [T, N], have: 1 if all are multiples of one, T if all are alike in size and at
    right angles (the participation ratio of the singular values' squares)."""
    gram = (a @ a.T).astype(np.float64)
    power = float((gram**2).sum())
    return float(np.trace(gram)) ** 2 / power if power else 1.0


def lacks(a: FloatArray, b: FloatArray, bias: FloatArray) -> bool:
    """Whether b [T, N] is nearer to a without the bias [N] than to a."""
    apart = np.linalg.norm(b - a)
    return bool(np.linalg.norm(b - (a - bias)) < 0.5 * apart)


def comparable(a: Values, b: Values, layers: Collection[int] | None = None) -> list[Point]:
    """The points of both sides that can be compared, in the order of a; of some layers only, or all."""
    both = [point for point, value in a.items() if point in b and b[point].shape == value.shape]
    return [point for point in both if in_layers(point.path, layers)]


def coarsest(recipe: Recipe) -> float:
    """What a pass that is not exact may make of a product, by the coarsest format of the recipe."""
    blocks = ["int8"] if recipe.weights.keep_blocks else []  # what they are multiplied with is rounded
    if recipe.sparse:
        return SPARSE
    return max(COARSENESS[storage] for storage in [*blocks, *(f.storage for f in recipe.weights.formats)])
