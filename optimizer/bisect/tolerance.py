"""The difference of two values, and the largest difference that is allowed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.passes.formats.rounding import ROUNDINGS
from enginewright.passes.ir.value_name import ValueName
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.weight_formats import Storage

from .values import Values, in_layers

ROUNDING = 1e-4
"""The largest relative error between two orders of the same float32 sums.

Models of all families show up to 2e-6. A weight with an error of 0.1 % shows 1e-3.
"""

SAME_INTEGERS = 8e-3
"""The tolerance for programs that round activations to integers or bf16.

One value in ten thousand is rounded in the other direction. That changes the values computed from it by 1e-3, and by
4e-3 in the worst case of a trained model.
"""

SPARSE = 1.0
"""The tolerance for a format that keeps two of every four values.

A column of a product loses a third on average, and may lose all.
"""

GAIN = 2e-3
"""The largest deviation of a common factor from 1 that rounding of weights may cause, besides chance."""

SAME_GAIN = 1e-3
"""The gain for two programs with the same rounding: their differences in rounding have no common direction.

A trained model has shown up to 2e-4.
"""


@dataclass(frozen=True)
class Tolerance:
    """The largest difference allowed between two values.

    Attributes:
        error: the largest relative error (``Difference.error``).
        chance: True if values may differ by chance, as after rounding to fewer bits. A missing bias is then searched
            for in differences within the tolerance too.
        gain: the largest deviation of a common factor from 1; None if common factors aren't checked.
    """

    error: float
    chance: bool = False
    gain: float | None = None

    def exceeded(
        self, a: FloatArray, b: FloatArray, bias: FloatArray | None = None, apart: Difference | None = None
    ) -> Difference | None:
        """Returns the difference of b from a, [T, N] each, if it exceeds the tolerance; None otherwise.

        Args:
            a, b: the two values.
            bias: [N], a bias that is part of a; None without one.
            apart: the difference, if it is known already.
        """
        gap = apart or difference(a, b)
        if not gap.error <= self.error:
            return gap
        if self.gain is None:
            return None
        # Errors of relative size s, independent from column to column and from one direction of the tokens' values to
        # the next, leave the gain off by s / sqrt(columns * directions); integers that are chosen for the least error
        # of the output, and not one by one, shrink it by s**2.
        beyond = abs(gap.gain - 1) - self.gain - gap.scatter**2
        if beyond > 0 and beyond > 5 * gap.scatter / np.sqrt(a.shape[1] * directions(a)):
            return gap
        missing = self.chance and bias is not None and bias.shape == a.shape[1:] and lacks(a, b, bias)
        return gap if missing else None

    def smallest_factor(self, a: FloatArray, found: Difference) -> float:
        """Returns the smallest common factor on all of b that ``exceeded`` would certainly find.

        A factor f adds f - 1 to the relative error of each column whose norm is at least the mean, and there is such a
        column.

        Args:
            a: the right value, [T, N].
            found: the present difference of b from a.
        """
        least = self.error + found.error
        if self.gain is not None and a.shape[1]:
            # A factor is apart from a by chance and by itself; ``exceeded`` sees it beyond what it allows to that.
            tried = np.geomspace(self.gain / 2, max(least, self.gain), _TRIED)
            scatter = np.hypot(found.scatter, tried)
            beyond = tried - abs(found.gain - 1) - self.gain - scatter**2
            seen = tried[beyond > 5 * scatter / np.sqrt(a.shape[1] * directions(a))]
            least = min(least, float(seen.min(initial=np.inf)))
        return 1 + least


_TRIED = 400
"""The number of factors that are tried. Each is about 1 % larger than the one before."""


def directions(a: FloatArray) -> float:
    """Returns the effective number of directions of the rows of a, [T, N].

    It is the participation ratio of the squared singular values: 1 if all rows are multiples of one row, T if all rows
    are orthogonal and of one length.
    """
    gram = (a @ a.T).astype(np.float64)
    power = float((gram**2).sum())
    return float(np.trace(gram)) ** 2 / power if power else 1.0


def lacks(a: FloatArray, b: FloatArray, bias: FloatArray) -> bool:
    """Returns True if b [T, N] is nearer to a minus ``bias`` [N] than to a, so that b probably lacks the bias."""
    apart = np.linalg.norm(b - a)
    return bool(np.linalg.norm(b - (a - bias)) < 0.5 * apart)


def comparable(a: Values, b: Values, layers: Collection[int] | None = None) -> list[ValueName]:
    """Returns the names of the values of both runs that can be compared, in the order of a. ``layers``: None for all
    layers.
    """
    both = [name for name, value in a.items() if name in b and b[name].shape == value.shape]
    return [name for name in both if in_layers(name.path, layers)]


def coarsest(recipe: Recipe) -> float:
    """Returns the largest relative error that a pass that rounds may cause in a product, by the coarsest format of a
    recipe.
    """
    blocks: list[Storage] = ["int8"] if recipe.weights.keep_blocks else []  # what they are multiplied with is rounded
    if recipe.sparse:
        return SPARSE
    storages = [*blocks, *(f.storage for f in recipe.weights.formats)]
    return max(ROUNDING, *(ROUNDINGS[storage].coarseness for storage in storages))


@dataclass(frozen=True)
class Difference:
    """The difference of value b from value a, [T, N] each.

    Attributes:
        error: the error of the worst column: the norm of its difference over all tokens, divided by the norm of a's
            column, or by the mean column norm of a if that is larger. So one wrong row of a weight is visible, and a
            column that is small compared to the others isn't measured by its rounding.
        gain: the factor on a that comes closest to b, by least squares.
        scatter: the norm of b - a divided by the norm of a, over all elements.
        token, column: the indices at which the two values differ most.
        a, b: the values there.
    """

    error: float
    gain: float
    scatter: float
    token: int
    column: int
    a: float
    b: float


def difference(a: FloatArray, b: FloatArray) -> Difference:
    """Returns the difference of two values [T, N]. A number that is not finite in one of them makes the error
    infinite.
    """
    if np.array_equal(a, b):
        first = (float(a[0, 0]), float(b[0, 0])) if a.size else (0.0, 0.0)
        return Difference(0.0, 1.0, 0.0, 0, 0, *first)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    same = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.where(same, 0.0, wide_b - wide_a)
    apart = np.where(np.isfinite(apart), apart, np.inf)
    token, column = np.unravel_index(int(np.abs(apart).argmax()), apart.shape) if apart.size else (0, 0)
    finite = np.where(np.isfinite(wide_a), wide_a, 0.0)
    columns = np.linalg.norm(finite, axis=0)
    average = float(np.sqrt((columns**2).mean())) if columns.size else 0.0
    off = np.linalg.norm(apart, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(off == 0, 0.0, off / np.maximum(columns, average))
    power = float((finite**2).sum())
    other = np.where(np.isfinite(wide_b), wide_b, 0.0)
    return Difference(
        error=float(relative.max(initial=0.0)),
        gain=float((finite * other).sum() / power) if power else 1.0,
        scatter=float(np.linalg.norm(apart) / np.sqrt(power)) if power else float(np.linalg.norm(apart) > 0),
        token=int(token),
        column=int(column),
        a=float(a[token, column]) if a.size else 0.0,
        b=float(b[token, column]) if b.size else 0.0,
    )
