"""Compares the program with its source after passes, and names the pass that changed the logits by too much.

If that takes too long, several passes are measured together, and one by one only on failure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from enginewright.optimizer.shared.export_records import Measurement, PassVerification
from enginewright.passes.framework.base import Pass, PassRecord
from enginewright.passes.framework.fast_evaluation import WeightCache
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import VerificationError
from enginewright.runtime.shared.extensions import package_of
from enginewright.runtime.shared.memory import return_freed_memory
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .measure import Measured, SourceLogits, relative_tolerance_of
from .measuring_tokens import EXACT_LENGTH
from .verify import EXACT_HINT
from .worst_layers import LayerError, layer_errors

SHARE = 0.4
"""The share of an export's time so far that optional measurements may take. Optional ones could also be made later."""

LOCAL_TOLERANCE = 2e-4
"""The relative error of a value that rounding explains.

Sums in another order are off by 1e-6. An error of 1 % in a linear shows as 1e-2, or as 1e-3 where a residual several
times as large was added before the value can be compared.
"""

SHOWN = 3
"""The number of layers that an error names."""


@dataclass(frozen=True)
class Advice:
    """The advice to a user about a pass that changed too much.

    Attributes:
        lossy: advice for a pass that loses too much precision.
        bisect: the command that finds the place; "" if there is none.
    """

    lossy: str = "Take a recipe that loses less (see `optimize recipes`), or allow more with max_kl in [budget]."
    bisect: str = ""


@dataclass(frozen=True)
class _State:
    """The state of a chain of passes: the last program that was found correct, and its measurement."""

    program: Program
    measured: Measured
    lossy: bool = False  # whether a pass up to here has lost precision


@dataclass(frozen=True)
class _Step:
    """A pass that changed the program, and the program after it: a graph, as weights are lazy."""

    number: int
    name: str
    exact: bool
    program: Program
    package: str | None = None  # that the pass comes with; None: it is ours


class PassMeasurements:
    """Measures the program after passes, and raises VerificationError if a pass changed logits by more than it may.

    It is called with every pass. Measurements that aren't required are left out if they would take too long.

    An exact pass must be within rounding of the source; after a pass that loses precision, within rounding of the
    program before it. A pass that loses precision is held to ``max_kl``. If a later pass repairs its losses, the two
    are judged together. These are always measured: passes that lose precision, the last one before the first of them,
    and the last of all.

    Args:
        source: the source model's logits.
        captured: the program before the first pass.
        max_kl: the budget, in nats per token; None if the recipe is exact.
        cache: the cache of weights that programs use while they run.
        few: True leaves out the measurements that aren't required, as for a model that the cache doesn't hold.
        started: the time at which the export began, by ``time.perf_counter``.
        spent: the seconds since then in which ``source`` was computed.
        advice: the hints for passes that change more than they may.
        progress: called with the stage "measure" after each of a measured program's calls.

    Raises:
        VerificationError: the captured program computes other logits than the source.
    """

    def __init__(
        self,
        source: SourceLogits,
        captured: Program,
        *,
        max_kl: float | None,
        cache: WeightCache,
        few: bool,
        started: float,
        spent: float = 0.0,
        advice: Advice = Advice(),
        progress: Progress = silent,
    ) -> None:
        self._advice, self._progress = advice, progress
        self._source, self._max_kl, self._cache, self._few = source, max_kl, cache, few
        self._started, self._spent, self._count, self._cost = started, spent, 0, float("inf")
        self._tolerance = relative_tolerance_of(captured)
        self._pending: list[_Step] = []
        self._found: list[Measurement | None] = []
        measured = self._measure(captured, "the captured program", full=False)
        if (problem := self._difference(measured)) is not None:
            raise VerificationError(f"as captured, the program differs from its source: {problem}", hint=EXACT_HINT)
        self._captured = measured.figures
        self._state = self._common = _State(captured.copy(), measured)
        self._target, self._left = "", list[Pass]()
        self._broken = False  # a pass has lost what a later one compensates for

    def begin(self, passes: Sequence[Pass], target: str = "") -> None:
        """Begins the list of ``passes`` that run next, in this order.

        ``target`` is the target that they lower to. A target's passes begin with the result of the common passes.
        """
        if self._target == "":
            self._common = self._state
        self._state, self._target, self._left = self._common, target, list(passes)

    def after(self, program: Program, record: PassRecord) -> None:
        """Measures ``program``, which a pass has changed as ``record`` says; may postpone the measurement.

        Raises:
            VerificationError: the program differs by more than this pass, or a pass since the last measurement, may
                change. The error names the pass and the layers that changed most.
        """
        one, following = self._left.pop(0), self._left[0] if self._left else None
        self._found.append(None)
        if self._is_repaired_later(one, record):
            return
        if record.matched:
            self._pending.append(_Step(len(self._found) - 1, record.name, one.exact, program.copy(), package_of(one)))
        elif not self._pending:
            self._found[-1] = replace(self._state.measured.figures, unchanged=True, seconds=0.0)
        if self._pending and self._is_due(one, following):
            self._judge()
        if one.exact and following is not None and not following.exact and self._max_kl is not None:
            self._forget_weights()  # what comes may need the memory, and has use for other weights

    def finish(self) -> PassVerification:
        """Frees the memory, and returns the section of the export's report about how passes were measured."""
        self._forget_weights()
        tokens = self._source.tokens
        return PassVerification(
            origin=tokens.origin,
            sequences=len(tokens.sequences),
            tokens=sum(len(s) for s in tokens.sequences),
            exact_tokens=sum(min(len(s), EXACT_LENGTH) for s in tokens.sequences),
            relative_tolerance=self._tolerance,
            max_kl=self._max_kl,
            captured=self._captured,
            measured=self._count,
            seconds=round(self._spent, 3),
        )

    @property
    def found(self) -> list[Measurement | None]:
        """The figures after each pass, in order; None for a pass that was measured together with a later one."""
        return list(self._found)

    @property
    def seconds(self) -> float:
        """The seconds spent on measurements so far."""
        return self._spent

    def _is_repaired_later(self, one: Pass, record: PassRecord) -> bool:
        """Returns True if a later pass compensates for a loss of this pass, or of one before it."""
        repaired = any(later.repairs for later in self._left)
        self._broken = repaired and (self._broken or (record.matched > 0 and not one.exact))
        return self._broken

    def _is_due(self, one: Pass, following: Pass | None) -> bool:
        if following is None or following.exact != one.exact:
            return True
        if self._few:
            return False
        worked = time.perf_counter() - self._started - self._spent
        return not one.exact or self._spent + self._cost <= SHARE * worked

    def _forget_weights(self) -> None:
        self._cache.clear()
        return_freed_memory()

    def _judge(self) -> None:
        """Measures the last pending pass, and accepts all pending ones.

        Raises VerificationError if its program is wrong.
        """
        last = self._pending[-1]
        measured, problem = self._look_at(last)
        if problem is not None:
            raise self._error()
        trimmed = replace(measured, logits=tuple(rows[:EXACT_LENGTH].copy() for rows in measured.logits))
        self._state = _State(last.program, trimmed, self._state.lossy or not last.exact)
        self._found[last.number] = measured.figures
        for number in range(last.number + 1, len(self._found)):
            self._found[number] = replace(measured.figures, unchanged=True, seconds=0.0)
        self._pending.clear()

    def _look_at(self, step: _Step) -> tuple[Measured, str | None]:
        """Measures the program after a step.

        Returns the measurement, and a message if it differs by too much, otherwise None.
        """
        measured = self._measure(step.program, f"after {step.name}", full=self._state.lossy or not step.exact)
        if not step.exact:
            return measured, self._loss(measured)
        if not self._state.lossy:
            return measured, self._difference(measured)
        return measured, self._change(step, measured)

    def _measure(self, program: Program, name: str, *, full: bool) -> Measured:
        """Measures ``program``, which ``name`` stands for in reports of progress."""
        start = time.perf_counter()
        calls = sum(node.op == "call_function" for node in program.graph.nodes)
        length = self._source.tokens.length if full else min(EXACT_LENGTH, self._source.tokens.length)
        measured = self._source.measure(
            program, self._cache, length, lambda ran: self._progress(ProgressEvent("measure", ran, calls, name))
        )
        self._cost = time.perf_counter() - start
        self._spent += self._cost
        self._count += 1
        return measured

    def _difference(self, measured: Measured) -> str | None:
        """Returns a message if every sequence has an error beyond rounding; None if one sequence hasn't.

        A single sequence may differ, because rounding may change a router's choice.
        """
        figures = measured.figures
        tolerance = self._tolerance * figures.largest_logit
        if min(measured.errors) <= tolerance:
            return None
        return (
            f"on {self._source.tokens.origin} a logit is off by {figures.max_logit_error:.3g}, where rounding explains "
            f"{tolerance:.3g} (logits reach {figures.largest_logit:.3g}, KL {figures.kl_mean:.3g} on average)"
        )

    def _loss(self, measured: Measured) -> str | None:
        figures = measured.figures
        if self._max_kl is None or figures.kl_mean <= self._max_kl:
            return None
        return (
            f"{figures.distance} on {self._source.tokens.origin}, and the recipe's max_kl is "
            f"{self._max_kl:.3g} (top-1 agreement {figures.top1_agreement:.1%}, a logit is off by "
            f"{figures.max_logit_error:.3g} at most)"
        )

    def _change(self, step: _Step, measured: Measured) -> str | None:
        """Returns a message about an error beyond rounding since the last correct program, which had lost precision
        before.

        It returns None without such an error. Where integers are rounded, a rounding difference may become a whole
        step, anywhere. So if logits differ by more than rounding, single layers are compared, each with its inputs from
        before the pass.
        """
        tolerance = self._tolerance * measured.figures.largest_logit
        pairs = zip(measured.logits, self._state.measured.logits, strict=True)
        error = min(float(np.abs(new[: len(old)] - old).max()) for new, old in pairs)
        if error <= tolerance:
            return None
        worst = self._worst(self._state.program, step.program)
        if not worst or worst[0].error <= LOCAL_TOLERANCE:
            return None
        return (
            f"on {self._source.tokens.origin} a logit is off by {error:.3g} from what it was before the pass, where "
            f"rounding explains {tolerance:.3g} (logits reach {measured.figures.largest_logit:.3g})"
        )

    def _error(self) -> VerificationError:
        """Returns the error for the first faulty one of the pending passes, of which the last is known to be faulty."""
        low, high = 0, len(self._pending) - 1
        while low < high:
            middle = (low + high) // 2
            if self._look_at(self._pending[middle])[1] is None:
                low = middle + 1
            else:
                high = middle
        step = self._pending[high]
        problem = self._look_at(step)[1]
        before = self._pending[high - 1].program if high else self._state.program
        name = f"{step.name} of target {self._target}" if self._target else step.name
        verdict = "differs from its source" if step.exact else "is too far from its source"
        errors = self._worst(before, step.program)[:SHOWN]
        worst = "; ".join(str(e) for e in errors if e is errors[0] or not step.exact or e.error > LOCAL_TOLERANCE)
        return VerificationError(
            f"after the pass {name} the program {verdict}: {problem}. What it changed most: {worst}",
            hint=self._hint(step),
        )

    def _hint(self, step: _Step) -> str:
        bisect = f" To see where it first differs: {self._advice.bisect}." if self._advice.bisect else ""
        if step.package is not None:
            return (
                f"The pass comes with the package {step.package}, not with Enginewright: report it there, or turn it "
                f"off ({step.name} = false in [passes] of the recipe).{bisect}"
            )
        return (EXACT_HINT if step.exact else self._advice.lossy) + bisect

    def _worst(self, before: Program, after: Program) -> list[LayerError]:
        return layer_errors(before, after, self._source.tokens.sequences, self._cache)
