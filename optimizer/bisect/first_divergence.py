"""Finds the first difference of two runs: the pass and the value, then the calls and tensors that computed it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch

from enginewright.passes.framework.fast_evaluation import WeightCache
from enginewright.passes.ir.calls import Call
from enginewright.passes.ir.value_name import ValueName
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import ComparisonError
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from .explain import explain, missing_biases
from .probes import Probe
from .program_run import ProgramRun
from .replay import Stage
from .report import FirstDivergence, Place
from .runs import Run, Tensor, TracedRun
from .tolerance import Difference, Tolerance, comparable, difference
from .values import Values

_SHOWN = 5
"""The number of further differing values that are named."""


def describe_divergence(
    stage: str,
    pass_name: str | None,
    b: TracedRun,
    comparison: Comparison,
    given: Values,
) -> FirstDivergence | None:
    """Describes the first value that differs; returns None if no value does.

    Args:
        stage: the stage that made b from a, in words; "" without one.
        pass_name: the name of the pass; None if the stage isn't a pass.
        b: the run whose calls are examined.
        comparison: the comparison of a and b.
        given: the values that b continued with.
    """
    if not comparison.differing:
        return None
    a, (name, gap) = comparison.a, comparison.differing[0]
    calls = area(b.calls, b.probes, name, given.keys())
    of_calls = [b.tensors_of(call) for call in calls]
    all_tensors = [tensor for of_call in of_calls for tensor in of_call]
    tensors = _concerned(name, of_calls)
    others = [str(other) for other, _ in comparison.differing[1:]]
    return FirstDivergence(
        stage=stage,
        pass_name=pass_name,
        a=a.name,
        b=b.name,
        layer=name.layer,
        module=name.path,
        value_name=str(name),
        calls=[b.describe(call) for call in calls],
        tensors=[
            *(f"{tensor}, which B doesn't add" for tensor in missing_biases(a, tensors)),
            *(str(tensor) for tensor in tensors),
        ],
        error=gap.error,
        tolerance=comparison.tolerance.error,
        gain=gap.gain,
        largest=Place(gap.token, gap.column, gap.a, gap.b),
        reasons=explain(name, a, *comparison.values, tensors, all_tensors, chance=comparison.tolerance.chance),
        others=others[:_SHOWN],
        others_count=len(others),
    )


def _concerned(name: ValueName, of_calls: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns the tensors to examine for a value: those of its module, and those of the calls before it.

    Such a call may be a norm that is fused with rounding. ``of_calls``: the tensors of each call.
    """
    selected: list[Tensor] = []
    for tensors in of_calls:
        of_module = [tensor for tensor in tensors if tensor.path == name.path]
        selected += of_module if of_module and name.what == "output" else tensors
    return selected


def area(calls: Sequence[Call], probes: Sequence[Probe], name: ValueName, known: Collection[ValueName]) -> list[Call]:
    """Returns the calls that compute a value from known values, in their order.

    Args:
        calls, probes: of the program.
        name: the value.
        known: the names of the known values.
    """
    makers = {}
    for call in calls:
        for slot, value in call.writes:
            makers[value] = (call, slot)
    probe = next(probe for probe in probes if probe.name == name)
    # A product without its residual is only a part of the value there, and doesn't replace it.
    replaced = {
        (probe.key, probe.before, probe.slot)
        for probe in probes
        if probe.name in known and probe.name != name and not probe.residual
    }
    at = {call.key: call for call in calls}
    first = at[probe.key]
    waiting: list[Hashable] = [value for slot, value in first.reads if probe.before and slot == probe.slot]
    reached: dict[Hashable, Call] = {}

    def enter(call: Call) -> None:
        if call.key not in reached:
            reached[call.key] = call
            waiting.extend(value for slot, value in call.reads if (call.key, True, slot) not in replaced)

    if not probe.before:
        enter(first)
    while waiting:
        value = waiting.pop()
        if value in makers:
            call, slot = makers[value]
            if (call.key, False, slot) not in replaced:
                enter(call)
    return [call for call in calls if call.key in reached]


@dataclass(frozen=True)
class Comparison:
    """The values that two runs have in common.

    Attributes:
        a: the first run.
        values: the values of both runs.
        tolerance: the largest difference allowed.
        values_compared: the number of values.
        differing: the values that differ, in the order of execution, with their differences.
        largest_error: the largest error among the other values, and the value with it; None if all differ.
        least_sensitive: among the outputs of linears and the logits, the value at which a common factor must be
            largest to be found, and that factor; None if all differ.
    """

    a: Run
    values: tuple[Values, Values]
    tolerance: Tolerance
    values_compared: int
    differing: tuple[tuple[ValueName, Difference], ...]
    largest_error: tuple[float, ValueName] | None
    least_sensitive: tuple[float, ValueName] | None = None


def compare(
    a: Run, b: Run, values_a: Values, values_b: Values, tolerance: Tolerance, layers: Collection[int] | None = None
) -> Comparison:
    """Compares the values of two runs. Raises ComparisonError if they have no value in common.

    Args:
        a, b: the runs.
        values_a, values_b: their values.
        tolerance: the largest difference allowed.
        layers: the numbers of the layers to compare; None for all.
    """
    names = comparable(values_a, values_b, layers)
    if not names:
        raise ComparisonError(
            f"{a.name} and {b.name} have no value in common that could be compared",
            hint="Are they the same model? Their modules have to have the same paths.",
        )
    differing: list[tuple[ValueName, Difference]] = []
    largest_error: tuple[float, ValueName] | None = None
    least_sensitive: tuple[float, ValueName] | None = None
    calls: Sequence[Call] = getattr(b, "calls", ())  # a source has none: there all outputs count
    linears = {piece.path for call in calls for piece in call.pieces}
    for name in names:
        apart = difference(values_a[name], values_b[name])
        bias = _bias(a, name) if tolerance.chance and name.what == "output" else None
        excess = tolerance.exceeded(values_a[name], values_b[name], bias, apart)
        if excess is not None:
            differing.append((name, excess))
        else:
            largest_error = max(largest_error or (apart.error, name), (apart.error, name))
            weighed = name.what == "output" and (not linears or name.path in linears)
            if weighed or name.what == "logits":
                factor = tolerance.smallest_factor(values_a[name], apart)
                least_sensitive = max(least_sensitive or (factor, name), (factor, name))
    return Comparison(a, (values_a, values_b), tolerance, len(names), tuple(differing), largest_error, least_sensitive)


def _bias(run: Run, name: ValueName) -> FloatArray | None:
    return next((t.read() for t in run.tensors(name.path) if t.role == "bias"), None)


@dataclass(frozen=True)
class Found:
    """The first stage of a program that differs from the stage before it, or from the source.

    Attributes:
        stage, after: the stage, and the run of its program.
        comparison: the comparison with the stage before.
        given: the values with which both runs continued.
    """

    stage: Stage
    after: ProgramRun
    comparison: Comparison
    given: Values


class PassSearch:
    """The comparison of a source with the stages of its program.

    Each stage continues with the source's values for all values that the compared stages have in common. So the values
    of a stage show the errors of its own calls alone: earlier rounding doesn't matter, and errors don't add up along
    the program or from pass to pass.

    Args:
        source: the run of the source.
        given: the source's values.
        stages: the captured program, and the program after each pass.
        sequences: token ids, [S] each.
        tolerances: for exact passes before any rounding, for exact passes after it, and for passes that round.
        cache: the values of weights, which all stages share.
        progress: called with the stage "compare".
        layers: the numbers of the layers to compare; None for all.
    """

    def __init__(
        self,
        source: Run,
        given: Values,
        stages: Sequence[Stage],
        sequences: Sequence[torch.Tensor],
        tolerances: tuple[Tolerance, Tolerance, Tolerance],
        cache: WeightCache,
        progress: Progress,
        layers: Collection[int] | None = None,
    ) -> None:
        self.given = given
        self._source, self._stages, self._sequences = source, stages, sequences
        self._tolerances, self._cache, self._progress = tolerances, cache, progress
        self._layers = layers
        self._kept: dict[tuple[int, frozenset[ValueName]], Values] = {}
        self._runs: dict[int, ProgramRun] = {}
        self._evaluations = 0
        self.largest_error: tuple[float, ValueName] | None = None
        """The largest error of an exact stage at which the runs don't diverge."""
        self.values_compared = 0
        self.least_sensitive: dict[str, tuple[float, ValueName]] = {}
        """The least sensitive value of exact passes, and of those that round: see ``Comparison``."""

    def run(self, index: int) -> Run:
        """Returns the run of a stage; that of the source for -1."""
        return self._source if index < 0 else self.program(index)

    def program(self, index: int) -> ProgramRun:
        if index not in self._runs:
            stage = self._stages[index]
            name = f"the program after {stage.label}"
            self._runs[index] = ProgramRun(stage.program, name, cache=self._cache, leaves=self._source.leaves)
        return self._runs[index]

    def common(self, index: int, other: Run) -> Values:
        """Returns the source's values that a stage (-1 is the source) and ``other`` can record too."""
        names = set(self.given) if index < 0 else set(self.program(index).value_names)
        names &= set(self.given) if other is self._source else set(other.value_names)
        return {name: value for name, value in self.given.items() if name in names}

    def values(self, index: int, given: Values) -> Values:
        """Returns the values that a stage computes if it continues with ``given`` values; results are cached."""
        if index < 0:
            return self.given
        key = index, frozenset(given)
        if key not in self._kept:
            self._evaluations += 1
            self._progress(ProgressEvent("compare", self._evaluations, 0, self._stages[index].label))
            self._kept[key] = self.program(index).values(self._sequences, given, self._layers)
        return self._kept[key]

    def first(self) -> Found | None:
        """Returns the first stage that differs from the one before; None if all agree.

        Consecutive exact stages are compared from end to end, and bisected if they differ. A stage that changes the
        model on purpose isn't compared; later stages are compared with it.
        """
        base, at = -1, 0
        while at < len(self._stages):
            if self._stages[at].reshapes:
                base, at = at, at + 1
                continue
            last = at
            while self._stages[last].exact and self._continues(last + 1):
                last += 1
            if self._differs(base, last):
                low, high = at, last
                while low < high:
                    middle = (low + high) // 2
                    low, high = (low, middle) if self._differs(base, middle) else (middle + 1, high)
                return self._found(low, base)
            self._kept = {key: values for key, values in self._kept.items() if key[0] == last}
            base, at = last, last + 1
        return None

    def _continues(self, index: int) -> bool:
        return index < len(self._stages) and self._stages[index].exact and not self._stages[index].reshapes

    def _differs(self, before: int, after: int) -> bool:
        comparison = self._compare(before, after)
        if not comparison.differing and self._stages[after].exact and comparison.largest_error is not None:
            self.largest_error = max(self.largest_error or comparison.largest_error, comparison.largest_error)
        if not comparison.differing and comparison.least_sensitive is not None:
            kind = "exact passes" if self._stages[after].exact else "passes that round"
            self.least_sensitive[kind] = max(
                self.least_sensitive.get(kind, comparison.least_sensitive), comparison.least_sensitive
            )
        self.values_compared = max(self.values_compared, comparison.values_compared)
        return bool(comparison.differing)

    def _compare(self, before: int, after: int) -> Comparison:
        values = self.common(before, self.program(after))
        values_before, values_after = self.values(before, values), self.values(after, values)
        run, tolerance = self.program(after), self._tolerance(after)
        return compare(self.run(before), run, values_before, values_after, tolerance, self._layers)

    def _tolerance(self, index: int) -> Tolerance:
        exact, after_rounding, coarse = self._tolerances
        if not self._stages[index].exact:
            return coarse
        rounded = any(not stage.exact and not stage.reshapes for stage in self._stages[:index])
        return after_rounding if rounded else exact

    def _found(self, index: int, base: int) -> Found:
        before = index - 1
        comparison = self._compare(before, index)
        if not comparison.differing:  # each of several passes was just within the tolerance
            before, comparison = base, self._compare(base, index)
        values = self.common(before, self.program(index))
        return Found(self._stages[index], self.program(index), comparison, values)
