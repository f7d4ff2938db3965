"""Where two sides part: the first pass, and the first point."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from enginewright.optimizer.shared.progress import Progress, ProgressEvent
from enginewright.passes.framework.fast_evaluation import WeightCache
from enginewright.plugins.shared.contracts import FloatArray
from enginewright.plugins.shared.errors import ComparisonError

from .judge import Judge, comparable
from .points import Point, Values
from .program_side import ProgramSide
from .remake import Stage
from .sides import Side
from .taps import Call
from .values import Difference, difference


@dataclass(frozen=True)
class Comparison:
    """Two sides at their common points.

    Attributes:
        points: how many there are.
        parting: those that part, in the order of execution, and how.
        nearest: the largest error among the others, and where it is.
        blindest: of what linears give, and of the logits, where a common factor would be seen last, and the smallest
            that would be.
    """

    points: int
    parting: tuple[tuple[Point, Difference], ...]
    nearest: tuple[float, Point] | None
    blindest: tuple[float, Point] | None = None


def compare(
    a: Side, b: Side, of_a: Values, of_b: Values, judge: Judge, layers: Collection[int] | None = None
) -> Comparison:
    """The values of both sides, point by point, of some layers or all.

    Raises ComparisonError if they have no point in common.
    """
    points = comparable(of_a, of_b, layers)
    if not points:
        raise ComparisonError(
            f"{a.name} and {b.name} have no point in common that could be compared",
            hint="Are they the same model? Their modules have to have the same paths.",
        )
    parting: list[tuple[Point, Difference]] = []
    nearest: tuple[float, Point] | None = None
    blindest: tuple[float, Point] | None = None
    calls: Sequence[Call] = getattr(b, "calls", ())  # a source has none: there all outputs count
    linears = {piece.path for call in calls for piece in call.pieces}
    for point in points:
        apart = difference(of_a[point], of_b[point])
        bias = _bias(a, point) if judge.chance and point.what == "output" else None
        found = judge.parts(of_a[point], of_b[point], bias, apart)
        if found is not None:
            parting.append((point, found))
        else:
            nearest = max(nearest or (apart.error, point), (apart.error, point))
            weighed = point.what == "output" and (not linears or point.path in linears)
            if weighed or point.what == "logits":
                factor = judge.smallest_factor(of_a[point], apart)
                blindest = max(blindest or (factor, point), (factor, point))
    return Comparison(len(points), tuple(parting), nearest, blindest)


def _bias(side: Side, point: Point) -> FloatArray | None:
    return next((t.read() for t in side.tensors(point.path) if t.role == "bias"), None)


@dataclass(frozen=True)
class Found:
    """The stage at which the program parts from the one before (or from the source), and both with their values."""

    stage: Stage
    before: Side
    after: ProgramSide
    of_before: Values
    of_after: Values
    comparison: Comparison
    judge: Judge
    given: Values


class PassSearch:
    """Compares a source with the stages of its program.

    All of them go on with the source's values, at the points that both of two stages have. So each stage's values are
    its calls' own doing, and two stages can be compared whatever rounding there was before; errors don't add up,
    neither along the program nor from pass to pass.

    Args:
        source: the source, or None to begin with what was captured.
        given: the source's values.
        stages: what was captured, and what each pass left.
        judges: of exact passes before anything is rounded, of exact ones after that, and of those that round.
        layers: to compare; None: all.
    """

    def __init__(
        self,
        source: Side,
        given: Values,
        stages: Sequence[Stage],
        sequences: Sequence[torch.Tensor],
        judges: tuple[Judge, Judge, Judge],
        cache: WeightCache,
        progress: Progress,
        layers: Collection[int] | None = None,
    ) -> None:
        self.given = given
        self._source, self._stages, self._sequences = source, stages, sequences
        self._judges, self._cache, self._progress = judges, cache, progress
        self._layers = layers
        self._kept: dict[tuple[int, frozenset[Point]], Values] = {}
        self._sides: dict[int, ProgramSide] = {}
        self._evaluations = 0
        self.worst: tuple[float, Point] | None = None
        """The largest error of an exact stage at which the runs don't diverge."""
        self.points = 0
        self.blindest: dict[str, tuple[float, Point]] = {}
        """Of exact passes, and of those that round: see ``Comparison``."""

    def side(self, index: int) -> Side:
        """A stage as a side; -1 is the source."""
        return self._source if index < 0 else self.program(index)

    def program(self, index: int) -> ProgramSide:
        if index not in self._sides:
            stage = self._stages[index]
            name = f"the program after {stage.label}"
            self._sides[index] = ProgramSide(stage.program, name, cache=self._cache, leaves=self._source.leaves)
        return self._sides[index]

    def common(self, index: int, other: Side) -> Values:
        """The source's values at the points that a stage and ``other`` have; -1 is the source."""
        points = set(self.given) if index < 0 else set(self.program(index).points)
        points &= set(self.given) if other is self._source else set(other.points)
        return {point: value for point, value in self.given.items() if point in points}

    def values(self, index: int, given: Values) -> Values:
        """What a stage computes at its points if it goes on with ``given``."""
        if index < 0:
            return self.given
        key = index, frozenset(given)
        if key not in self._kept:
            self._evaluations += 1
            self._progress(ProgressEvent("compare", self._evaluations, 0, self._stages[index].label))
            self._kept[key] = self.program(index).run(self._sequences, given, self._layers)
        return self._kept[key]

    def first(self) -> Found | None:
        """The first stage that parts from the one before; None if all are right.

        Exact stages one after the other are compared from end to end, and searched by halves if that doesn't hold. A
        stage that is another model on purpose is compared with nothing, and what follows with it.
        """
        base, at = -1, 0
        while at < len(self._stages):
            if self._stages[at].reshapes:
                base, at = at, at + 1
                continue
            last = at
            while self._stages[last].exact and self._goes_on(last + 1):
                last += 1
            if self._parts(base, last):
                low, high = at, last
                while low < high:
                    middle = (low + high) // 2
                    low, high = (low, middle) if self._parts(base, middle) else (middle + 1, high)
                return self._found(low, base)
            self._kept = {key: values for key, values in self._kept.items() if key[0] == last}
            base, at = last, last + 1
        return None

    def _goes_on(self, index: int) -> bool:
        return index < len(self._stages) and self._stages[index].exact and not self._stages[index].reshapes

    def _parts(self, before: int, after: int) -> bool:
        found = self._compare(before, after)
        if not found.parting and self._stages[after].exact and found.nearest is not None:
            self.worst = max(self.worst or found.nearest, found.nearest)
        if not found.parting and found.blindest is not None:
            kind = "exact passes" if self._stages[after].exact else "passes that round"
            self.blindest[kind] = max(self.blindest.get(kind, found.blindest), found.blindest)
        self.points = max(self.points, found.points)
        return bool(found.parting)

    def _compare(self, before: int, after: int) -> Comparison:
        given = self.common(before, self.program(after))
        of_before, of_after = self.values(before, given), self.values(after, given)
        side, judge = self.program(after), self._judge(after)
        return compare(self.side(before), side, of_before, of_after, judge, self._layers)

    def _judge(self, index: int) -> Judge:
        exact, after_rounding, coarse = self._judges
        if not self._stages[index].exact:
            return coarse
        rounded = any(not stage.exact and not stage.reshapes for stage in self._stages[:index])
        return after_rounding if rounded else exact

    def _found(self, index: int, base: int) -> Found:
        before = index - 1
        comparison = self._compare(before, index)
        if not comparison.parting:  # each of several passes was just within the tolerance
            before, comparison = base, self._compare(base, index)
        given = self.common(before, self.program(index))
        return Found(
            self._stages[index],
            self.side(before),
            self.program(index),
            self.values(before, given),
            self.values(index, given),
            comparison,
            self._judge(index),
            given,
        )
