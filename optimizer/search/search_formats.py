"""``auto``: formats for all units, so that a KL budget is met with the fewest bytes, or a size with the least KL.

Each unit's formats are measured alone (format_sensitivity.py), an assignment is chosen by adding them up (assign.py),
and then measured as it would be emitted (check_formats.py), where it is less or more than the sum. The budget of the
sum is corrected by that until the real one holds, and little of it is left (budget.py). A model whose shape the recipe
changes is looked at as these passes leave it, and what they cost is of the same budget.
"""

from __future__ import annotations

import glob
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile

import torch

from enginewright.optimizer.pipeline.pipeline import choose_passes
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import WeightFormatSection, WeightOverride, WeightsSection
from enginewright.optimizer.shared.progress import Progress, ProgressEvent
from enginewright.optimizer.verify.measuring_tokens import MeasuringTokens
from enginewright.passes.framework.base import Pass, PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.spread import beginnings
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.plugins.shared.contracts import WeightFormat
from enginewright.plugins.shared.errors import VerificationError

from .assign import Assignment, Options, fewest_bytes, least_cost, pareto_curve
from .budget import ROUNDS, NothingToChooseError, NothingWithinError, Tried, smallest_within, some_of, try_within
from .check_formats import Check
from .format_sensitivity import measure_sensitivities, plan_measurements
from .formats_report import AutoReport, FormatOption, ParetoPoint, UnitChoice
from .units import Unit, bytes_of_others, find_units

LENGTH = 64
"""Tokens of a sequence that units are measured with: shorter ones show more of a text, and less of attention."""


@dataclass(frozen=True)
class Choice:
    """What was found: the recipe with an override for each unit, to be exported without searching, and how."""

    recipe: Recipe
    report: AutoReport


def choose_automatically(
    program: Program,
    recipe: Recipe,
    parameters: int,
    sequences: Sequence[torch.Tensor],
    checks: Sequence[MeasuringTokens],
    context: PassContext,
    progress: Progress,
) -> Choice:
    """Chooses the formats of a recipe that has [auto].

    Args:
        program: as captured; it is left as it is.
        recipe: says the candidates and the budget.
        parameters: of the model, for how much can be measured.
        sequences: token ids, [S] each, that units are measured with.
        checks: other tokens, of which each kind is held to the budget.
        context: for the passes, as of an export.
        progress: told the stage "auto".

    Raises:
        VerificationError: nothing meets the budget; says how near it came.
        RecipeError: there is nothing to choose.
    """
    assert recipe.auto is not None
    start = time.perf_counter()
    context = replace(context, required=frozenset())
    passes, _ = choose_passes(recipe.passes)
    before = list(takewhile(lambda p: p.name != ChooseFormats.name, passes))
    source, program = _shaped(program, before, context)
    units = find_units(program, [f.to_format() for f in recipe.auto.candidates])
    if all(len(u.formats) == 1 for u in units):
        raise NothingToChooseError(
            f"recipe {recipe.name}: auto.candidates: no weight of this model can have more than one of them",
            hint="Add formats to the candidates; 4 bits need an input dimension that their groups divide.",
        )
    plan = plan_measurements(units, parameters, recipe.auto.tokens)

    def tell(done: int, total: int, where: str) -> None:
        progress(ProgressEvent("auto", done, total, where))

    seen = beginnings(sequences, plan.tokens, LENGTH)
    costs = measure_sensitivities(program, units, plan.groups, seen, tell, context.room)
    options = [Options(u.sizes, c) for u, c in zip(units, costs, strict=True)]
    fixed = bytes_of_others(program, units)
    kinds = {c.origin: c.sequences for c in checks}
    check = Check(program, passes[len(before) :], context, kinds, source)
    shapes_kl = 0.0 if source is None else max(check.measure_program().values())
    search = _Search(recipe, units, options, fixed, check, tell, shapes_kl)
    found, measured = search.run()
    report = AutoReport(
        max_kl=recipe.budget.max_kl,
        max_bytes=recipe.budget.max_bytes,
        tokens=plan.tokens,
        together="unit by unit" if len(plan.groups) == len(units) else "layer by layer",
        chosen=search.point(found, max(measured.values())),
        measured_kl=measured,
        shapes_kl=shapes_kl,
        curve=tuple(search.point(a) for a in some_of(pareto_curve(options))),
        single={str(c.to_format()): search.single(c.to_format()) for c in recipe.auto.candidates},
        tried=tuple(search.tried),
        units=tuple(_unit_choice(u, c, o) for u, c, o in zip(units, costs, found.chosen, strict=True)),
        seconds=round(time.perf_counter() - start, 3),
    )
    return Choice(_resolved(recipe, units, found), report)


def _shaped(program: Program, passes: Sequence[Pass], context: PassContext) -> tuple[Program | None, Program]:
    """The model as it is when formats are chosen, and before that, where a pass has made another one of it."""
    program = program.copy()
    wanted = [p for p in passes if p.wanted(context)]
    same = list(takewhile(lambda p: p.exact, wanted))
    PassManager(same, context).run(program)
    if len(same) == len(wanted):
        return None, program
    source = program.copy()
    PassManager(wanted[len(same) :], context).run(program)
    return source, program


@dataclass
class _Search:
    recipe: Recipe
    units: Sequence[Unit]
    options: Sequence[Options]
    fixed: int
    check: Check
    tell: Callable[[int, int, str], None]
    shapes_kl: float
    tried: list[ParetoPoint] = field(default_factory=list)

    def run(self) -> tuple[Assignment, dict[str, float]]:
        budget = self.recipe.budget
        if budget.max_kl is not None:
            return self._within_kl(budget.max_kl, budget.max_bytes)
        assert budget.max_bytes is not None
        found = least_cost(self.options, budget.max_bytes - self.fixed)
        if found is None:
            smallest = self.point(pareto_curve(self.options)[-1])
            raise NothingWithinError(
                f"recipe {self.recipe.name}: no choice of formats is within max_bytes = {budget.max_bytes:,}: the "
                f"smallest takes {smallest.bytes:,} bytes",
                hint="Allow more with max_bytes in [budget], or add a smaller format to the candidates of [auto].",
            )
        return found, self._measure(found)

    def _within_kl(self, max_kl: float, max_bytes: int | None) -> tuple[Assignment, dict[str, float]]:
        exact = pareto_curve(self.options)[0]
        tried = try_within(
            max_kl, lambda most: fewest_bytes(self.options, most) or exact, self._measure, spent=self.shapes_kl
        )
        best = smallest_within(tried, max_kl)
        if best is None:
            best = next((t for t in tried if t.choice == exact), None) or Tried(exact, self._measure(exact))
            if best.kl > max_kl:
                raise self._nothing(exact, best.measured)
        size = best.choice.size + self.fixed
        if max_bytes is not None and size > max_bytes:
            raise NothingWithinError(
                f"recipe {self.recipe.name}: no choice of formats is within both max_kl = {max_kl:g} and max_bytes = "
                f"{max_bytes:,}: {size:,} bytes is the smallest that was found with a KL of {max_kl:g}",
                hint="Allow more of one of them in [budget].",
            )
        return best.choice, best.measured

    def _nothing(self, exact: Assignment, measured: dict[str, float]) -> VerificationError:
        each = ", ".join(f"{kl:.3g} on {kind}" for kind, kl in measured.items())
        shapes = f" (of which its shape costs {self.shapes_kl:.3g})" if self.shapes_kl else ""
        return NothingWithinError(
            f"recipe {self.recipe.name}: no choice of formats is within max_kl = {self.recipe.budget.max_kl:g}: with "
            f"the most exact candidate everywhere KL is {each}{shapes}, in {exact.size + self.fixed:,} bytes",
            hint="Allow more with max_kl in [budget], or add a more exact format to the candidates of [auto].",
        )

    def _measure(self, tried: Assignment) -> dict[str, float]:
        self.tell(len(self.tried), ROUNDS, f"measuring {(tried.size + self.fixed) / 1e6:,.1f} MB")
        measured = self.check.measure(_resolved(self.recipe, self.units, tried).weights.to_formats())
        self.tried.append(self.point(tried, max(measured.values())))
        return measured

    def point(self, found: Assignment, measured: float | None = None) -> ParetoPoint:
        return ParetoPoint(found.size + self.fixed, found.cost, measured)

    def single(self, weight_format: WeightFormat) -> ParetoPoint:
        """One format for all that can have it; the others their smallest."""
        size, cost = self.fixed, 0.0
        for unit, options in zip(self.units, self.options, strict=True):
            o = unit.formats.index(weight_format) if weight_format in unit.formats else unit.smallest
            size, cost = size + options.sizes[o], cost + options.costs[o]
        return ParetoPoint(size, cost)


def _resolved(recipe: Recipe, units: Sequence[Unit], found: Assignment) -> Recipe:
    """The recipe without [auto], and with the formats that were chosen: the commonest, and overrides for the others."""
    formats = [u.formats[o] for u, o in zip(units, found.chosen, strict=True)]
    default = Counter(formats).most_common(1)[0][0]
    overrides = [
        WeightOverride(layers=glob.escape(path), format=_section(f))
        for unit, f in zip(units, formats, strict=True)
        for path in unit.paths
        if f != default
    ]
    has_int4 = any(f.storage == "int4" for f in formats)
    weights = WeightsSection(
        default=_section(default),
        overrides=tuple(overrides),
        method=recipe.weights.method if has_int4 else "nearest",
        gptq=recipe.weights.gptq if has_int4 else None,
        sparsify=recipe.weights.sparsify if any(f.sparsity != "dense" for f in formats) else None,
    )
    prune = recipe.prune
    if prune is not None:  # the shapes that were measured, whatever groups the chosen formats have
        prune = prune.model_copy(update={"multiple": prune.to_pruning(recipe.weights, recipe.auto).groups})
    return recipe.model_copy(update={"weights": weights, "auto": None, "prune": prune})


def _section(weight_format: WeightFormat) -> WeightFormatSection:
    return WeightFormatSection(**asdict(weight_format))


def _unit_choice(unit: Unit, costs: Sequence[float], chosen: int) -> UnitChoice:
    options = [FormatOption(str(f), s, c) for f, s, c in zip(unit.formats, unit.sizes, costs, strict=True)]
    return UnitChoice(unit.where, str(unit.formats[chosen]), tuple(options))
