"""A search under a budget, whatever its units are: formats, key/value heads, or layers with their channels and heads.

Units are measured alone, and a choice for all of them is made by adding up (assign.py). What changes cost together is
less or more than that. So a choice is measured as it will be exported (measure_choices.py), the budget of the sum is
corrected by what came out, and a new choice is made, until the real budget holds and little of it is left.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ClassVar, Generic, TypeVar

import torch

from enginewright.optimizer.pipeline.pipeline import choose_passes, split_before
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.verify.measuring_tokens import MeasuringTokens
from enginewright.passes.framework.base import Pass, PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import RecipeError, VerificationError
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from .assign import Assignment, Options, least_cost, pareto_curve
from .format_seconds import Clock
from .measure_choices import Check

MARGIN = 0.9
"""The share of a KL budget that is aimed at: the verification of an export looks at other tokens of the same kinds."""

NEAR_ENOUGH = 0.85
"""The share of what is aimed at that is enough: with as much of it used, another measurement would gain little."""

ROUNDS = 5
"""Most choices that are measured."""

SHORT_OF = 0.97
"""The share of where a straight line says that the aim is: the next choice should rather be within the budget."""

SHOWN = 48
"""Most points of a curve that are reported."""

_TINY = 1e-12
"""Nats: of what costs less, no line can be drawn."""


class NothingWithinError(VerificationError):
    """No choice that was found is within the budget."""


class NothingToChooseError(RecipeError):
    """The model has nothing of what the recipe would have searched."""


@dataclass(frozen=True)
class Tried:
    """A choice, and its KL by the kind of tokens that it was measured on, of which the worst counts."""

    choice: Assignment
    measured: dict[str, float]

    @property
    def kl(self) -> float:
        """Nats a token, on the worst kind."""
        return max(self.measured.values())

    @property
    def each(self) -> str:
        """The KL on each kind of tokens, for messages."""
        return ", ".join(f"{kl:.3g} on {kind}" for kind, kl in self.measured.items())


def try_within(
    max_kl: float,
    choose: Callable[[float], Assignment],
    measure: Callable[[Assignment], Tried],
    *,
    spent: float = 0.0,
) -> list[Tried]:
    """Chooses and measures until most of the budget is used and the margin is kept, or ROUNDS times.

    Args:
        max_kl: the budget, in nats a token.
        choose: the best whose predicted costs come to at most so much, or what is nearest to that.
        measure: KL by the kind of tokens.
        spent: of the budget, with nothing chosen.

    Returns what was measured, in order, each choice once.
    """
    aim = MARGIN * max_kl
    target = max(aim - spent, 0.0)
    seen: dict[tuple[int, ...], Tried] = {}
    for _ in range(ROUNDS):
        choice = choose(target)
        if choice.chosen in seen:
            break
        seen[choice.chosen] = tried = measure(choice)
        if NEAR_ENOUGH * aim <= tried.kl <= aim:
            break
        target = SHORT_OF * max(aim - spent, 0.0) * max(choice.cost, _TINY) / max(tried.kl - spent, _TINY)
    return list(seen.values())


def smallest_within(tried: Sequence[Tried], max_kl: float) -> Tried | None:
    """The smallest that keeps the margin; else the smallest within the budget; None if none is."""
    within = [t for t in tried if t.kl <= MARGIN * max_kl] or [t for t in tried if t.kl <= max_kl]
    return min(within, key=lambda t: t.choice.size, default=None)


def some_of(curve: Sequence[Assignment]) -> list[Assignment]:
    """Points of a curve, evenly spread and with both ends, as many as are reported."""
    count = min(SHOWN, len(curve))
    return [curve[i * (len(curve) - 1) // max(count - 1, 1)] for i in range(count)]


@dataclass(frozen=True)
class Task:
    """The inputs of a search.

    Attributes:
        program: the captured program; it isn't changed.
        recipe: the budget, and the options to choose from.
        parameters: number of the model's parameters, which decides how much can be measured.
        sequences: token ids, [S] each, that units are measured with.
        checks: other tokens; each kind has to meet the budget.
        context: the passes' context, as in an export.
        progress: called with the search's stage.
        clock: times a token; None if the budget has no time.
    """

    program: Program
    recipe: Recipe
    parameters: int
    sequences: Sequence[torch.Tensor]
    checks: Sequence[MeasuringTokens]
    context: PassContext
    progress: Progress
    clock: Clock | None = None


Report = TypeVar("Report")


@dataclass(frozen=True)
class Found(Generic[Report]):
    """The result of a search: its report, and the recipe with a choice for each unit, to export without searching."""

    recipe: Recipe
    report: Report


class Search(ABC, Generic[Report]):
    """The search for units of one kind, which a subclass knows: how they are found and measured alone, what a choice
    makes of the recipe, and what the budget is.

    Attributes:
        stage: as which progress is reported.
        section: of the recipe, for errors.
        passes: by name; the units are looked at in the program as it is before the first of them.
        program, source: that program; and before it was given another shape, if it was.
        later: the passes after that, of the whole pipeline.
        options: what each unit can have. This and what follows is set by ``find_units``.
        fixed: the size of what isn't chosen.
        check: measures choices.
        spent: KL with nothing chosen.
        tried: what was measured, in order.
    """

    stage: ClassVar[str]
    section: ClassVar[str]
    passes: ClassVar[tuple[str, ...]]

    options: Sequence[Options]
    fixed: int = 0
    check: Check
    spent: float = 0.0

    def __init__(self, task: Task) -> None:
        self.task, self.recipe, self.tried = task, task.recipe, list[Tried]()
        self.context = replace(task.context, required=frozenset())

    @abstractmethod
    def find_units(self) -> None:
        """Finds the units and measures each alone. Raises NothingToChooseError if there are none."""

    @abstractmethod
    def choose(self) -> Tried:
        """Finds the best choice within the budget. Raises NothingWithinError if there is none."""

    @abstractmethod
    def fewest(self, most_kl: float) -> Assignment:
        """The smallest choice that is predicted to cost no more; what is nearest to that where there is none."""

    @abstractmethod
    def applied(self, choice: Assignment) -> Recipe:
        """The recipe with that choice in numbers."""

    @abstractmethod
    def label(self, choice: Assignment) -> str:
        """Describes a choice for a line of progress: what remains, or what is removed."""

    @abstractmethod
    def report(self, taken: Tried, seconds: float) -> Report:
        """Makes what the report of an export has."""

    def run(self) -> Found[Report]:
        """Searches.

        Raises:
            VerificationError: nothing meets the budget; says how near it came.
            RecipeError: there is nothing to choose.
        """
        start = time.perf_counter()
        self.prepare()
        choice = self.choose()
        return Found(self.applied(choice.choice), self.report(choice, round(time.perf_counter() - start, 3)))

    def prepare(self) -> None:
        """Measures each unit alone; ``options`` are there then. Raises RecipeError if there is nothing to choose."""
        before, self.later = split_before(choose_passes(self.recipe.passes)[0], *self.passes)
        self.source, self.program = _shaped(self.task.program, before, self.context)
        self.find_units()

    def on_progress(self, done: int, total: int, where: str) -> None:
        """Reports how far the search is."""
        self.task.progress(ProgressEvent(self.stage, done, total, where))

    def checked_on(self, passes: Sequence[Pass], source: Program | None = None) -> Check:
        """Measures what these passes make of the program; see ``Check``."""
        kinds = {c.origin: c.sequences for c in self.task.checks}
        return Check(self.program, passes, self.context, kinds, source)

    def measure(self, choice: Assignment) -> Tried:
        """The real KL of a choice."""
        self.on_progress(len(self.tried), ROUNDS, f"measuring {self.label(choice)}")
        recipe = self.applied(choice)
        options = {"weights": recipe.weights, "attention": recipe.attention, "prune": recipe.pruning}
        context = replace(self.context, recipe=self.context.recipe.model_copy(update=options))
        self.tried.append(Tried(choice, self.check.measure(context)))
        return self.tried[-1]

    def smallest(self, max_kl: float) -> Tried | None:
        """The smallest choice that was found within a KL; None if none was."""
        return smallest_within(try_within(max_kl, self.fewest, self.measure, spent=self.spent), max_kl)

    def least_kl(self, max_size: int) -> Tried | None:
        """The choice of the least predicted KL within a size; None if there is none."""
        assignment = least_cost(self.options, max_size - self.fixed)
        return None if assignment is None else self.measure(assignment)

    @property
    def curve(self) -> list[Assignment]:
        """The Pareto curve, from the least KL to the smallest size."""
        return pareto_curve(self.options)


def _shaped(program: Program, passes: Sequence[Pass], context: PassContext) -> tuple[Program | None, Program]:
    """The program as some passes leave it, and before that, where a pass has made another one of it."""
    program = program.copy()
    active = [p for p in passes if p.wanted(context)]
    same = list(takewhile(lambda p: p.exact, active))
    PassManager(same, context).run(program)
    if len(same) == len(active):
        return None, program
    source = program.copy()
    PassManager(active[len(same) :], context).run(program)
    return source, program
