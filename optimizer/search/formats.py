"""The search of [auto] for the formats of all weights: the fewest bytes within a KL, or the least KL within a size or
time.

If the recipe changes the shape of the model, formats are searched for the changed model; the cost of the change counts
against the same budget.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import AutoSection
from enginewright.optimizer.shared.storage import StoredBytes
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.token_sequences import beginnings
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats, chooses
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.plugins.steps.planning import StepSeconds
from enginewright.runtime.shared.errors import VerificationError
from enginewright.runtime.shared.lowered_program import Step

from .assign import Assignment, Limit, Options, fewest_bytes, least_cost_within
from .format_candidates import try_formats, undominated, writable_formats
from .format_seconds import time_formats
from .format_sensitivity import measure_sensitivities, plan_measurements
from .format_units import FormatUnit, bytes_of_others, find_units
from .report import AutoReport, FormatOption, ParetoPoint, TokenTime, UnitChoice
from .search import NothingToChooseError, NothingWithinError, Search, Tried, some_of

LENGTH = 64
"""The tokens of a sequence with which units are measured.

Shorter sequences cover more of a text, but less of attention.
"""

TIMES_AGREE = 0.1
"""The relative difference up to which two times count as equal: predicted and timed, or a bundle's and its budget."""


class FormatSearch(Search[AutoReport]):
    """The search for the formats of a recipe with [auto]. Sizes are bytes.

    Attributes:
        slower: the factor by which predicted times are corrected, after a choice has been timed.
        timed: the milliseconds of the timed choice.
    """

    stage: ClassVar[str] = "auto"
    section: ClassVar[str] = "auto"
    passes: ClassVar[tuple[str, ...]] = (ChooseFormats.name,)

    slower: float = 1.0
    timed: float = 0.0

    @property
    def auto(self) -> AutoSection:
        """The section [auto] of the recipe."""
        assert self.recipe.auto is not None
        return self.recipe.auto

    def find_units(self) -> None:
        self.candidates = self.auto.candidates or self._every_format()
        self.units = find_units(self.program, self.candidates)
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
        if self.recipe.budget.max_ms_per_token is not None:
            self.seconds = time_formats(self.units, self._timed, self.on_progress)
        self.check = self.checked_on(self.later, self.source)
        if self.source is not None:
            self.spent = max(self.check.measure_program().values())

    def choose(self) -> Tried:
        name, max_kl, max_bytes = self.recipe.name, self.recipe.budget.max_kl, self.recipe.budget.max_bytes
        if self.recipe.budget.max_ms_per_token is not None:
            return self._within_time(self.recipe.budget.max_ms_per_token)
        if max_kl is None:
            assert max_bytes is not None
            choice = self.least_kl(max_bytes)
            if choice is None:
                raise NothingWithinError(
                    f"recipe {name}: no choice of formats is within max_bytes = {max_bytes:,}: the smallest takes "
                    f"{self._bytes(self.curve[-1]):,} bytes",
                    hint="Allow more with max_bytes in [budget], or add a smaller format to the candidates of [auto].",
                )
            return choice
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

    def _every_format(self) -> tuple[WeightFormat, ...]:
        """Returns the formats of the targets that no other format beats in bytes and error.

        With a time limit, the formats without bytes as scales are compared among themselves too, because such scales
        take longer to read.
        """
        tried = try_formats(
            self.program, writable_formats(common=self.context.common_formats, method=self.recipe.weights.method)
        )
        candidates = undominated(tried)
        if self.recipe.budget.max_ms_per_token is not None:
            candidates += [
                t for t in undominated([t for t in tried if not t.format.scale_block]) if t not in candidates
            ]
        return tuple(t.format for t in candidates)

    def _within_time(self, most_ms: float) -> Tried:
        """Returns the choice with the least KL within ``most_ms``, and within the bytes if the budget has some.

        The whole choice is timed. If its time differs from the prediction by more than ``TIMES_AGREE``, the budget is
        corrected once. The best single format for all units that meets the time is measured too.
        """
        max_kl = self.recipe.budget.max_kl
        best = self._least_kl_within(most_ms)
        timed = self._timed(best)[1].total * 1e3
        self.slower = timed / self._ms(best)
        if abs(self.slower - 1) > TIMES_AGREE:
            best = self._least_kl_within(most_ms)
            timed = self._timed(best)[1].total * 1e3
        self.timed = timed
        if timed > (1 + TIMES_AGREE) * most_ms:
            raise self._too_slow(f"what was chosen takes {timed:.3g} ms where {self._ms(best):.3g} were predicted")
        measured = [self.measure(Assignment.from_choices(self.options, best))]
        single = self._best_single(most_ms)
        if single is not None and single != best:
            measured.append(self.measure(Assignment.from_choices(self.options, single)))
        best_choice = min(measured, key=lambda t: t.kl)
        if max_kl is not None and best_choice.kl > max_kl:
            raise NothingWithinError(
                f"recipe {self.recipe.name}: no choice of formats is within both max_ms_per_token = "
                f"{most_ms:g} and max_kl = {max_kl:g}: the least KL is {best_choice.each}",
                hint="Allow more of one of them in [budget].",
            )
        return best_choice

    def _least_kl_within(self, most_ms: float) -> tuple[int, ...]:
        """Returns the choice with the least predicted KL within the limits. Raises NothingWithinError with the least
        possible time or bytes.
        """
        limits = self._limits(most_ms)
        chosen = least_cost_within(self.options, limits) if all(limit.most > 0 for limit in limits) else None
        if chosen is not None:
            return chosen
        fastest = tuple(of.index(min(of)) for of in self.seconds.units)
        if self._ms(fastest) > most_ms:
            raise self._too_slow(f"the fastest takes {self._ms(fastest):.3g} ms")
        smallest = tuple(unit.smallest for unit in self.units)
        raise NothingWithinError(
            f"recipe {self.recipe.name}: no choice of formats is within both max_ms_per_token = {most_ms:g} and "
            f"max_bytes = {self.recipe.budget.max_bytes:,}: the smallest takes "
            f"{self._bytes(Assignment.from_choices(self.options, smallest)):,} bytes and {self._ms(smallest):.3g} ms",
            hint="Allow more of one of them in [budget].",
        )

    def _too_slow(self, found: str) -> NothingWithinError:
        budget = self.recipe.budget
        return NothingWithinError(
            f"recipe {self.recipe.name}: no choice of formats is within max_ms_per_token = "
            f"{budget.max_ms_per_token:g} on {budget.device or 'this machine'}: {found}",
            hint="Allow more with max_ms_per_token in [budget], or add a faster format to the candidates of [auto].",
        )

    def _limits(self, most_ms: float) -> list[Limit]:
        limits = [Limit(self.seconds.units, int(most_ms / self.slower * 1e6) - self.seconds.fixed)]
        if self.recipe.budget.max_bytes is not None:
            limits.append(Limit(tuple(u.sizes for u in self.units), self.recipe.budget.max_bytes - self.fixed))
        return limits

    def _best_single(self, most_ms: float) -> tuple[int, ...] | None:
        """Returns the choice of one format for all units that can have it, with the least predicted KL within the
        limits; None without one.
        """
        limits = self._limits(most_ms)
        fitting = [c for c in map(self._everywhere, self.candidates) if all(n.of(c) <= n.most for n in limits)]
        return min(fitting, key=lambda c: Assignment.from_choices(self.options, c).cost, default=None)

    def _ms(self, chosen: Sequence[int]) -> float:
        """Returns the predicted milliseconds of a token."""
        of_units = sum(of[o] for of, o in zip(self.seconds.units, chosen, strict=True))
        return self.slower * (of_units + self.seconds.fixed) / 1e6

    def _timed(self, chosen: Sequence[int]) -> tuple[tuple[Step, ...], StepSeconds]:
        """Returns the steps of a choice, and their seconds. The method of rounding is left out, since it changes no
        step.
        """
        assert self.task.clock is not None, "the budget has a time"
        weights = self.applied(Assignment.from_choices(self.options, chosen)).weights
        nearest = weights.model_copy(update={"method": "nearest", "gptq": None, "sparsify": None})
        options = self.context.recipe.model_copy(update={"weights": nearest})
        return self.task.clock.time(self.program, self.later, replace(self.context, recipe=options, calibration=()))

    def fewest(self, most_kl: float) -> Assignment:
        return fewest_bytes(self.options, most_kl) or self.curve[0]

    def applied(self, choice: Assignment) -> Recipe:
        """Returns the recipe with the most frequent format as the default and overrides for others, in the place of
        [auto].
        """
        recipe, formats = self.recipe, [u.formats[o] for u, o in zip(self.units, choice.chosen, strict=True)]
        default = Counter(formats).most_common(1)[0][0]
        overrides = [
            FormatOverride(layers=glob.escape(path), format=f)
            for unit, f in zip(self.units, formats, strict=True)
            for path in unit.paths
            if f != default
        ]
        chosen = any(chooses(recipe.weights.method, f) for f in formats)
        weights = WeightFormats(
            default=default,
            overrides=tuple(overrides),
            method=recipe.weights.method if chosen else "nearest",
            gptq=recipe.weights.gptq if chosen else None,
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
            single={str(c): self._single(c) for c in self.candidates},
            tried=tuple(self._point(t.choice, t.kl) for t in self.tried),
            units=tuple(_unit_choice(*each) for each in zip(self.units, costs, taken.choice.chosen, strict=True)),
            seconds=seconds,
            time=self._token_time(taken.choice),
        )

    def _token_time(self, choice: Assignment) -> TokenTime | None:
        most, clock = self.recipe.budget.max_ms_per_token, self.task.clock
        if most is None or clock is None:
            return None
        return TokenTime(most, clock.device, self._ms(choice.chosen), self.timed)

    def _point(self, choice: Assignment, measured: float | None = None) -> ParetoPoint:
        ms = None if self.recipe.budget.max_ms_per_token is None else self._ms(choice.chosen)
        return ParetoPoint(self._bytes(choice), choice.cost, measured, ms)

    def _single(self, weight_format: WeightFormat) -> ParetoPoint:
        """Returns the result of one format for all units.

        Units that can't have it get the format with the fewest bytes that they can have.
        """
        return self._point(Assignment.from_choices(self.options, self._everywhere(weight_format)))

    def _everywhere(self, weight_format: WeightFormat) -> tuple[int, ...]:
        return tuple(
            unit.formats.index(weight_format) if weight_format in unit.formats else unit.smallest for unit in self.units
        )


def _unit_choice(unit: FormatUnit, costs: Sequence[float], chosen: int) -> UnitChoice:
    options = [FormatOption(str(f), s, c) for f, s, c in zip(unit.formats, unit.sizes, costs, strict=True)]
    return UnitChoice(unit.where, str(unit.formats[chosen]), tuple(options))


def check_bytes(stored: Sequence[StoredBytes], recipe: Recipe) -> None:
    """Raises VerificationError if a bundle's weights take more than the recipe's ``max_bytes``."""
    most, total = recipe.budget.max_bytes, sum(s.nbytes for s in stored)
    if most is not None and total > most:
        raise VerificationError(
            f"recipe {recipe.name}: the weights take {total:,} bytes, and max_bytes is {most:,}",
            hint="Take a recipe of smaller formats, or allow more with max_bytes in [budget].",
        )
