"""Why two values of a point part: what of the tensors and values on both sides tells."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from enginewright.plugins.shared.contracts import FloatArray

from .explain_values import same, value_reasons
from .points import Point, Values
from .sides import Side, Tensor

_SAME = 1e-6
"""Relative difference below which two tensors are one."""


def explain(
    point: Point,
    a: Side,
    of_a: Values,
    of_b: Values,
    tensors: Sequence[Tensor],
    beside: Sequence[Tensor],
    *,
    chance: bool,
) -> list[str]:
    """Sentences about what is wrong at ``point``, the most telling ones first; maybe none.

    Args:
        point: where the sides part first.
        a: the side that is right.
        of_a, of_b: their values.
        tensors: b's that made the value.
        beside: these, and those of what is fused with it.
        chance: b's weights have been rounded, and a's not.
    """
    swapped = _swapped(a, beside, point.path)
    found = [_tensor_reason(a, t, beside, chance=chance) for t in tensors if not (swapped and t.role == "weight")]
    reasons = [*swapped, *(reason for reason in found if reason is not None)]
    reasons += [f"B doesn't add the bias {tensor}" for tensor in missing_biases(a, tensors)]
    return reasons + value_reasons(point, a, of_a, of_b, known=bool(reasons))


def _twin(side: Side, tensor: Tensor, among: Sequence[Tensor]) -> Tensor | None:
    """The other side's tensor of the same role in the same module; of several, the one of the same number."""
    number = [t for t in among if (t.path, t.role) == (tensor.path, tensor.role)].index(tensor)
    theirs = [t for t in side.tensors(tensor.path) if t.role == tensor.role]
    return theirs[number] if number < len(theirs) else None


def _tensor_reason(a: Side, tensor: Tensor, among: Sequence[Tensor], *, chance: bool) -> str | None:
    twin = _twin(a, tensor, among)
    if twin is None:
        if tensor.role == "bias" and a.tensors(tensor.path):
            return f"A adds no bias there, B adds {tensor}"
        return None
    theirs, ours = twin.read(), tensor.read()
    if tensor.role == "bias" and theirs.any() != ours.any():
        if ours.any():
            return f"A adds no bias there, as it is all zeros; B adds {tensor}"
        return f"B doesn't add the bias {tensor}: it is all zeros"
    if theirs.shape != ours.shape:
        return f"{tensor} has shape {list(ours.shape)}, on side A {list(theirs.shape)}"
    found = how_tensors_part(theirs, ours, chance=chance)
    return None if found is None else f"{tensor} {found}"


def how_tensors_part(a: FloatArray, b: FloatArray, *, chance: bool) -> str | None:
    """What b is to a, two tensors of one shape, as words behind b's name; None if they are the same.

    ``chance``: one of the two has been rounded to fewer bits.
    """
    power, apart = float(np.square(a, dtype=np.float64).sum()), float(np.linalg.norm(b - a))
    if apart <= _SAME * np.sqrt(power):
        return None
    if not np.isfinite(b).all():
        return "has values that are not finite"
    if not power:
        return "is all zeros on side A, and not on B"
    if not b.any():
        return "is all zeros"
    scatter = apart / np.sqrt(power)
    gain = float((a.astype(np.float64) * b).sum() / power)
    left = float(np.linalg.norm(b - gain * a)) / np.sqrt(power)
    by_chance = 5 * scatter / np.sqrt(a.size) + scatter**2 if chance else 0.0
    if abs(gain - 1) > 2e-4 + by_chance and (chance or left < 0.2 * abs(gain - 1)):
        return f"is {gain:.4f} times what it is on side A"
    if chance:
        return None
    rows_a, rows_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    off = np.linalg.norm(rows_b - rows_a, axis=1) > _SAME * np.maximum(np.linalg.norm(rows_a, axis=1), 1e-30)
    where = np.flatnonzero(off)
    if a.ndim < 2 or len(where) == len(off):
        place = np.unravel_index(int(np.abs(b - a).argmax()), a.shape)
        values = f"{a[place]:.6g} on side A, {b[place]:.6g} on B"
        return f"differs by {scatter:.2g} in all, most at {[int(i) for i in place]}: {values}"
    some = how_tensors_part(rows_a[where], rows_b[where], chance=False)
    return f"differs in {len(where)} of {len(off)} rows, {_rows(where)}; there it {some}"


def _rows(rows: np.ndarray) -> str:
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return f"{first}:{last + 1}"
    return f"the first of them {first}"


def missing_biases(a: Side, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The biases of a's modules that b's ``tensors`` have none of."""
    roles: dict[str, set[str]] = {}
    for tensor in tensors:
        roles.setdefault(tensor.path, set()).add(tensor.role)
    without = [path for path, there in roles.items() if "bias" not in there]
    return [t for path in without for t in a.tensors(path) if t.role == "bias"]


def _swapped(a: Side, tensors: Sequence[Tensor], path: str) -> list[str]:
    """Modules of one fused product, of which one is at ``path``, that have each other's weight."""
    weights = [t for t in tensors if t.role == "weight"]
    reasons = []
    for one, other in combinations(weights, 2):
        first, second = _twin(a, one, tensors), _twin(a, other, tensors)
        if first is None or second is None or one.path == other.path or path not in (one.path, other.path):
            continue
        ours, theirs = (one.read(), other.read()), (first.read(), second.read())
        if theirs[0].shape == theirs[1].shape and same(ours[0], theirs[1]) and same(ours[1], theirs[0]):
            reasons.append(f"{one} and {other} are swapped: each has the other's values")
    return reasons
