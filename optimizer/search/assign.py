"""Chooses an option for each unit by an additive model: the smallest size within a KL, or the least KL within a size.

The cost of an option is assumed to be independent of the other units: the KL of an assignment is the sum over its
units. Minimising KL + price * bytes for each unit, for every price, gives the lower convex hull of all assignments
(Everett, 1963). The rest of a budget between two points of the hull is spent on single changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The options of one unit: the size and the predicted KL of each."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]


@dataclass(frozen=True)
class Assignment:
    """A choice of one option for each unit of a list of ``Options``.

    Attributes:
        chosen: for each unit, the index of its option.
        size: the sum of the sizes of these options.
        cost: the sum of their predicted KL.
    """

    chosen: tuple[int, ...]
    size: int
    cost: float

    @classmethod
    def from_choices(cls, units: Sequence[Options], chosen: Sequence[int]) -> Assignment:
        """Returns the assignment of the options with these indices."""
        pairs = list(zip(units, chosen, strict=True))
        return cls(tuple(chosen), sum(u.sizes[o] for u, o in pairs), sum(u.costs[o] for u, o in pairs))


def pareto_curve(units: Sequence[Options]) -> list[Assignment]:
    """Returns the assignments on the lower convex hull, from the least KL to the fewest bytes."""
    hulls = [_hull(u) for u in units]
    steps = []  # price of a byte saved, unit, how far along its hull
    for i, (unit, hull) in enumerate(zip(units, hulls, strict=True)):
        for at in range(1, len(hull)):
            before, after = hull[at - 1], hull[at]
            price = (unit.costs[after] - unit.costs[before]) / (unit.sizes[before] - unit.sizes[after])
            steps.append((price, i, at))
    chosen = [hull[0] for hull in hulls]
    curve = [Assignment.from_choices(units, chosen)]
    for _, i, at in sorted(steps):  # along a hull the prices rise, so that a unit's steps come in order
        chosen[i] = hulls[i][at]
        curve.append(Assignment.from_choices(units, chosen))
    return curve


def fewest_bytes(units: Sequence[Options], most_cost: float) -> Assignment | None:
    """Returns the smallest assignment with a predicted KL of at most ``most_cost``; None if there is none."""
    fitting = [a for a in pareto_curve(units) if a.cost <= most_cost]
    if not fitting:
        return None
    sizes, costs = [u.sizes for u in units], [u.costs for u in units]
    return Assignment.from_choices(units, _spend(fitting[-1].chosen, most_cost, sizes, costs))


def least_cost(units: Sequence[Options], most_bytes: int) -> Assignment | None:
    """Returns the assignment with the least predicted KL that takes at most ``most_bytes``; None if there is none."""
    fitting = [a for a in pareto_curve(units) if a.size <= most_bytes]
    if not fitting:
        return None
    sizes, costs = [u.sizes for u in units], [u.costs for u in units]
    return Assignment.from_choices(units, _spend(fitting[0].chosen, most_bytes, costs, sizes))


@dataclass(frozen=True)
class Limit:
    """A limit on the sum of an amount, such as bytes or time.

    Attributes:
        taken: for each unit, the amount of each option.
        most: the largest sum.
    """

    taken: tuple[tuple[int, ...], ...]
    most: int

    def of(self, chosen: Sequence[int]) -> int:
        """Returns the amount of a choice, summed over the units."""
        return sum(amounts[o] for amounts, o in zip(self.taken, chosen, strict=True))


def least_cost_within(units: Sequence[Options], limits: Sequence[Limit]) -> tuple[int, ...] | None:
    """Returns the choice with the least predicted KL within one or two limits; None if there is none.

    Two limits are combined into one size by weighted sums of their shares, with some weights.
    """
    best: tuple[float, tuple[int, ...]] | None = None
    for shares in [(part / _PARTS, 1 - part / _PARTS) for part in range(_PARTS + 1)] if len(limits) > 1 else [(1.0,)]:
        sizes = [
            tuple(
                round(sum(s * _WHOLE * n.taken[i][o] / n.most for s, n in zip(shares, limits, strict=True)))
                for o in range(len(unit.sizes))
            )
            for i, unit in enumerate(units)
        ]
        assignment = least_cost([Options(s, u.costs) for s, u in zip(sizes, units, strict=True)], _WHOLE)
        if assignment is None or any(n.of(assignment.chosen) > n.most for n in limits):
            continue
        if best is None or assignment.cost < best[0]:
            best = assignment.cost, assignment.chosen
    return None if best is None else best[1]


_WHOLE, _PARTS = 1 << 40, 8
"""The sum that stands for a full limit if several limits are combined, and the number of weightings that are tried."""


def _spend(
    start: Sequence[int], budget: float, lowered: Sequence[Sequence[float]], paid: Sequence[Sequence[float]]
) -> list[int]:
    """Improves a choice by changes of single units, the largest first, while their total cost is within a budget.

    Args:
        start: the choice, an option for each unit.
        budget: the largest sum of the costs.
        lowered: the value to reduce, by unit and option.
        paid: the cost, by unit and option.
    """
    chosen = list(start)
    while True:
        left = budget - sum(p[o] for p, o in zip(paid, chosen, strict=True))
        moves = [
            (w[chosen[i]] - w[o], p[chosen[i]] - p[o], i, o)
            for i, (w, p) in enumerate(zip(lowered, paid, strict=True))
            for o in range(len(w))
            if w[o] < w[chosen[i]] and p[o] - p[chosen[i]] <= left
        ]
        if not moves:
            return chosen
        *_, i, o = max(moves)
        chosen[i] = o


def _hull(unit: Options) -> list[int]:
    """Returns the options on the lower convex hull of one unit, from the least cost to the fewest bytes."""
    hull: list[int] = []
    for o in sorted(range(len(unit.sizes)), key=lambda o: (unit.sizes[o], unit.costs[o])):
        if hull and unit.costs[o] >= unit.costs[hull[-1]]:
            continue  # larger than another, and no better
        while len(hull) > 1 and not _below(unit, hull[-2], hull[-1], o):
            hull.pop()
        hull.append(o)
    return hull[::-1]


def _below(unit: Options, a: int, b: int, c: int) -> bool:
    """Returns True if b, between a and c in size, is below the line from a to c."""
    along = (unit.costs[c] - unit.costs[a]) * (unit.sizes[b] - unit.sizes[a])
    return (unit.costs[b] - unit.costs[a]) * (unit.sizes[c] - unit.sizes[a]) < along
