"""What the values at a point, beside those at others, tell of a fault."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch

from enginewright.plugins.ops.activation import ACTIVATIONS
from enginewright.plugins.shared.contracts import FloatArray

from .judge import lacks
from .points import Point, Values
from .sides import Side
from .values import difference

_CLOSE = 0.1
"""A guess explains a difference if no more than this of it is left."""

_LARGEST_HEAD = 256


def value_reasons(point: Point, a: Side, of_a: Values, of_b: Values, *, known: bool) -> list[str]:
    """Sentences about B's value at ``point`` beside A's; a mere factor isn't worth one if the reason is ``known``."""
    theirs, ours = of_a[point], of_b[point]
    apart = float(np.linalg.norm(ours - theirs))
    if not np.isfinite(apart):
        return ["B's value has numbers that are not finite"]
    reasons = [*_bias(point, a, theirs, ours), *_swapped(point, of_a, theirs, ours, apart)]
    reasons += _activation(point, of_a, theirs, ours, apart)
    if point.what in ("query", "key"):
        reasons += _rotated(theirs, ours)
    found = difference(theirs, ours)
    left = float(np.linalg.norm(ours - found.gain * theirs))
    if not (reasons or known) and abs(found.gain - 1) > 2e-4 and left < 0.5 * apart:
        reasons.append(f"B's value is {found.gain:.4f} times A's")
    return reasons


def same(a: FloatArray, b: FloatArray) -> bool:
    """Whether two tensors are one, but for rounding to few bits."""
    return bool(np.linalg.norm(a - b) < 0.2 * np.linalg.norm(a))


def _bias(point: Point, a: Side, theirs: FloatArray, ours: FloatArray) -> Iterator[str]:
    if point.what != "output":
        return
    for tensor in a.tensors(point.path):
        if tensor.role == "bias":
            bias = tensor.read()
            if bias.shape == theirs.shape[1:] and lacks(theirs, ours, bias):
                yield f"for every token B's value is A's less the bias {tensor}: it was dropped"


def _swapped(point: Point, of_a: Values, theirs: FloatArray, ours: FloatArray, apart: float) -> Iterator[str]:
    family = point.path.rpartition(".")[0]
    for other, value in of_a.items():
        alike = other != point and other.what == point.what and other.path.rpartition(".")[0] == family
        if alike and value.shape == ours.shape and np.linalg.norm(ours - value) < _CLOSE * apart:
            yield f"B's value is A's {other}: the two are swapped"


def _activation(point: Point, of_a: Values, theirs: FloatArray, ours: FloatArray, apart: float) -> Iterator[str]:
    """act(up) * gate in place of act(gate) * up."""
    family = point.path.rpartition(".")[0]
    outputs = [
        (other, value)
        for other, value in of_a.items()
        if other.what == "output" and other.path.rpartition(".")[0] == family and value.shape == theirs.shape
    ]
    if point.what != "input":
        return
    for kind, function in ACTIVATIONS.items():
        for one, gate in outputs:
            for other, up in outputs:
                if one is other:
                    continue
                right, wrong = (function(torch.from_numpy(x)).numpy() * y for x, y in ((gate, up), (up, gate)))
                size = np.linalg.norm(theirs)
                if np.linalg.norm(theirs - right) < 0.05 * size and np.linalg.norm(ours - wrong) < _CLOSE * apart:
                    yield f"{one.path} and {other.path} are swapped: B's value is {kind}({_end(other)}) * {_end(one)}"
                    return


def _end(point: Point) -> str:
    return point.path.rpartition(".")[2]


def _rotated(theirs: FloatArray, ours: FloatArray) -> Iterator[str]:
    """Values that differ by a rotation of pairs, the same for every token: positions that are off.

    Of heads of D values the first D, D/2 or D/4 turn in pairs (i, i + half of these) or neighbours, the first pair by
    one radian a position.
    """
    tokens, width = theirs.shape
    sizes = [size for size in range(min(width, _LARGEST_HEAD), 3, -1) if width % size == 0 and size % 2 == 0]
    for size, share, paired in product(sizes, (1, 2, 4), (True, False)):
        if size % (2 * share):
            continue
        heads = [x.reshape(tokens, -1, size)[..., : size // share] for x in (theirs, ours)]
        a, b = (_pairs(x, halves=paired) for x in heads)
        # Keys that are stored in bf16 have lengths that differ by 2^-8.
        if not np.allclose(np.abs(a), np.abs(b), rtol=1e-2, atol=1e-2 * float(np.abs(a).max())):
            continue
        angle = np.angle((b * a.conj()).sum((0, 1)))  # [pairs]
        left, apart = np.linalg.norm(b - a * np.exp(1j * angle)), np.linalg.norm(b - a)
        if left < _CLOSE * apart and apart > 0.99 * np.linalg.norm(ours - theirs):
            yield (
                f"B's value is A's, turned by the same for every token: the first pair of a head by {angle[0]:+.3f} "
                f"radians, so the position that rope has is off by {angle[0]:+.3g}"
            )
            return


def _pairs(x: FloatArray, *, halves: bool) -> np.ndarray:
    """[T, N, D] -> complex [T, N, D/2]."""
    half = x.shape[-1] // 2
    first, second = (x[..., :half], x[..., half:]) if halves else (x[..., 0::2], x[..., 1::2])
    return np.asarray(first + 1j * second)
