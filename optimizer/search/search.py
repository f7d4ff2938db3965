"""A search under a budget for units of any kind: formats of weights or of caches, key/value heads, or layers with their
channels and heads.

Each unit is measured alone, and a choice for all units is made by adding up the costs (assign.py). Changes together
cost less or more than that sum. So a choice is measured as it will be exported (measure_choices.py), the budget of the
sum is corrected by the result, and a new choice is made, until the real cost is within the budget and close to it.
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
"""The share of a KL budget at which a search aims.

The verification of an export uses other tokens of the same kinds, whose KL may be larger.
"""

NEAR_ENOUGH = 0.85
"""The share of the aim from which on a choice is accepted, because another measurement would gain little."""

ROUNDS = 5
"""The most choices that are measured."""

SHORT_OF = 0.97
"""The factor on the next aim from linear interpolation, so that the next choice is rather within the budget than
above.
"""

SHOWN = 48
"""The most points of a curve that are reported."""

_TINY = 1e-12
"""The least measured cost, in nats, with which the next aim is interpolated."""


class NothingWithinError(VerificationError):
    """No choice that was measured is within the budget."""


class NothingToChooseError(RecipeError):
    """The model has no unit of the kind that the recipe searches for."""


@dataclass(frozen=True)
class Tried:
    """A measured choice. ``measured``: kind of tokens -> KL."""

    choice: Assignment
    measured: dict[str, float]

    @property
    def kl(self) -> float:
        """The largest KL of all kinds of tokens, in nats per token."""
        return max(self.measured.values())

    @property
    def each(self) -> str:
        """The KL on each kind of tokens, as text for messages."""
        return ", ".join(f"{kl:.3g} on {kind}" for kind, kl in self.measured.items())


def try_within(
    max_kl: float,
    choose: Callable[[float], Assignment],
    measure: Callable[[Assignment], Tried],
    *,
    spent: float = 0.0,
) -> list[Tried]:
    """Chooses and measures until a choice uses most of the budget and leaves the margin, or ROUNDS times.

    Args:
        max_kl: the budget, in nats per token.
        choose: returns the best choice whose predicted costs are within a sum, or the nearest one.
        measure: measures a choice.
        spent: the KL of the program without a choice.

    Returns:
        the measured choices, in order, each once.
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
    """Returns the smallest choice within the budget less its margin; else the smallest within the budget; else None."""
    within = [t for t in tried if t.kl <= MARGIN * max_kl] or [t for t in tried if t.kl <= max_kl]
    return min(within, key=lambda t: t.choice.size, default=None)


def some_of(curve: Sequence[Assignment]) -> list[Assignment]:
    """Returns the points of a curve that are reported: at most SHOWN, evenly spread, with both ends."""
    count = min(SHOWN, len(curve))
    return [curve[i * (len(curve) - 1) // max(count - 1, 1)] for i in range(count)]


@dataclass(frozen=True)
class Task:
    """The inputs of a search.

    Attributes:
        program: the captured program, which isn't changed.
        recipe: the recipe with the budget and the options to choose from.
        parameters: the number of the model's parameters, which determines the affordable measurements.
        sequences: the token ids, [S] each, that units are measured with.
        checks: other tokens; each kind has to meet the budget.
        context: the context of the passes, as in an export.
        progress: called with the stage of the search.
        clock: times a token; None if the budget has no time.
        context_length: the most tokens of a sequence; None for any number.
    """

    program: Program
    recipe: Recipe
    parameters: int
    sequences: Sequence[torch.Tensor]
    checks: Sequence[MeasuringTokens]
    context: PassContext
    progress: Progress
    clock: Clock | None = None
    context_length: int | None = None


Report = TypeVar("Report")


@dataclass(frozen=True)
class Found(Generic[Report]):
    """The result of a search: its report, and the recipe with a choice for each unit, which is exported without a
    search.
    """

    recipe: Recipe
    report: Report


class Search(ABC, Generic[Report]):
    """A search for units of one kind.

    A subclass finds the units and measures each alone, changes the recipe by a choice, and knows the budget.

    Attributes:
        stage: the name of the stage of progress.
        section: the section of the recipe, for errors.
        passes: the names of the passes that apply a choice; units are found in the program before the first of them.
        program: that program.
        source: the program before its shape was changed; None if it wasn't.
        later: the passes of the pipeline after that program.
        options: the options of each unit. ``find_units`` sets this attribute and the next three.
        fixed: the size of the parts that no choice changes.
        check: measures choices.
        spent: the KL of the program without a choice.
        tried: the measured choices, in order.
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
        """Returns the smallest choice with a predicted KL of at most ``most_kl``, or the nearest choice if there is
        none.
        """

    @abstractmethod
    def applied(self, choice: Assignment) -> Recipe:
        """Returns the recipe with the choice in place of the search."""

    @abstractmethod
    def label(self, choice: Assignment) -> str:
        """Returns a short description of ``choice`` for progress."""

    @abstractmethod
    def report(self, taken: Tried, seconds: float) -> Report:
        """Returns the report of the search. ``taken`` is the final choice, ``seconds`` the duration."""

    def run(self) -> Found[Report]:
        """Searches, and returns the result.

        Raises:
            VerificationError: no choice meets the budget; the message has the nearest one.
            RecipeError: there is nothing to choose.
        """
        start = time.perf_counter()
        self.prepare()
        choice = self.choose()
        return Found(self.applied(choice.choice), self.report(choice, round(time.perf_counter() - start, 3)))

    def prepare(self) -> None:
        """Finds the units, and measures each alone. Raises RecipeError if there is nothing to choose."""
        before, self.later = split_before(choose_passes(self.recipe.passes)[0], *self.passes)
        self.source, self.program = _shaped(self.task.program, before, self.context)
        self.find_units()

    def on_progress(self, done: int, total: int, where: str) -> None:
        """Reports that ``done`` of ``total`` measurements are finished.

        ``where``: the path of the unit that is measured next.
        """
        self.task.progress(ProgressEvent(self.stage, done, total, where))

    def checked_on(self, passes: Sequence[Pass], source: Program | None = None) -> Check:
        """Returns the check of choices that these passes apply; ``source`` is the program to compare with, None for
        ``program``.
        """
        kinds = {c.origin: c.sequences for c in self.task.checks}
        return Check(self.program, passes, self.context, kinds, source)

    def measure(self, choice: Assignment) -> Tried:
        """Applies a choice to the program, and measures the KL that it really costs."""
        self.on_progress(len(self.tried), ROUNDS, f"measuring {self.label(choice)}")
        recipe = self.applied(choice)
        sections = ("weights", "attention", "kv_cache")
        options = {"prune": recipe.pruning, **{name: getattr(recipe, name) for name in sections}}
        context = replace(self.context, recipe=self.context.recipe.model_copy(update=options))
        self.tried.append(Tried(choice, self.check.measure(context)))
        return self.tried[-1]

    def smallest(self, max_kl: float) -> Tried | None:
        """Returns the smallest choice that was measured within a KL; None if none was."""
        return smallest_within(try_within(max_kl, self.fewest, self.measure, spent=self.spent), max_kl)

    def least_kl(self, max_size: int) -> Tried | None:
        """Measures and returns the choice with the least predicted KL within a size; None if there is none."""
        assignment = least_cost(self.options, max_size - self.fixed)
        return None if assignment is None else self.measure(assignment)

    def _bytes(self, choice: Assignment) -> int:
        """Returns the size of a choice, with the parts that no choice changes."""
        return choice.size + self.fixed

    @property
    def curve(self) -> list[Assignment]:
        """The Pareto curve, from the least KL to the smallest size."""
        return pareto_curve(self.options)


def _shaped(program: Program, passes: Sequence[Pass], context: PassContext) -> tuple[Program | None, Program]:
    """Returns the program before and after the passes that change its shape. The first is None if none of ``passes``
    does.
    """
    program = program.copy()
    active = [p for p in passes if p.wanted(context)]
    same = list(takewhile(lambda p: p.exact, active))
    PassManager(same, context).run(program)
    if len(same) == len(active):
        return None, program
    source = program.copy()
    PassManager(active[len(same) :], context).run(program)
    return source, program
