"""How far two values of a point are apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from enginewright.plugins.shared.contracts import FloatArray


@dataclass(frozen=True)
class Difference:
    """Value b beside value a, [T, N] each.

    Attributes:
        error: of the column that is worst: the norm of the difference over all tokens, relative to the norm of a's
            column, or of a column of a on average where that is larger. One row of a weight that is off shows, and
            what is small beside its neighbours is not judged by its rounding.
        gain: the factor that takes a nearest to b, by least squares.
        scatter: the norm of b - a relative to a's, over everything.
        token, column, a, b: where the two are farthest apart, and the values there.
    """

    error: float
    gain: float
    scatter: float
    token: int
    column: int
    a: float
    b: float


def difference(a: FloatArray, b: FloatArray) -> Difference:
    """Of a and b, [T, N]. What is not finite on one side alone makes the error infinite; what is the same counts 0."""
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
