"""The geometry of the page's charts, in units of the picture. The template draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Box = tuple[float, float, float, float]
"""A rectangle: x, y, width, height."""


@dataclass(frozen=True)
class Size:
    """The size of a picture. A chart is drawn for wide and for narrow windows, with letters of one size."""

    width: float
    height: float


WIDE, NARROW = Size(1040.0, 400.0), Size(340.0, 340.0)

_MANTISSAS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), tuple(float(n) for n in range(1, 10)))
_FEWEST_TICKS = 3
_SAME = 1 - 1e-9
"""The ratio up to which two values count as equal, because of rounding."""


@dataclass(frozen=True)
class LogAxis:
    """Maps values from ``low`` to ``high`` to positions from ``start`` to ``end`` of the picture."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> LogAxis:
        """Returns the axis of powers of ten around some positive values, at least one power wide.

        ``start`` and ``end``: the positions of the axis's ends in the picture.
        """
        low = 10.0 ** math.floor(math.log10(min(values)))
        high = 10.0 ** math.ceil(math.log10(max(values)))
        return cls(low, high if high > low else low * 10, start, end)

    @classmethod
    def near(cls, values: Sequence[float], start: float, end: float, margin: float) -> LogAxis:
        """Returns the axis from the smallest positive value to the largest, ``margin`` times wider at both ends.

        ``start`` and ``end``: the positions of the axis's ends in the picture.
        """
        return cls(min(values) / margin, max(values) * margin, start, end)

    def at(self, value: float) -> float:
        """Returns the position of a value; the nearer end for a value outside the axis."""
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> list[float]:
        """Returns the powers of ten on the axis."""
        return self._ticks(_MANTISSAS[0])

    def more_ticks(self) -> list[float]:
        """Returns the powers of ten on the axis; values between them too, if there are fewer than three."""
        for mantissas in _MANTISSAS:
            ticks = self._ticks(mantissas)
            if len(ticks) >= _FEWEST_TICKS:
                break
        return ticks

    def _ticks(self, mantissas: Sequence[float]) -> list[float]:
        decades = range(math.floor(math.log10(self.low)) - 1, math.ceil(math.log10(self.high)) + 1)
        values = (float(f"{m:g}e{d}") for d in decades for m in mantissas)
        return [v for v in values if self.low * _SAME <= v <= self.high / _SAME]


def treemap(sizes: Sequence[float], box: Box) -> list[Box]:
    """Returns rectangles that fill ``box``, with areas in proportion to ``sizes`` (positive, in descending order).

    They are as close to squares as rows allow: "Squarified treemaps", Bruls, Huizing and van Wijk, 2000.
    """
    total = sum(sizes)
    if not sizes or total <= 0:
        return []
    x, y, width, height = box
    scale = width * height / total
    areas = [size * scale for size in sizes]
    boxes: list[Box] = []
    while areas:
        side = min(width, height)
        row = 1
        while row < len(areas) and _worst(areas[: row + 1], side) <= _worst(areas[:row], side):
            row += 1
        row_area = sum(areas[:row])
        depth = row_area / side if side > 0 else 0.0
        at = 0.0
        for area in areas[:row]:
            length = area / depth if depth > 0 else 0.0
            boxes.append((x, y + at, depth, length) if width >= height else (x + at, y, length, depth))
            at += length
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
        areas = areas[row:]
    return boxes


def _worst(areas: Sequence[float], side: float) -> float:
    """Returns the largest ratio of long to short side among the rectangles of a row.

    Args:
        areas: the areas of the rectangles.
        side: the length of the row.
    """
    total = sum(areas)
    if total <= 0 or side <= 0:
        return math.inf
    return max(side * side * max(areas) / total**2, total**2 / (side * side * max(min(areas), 1e-12)))


def stacked(sizes: Sequence[float], length: float, total: float | None = None) -> list[tuple[float, float]]:
    """Returns (start, length) of consecutive pieces of a bar of ``length``, which represents ``total``, or the sum if
    it is None.
    """
    whole = sum(sizes) if total is None else total
    pieces, at = [], 0.0
    for size in sizes:
        piece = length * size / whole if whole > 0 else 0.0
        pieces.append((round(at, 2), round(piece, 2)))
        at += piece
    return pieces
