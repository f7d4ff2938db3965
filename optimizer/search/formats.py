"""[auto]: formats for all weights, so that a KL budget is met with the fewest bytes, or a size with the least KL.

A model whose shape the recipe changes is looked at as these passes leave it; what they cost is of the same budget.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import AutoSection
from enginewright.optimizer.shared.storage import StoredBytes
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.token_sequences import beginnings
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.runtime.shared.errors import VerificationError

from .assign import Assignment, Options, fewest_bytes
from .format_sensitivity import measure_sensitivities, plan_measurements
from .format_units import FormatUnit, bytes_of_others, find_units
from .report import AutoReport, FormatOption, ParetoPoint, UnitChoice
from .search import NothingToChooseError, NothingWithinError, Search, Tried, some_of

LENGTH = 64
"""Tokens of a sequence that units are measured with: shorter ones show more of a text, and less of attention."""


class FormatSearch(Search[AutoReport]):
    """For a recipe that has [auto]; ``options`` are in the order of each unit's formats, sizes are bytes."""

    stage: ClassVar[str] = "auto"
    section: ClassVar[str] = "auto"
    passes: ClassVar[tuple[str, ...]] = (ChooseFormats.name,)

    @property
    def auto(self) -> AutoSection:
        """The section."""
        assert self.recipe.auto is not None
        return self.recipe.auto

    def find_units(self) -> None:
        self.units = find_units(self.program, self.auto.candidates)
        if all(len(u.formats) == 1 for u in self.units):
            raise NothingToChooseError(
                f"recipe {self.recipe.name}: auto.candidates: no weight of this model can have more than one of them",
                hint="Add formats to the candidates; 4 bits need an input dimension that their groups divide.",
            )
        self.plan = plan_measurements(self.units, self.task.parameters, self.auto.tokens)
        tokens = beginnings(self.task.sequences, self.plan.tokens, LENGTH)
        costs = measure_sensitivities(
            self.program, self.units, self.plan.groups, tokens, self.on_progress, self.context.memory_budget
        )
        self.options = [Options(u.sizes, c) for u, c in zip(self.units, costs, strict=True)]
        self.fixed = bytes_of_others(self.program, self.units)
        self.check = self.checked_on(self.later, self.source)
        if self.source is not None:
            self.spent = max(self.check.measure_program().values())

    def choose(self) -> Tried:
        name, max_kl, max_bytes = self.recipe.name, self.recipe.budget.max_kl, self.recipe.budget.max_bytes
        if max_kl is None:
            assert max_bytes is not None
            taken = self.least_kl(max_bytes)
            if taken is None:
                raise NothingWithinError(
                    f"recipe {name}: no choice of formats is within max_bytes = {max_bytes:,}: the smallest takes "
                    f"{self._bytes(self.curve[-1]):,} bytes",
                    hint="Allow more with max_bytes in [budget], or add a smaller format to the candidates of [auto].",
                )
            return taken
        best = self.smallest(max_kl)
        if best is None:
            exact = self.curve[0]
            best = next((t for t in self.tried if t.choice == exact), None) or self.measure(exact)
            if best.kl > max_kl:
                shapes = f" (of which its shape costs {self.spent:.3g})" if self.spent else ""
                raise NothingWithinError(
                    f"recipe {name}: no choice of formats is within max_kl = {max_kl:g}: with the most exact candidate "
                    f"everywhere KL is {best.each}{shapes}, in {self._bytes(exact):,} bytes",
                    hint="Allow more with max_kl in [budget], or add a more exact format to the candidates of [auto].",
                )
        size = self._bytes(best.choice)
        if max_bytes is not None and size > max_bytes:
            raise NothingWithinError(
                f"recipe {name}: no choice of formats is within both max_kl = {max_kl:g} and max_bytes = "
                f"{max_bytes:,}: {size:,} bytes is the smallest that was found with a KL of {max_kl:g}",
                hint="Allow more of one of them in [budget].",
            )
        return best

    def fewest(self, most_kl: float) -> Assignment:
        return fewest_bytes(self.options, most_kl) or self.curve[0]

    def applied(self, choice: Assignment) -> Recipe:
        """Replaces [auto] by the commonest format, and overrides for the others."""
        recipe, formats = self.recipe, [u.formats[o] for u, o in zip(self.units, choice.chosen, strict=True)]
        default = Counter(formats).most_common(1)[0][0]
        overrides = [
            FormatOverride(layers=glob.escape(path), format=f)
            for unit, f in zip(self.units, formats, strict=True)
            for path in unit.paths
            if f != default
        ]
        has_int4 = any(f.storage == "int4" for f in formats)
        weights = WeightFormats(
            default=default,
            overrides=tuple(overrides),
            method=recipe.weights.method if has_int4 else "nearest",
            gptq=recipe.weights.gptq if has_int4 else None,
            sparsify=recipe.weights.sparsify if any(f.sparsity != "dense" for f in formats) else None,
        )
        # The shapes that were measured, whatever groups the chosen formats have:
        return recipe.model_copy(update={"weights": weights, "auto": None, "prune": recipe.pruning})

    def label(self, choice: Assignment) -> str:
        return f"{self._bytes(choice) / 1e6:,.1f} MB"

    def report(self, taken: Tried, seconds: float) -> AutoReport:
        costs = [o.costs for o in self.options]
        return AutoReport(
            max_kl=self.recipe.budget.max_kl,
            max_bytes=self.recipe.budget.max_bytes,
            tokens=self.plan.tokens,
            together="unit by unit" if len(self.plan.groups) == len(self.units) else "layer by layer",
            chosen=self._point(taken.choice, taken.kl),
            measured_kl=taken.measured,
            shapes_kl=self.spent,
            curve=tuple(self._point(a) for a in some_of(self.curve)),
            single={str(c): self._single(c) for c in self.auto.candidates},
            tried=tuple(self._point(t.choice, t.kl) for t in self.tried),
            units=tuple(_unit_choice(*each) for each in zip(self.units, costs, taken.choice.chosen, strict=True)),
            seconds=seconds,
        )

    def _bytes(self, choice: Assignment) -> int:
        return choice.size + self.fixed

    def _point(self, choice: Assignment, measured: float | None = None) -> ParetoPoint:
        return ParetoPoint(self._bytes(choice), choice.cost, measured)

    def _single(self, weight_format: WeightFormat) -> ParetoPoint:
        """One format for all that can have it; the others their smallest."""
        size, cost = self.fixed, 0.0
        for unit, options in zip(self.units, self.options, strict=True):
            o = unit.formats.index(weight_format) if weight_format in unit.formats else unit.smallest
            size, cost = size + options.sizes[o], cost + options.costs[o]
        return ParetoPoint(size, cost)


def _unit_choice(unit: FormatUnit, costs: Sequence[float], chosen: int) -> UnitChoice:
    options = [FormatOption(str(f), s, c) for f, s, c in zip(unit.formats, unit.sizes, costs, strict=True)]
    return UnitChoice(unit.where, str(unit.formats[chosen]), tuple(options))


def check_bytes(stored: Sequence[StoredBytes], recipe: Recipe) -> None:
    """Raises VerificationError if a bundle's weights take more than the recipe's ``max_bytes``."""
    most, taken = recipe.budget.max_bytes, sum(s.nbytes for s in stored)
    if most is not None and taken > most:
        raise VerificationError(
            f"recipe {recipe.name}: the weights take {taken:,} bytes, and max_bytes is {most:,}",
            hint="Take a recipe of smaller formats, or allow more with max_bytes in [budget].",
        )
