"""Shares and layers that go, so that a KL budget is met with as few parameters as can be.

Each layer is measured alone (pruning_sensitivity), a choice is made by adding up (assign.py), and then measured as it
will be exported, with what makes up for what goes: less or more than the sum. The budget of the sum is corrected by
that until the real one holds (budget.py).
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.pipeline.pipeline import choose_passes
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.shape_sections import PruneOverrideSection
from enginewright.optimizer.shared.progress import Progress, ProgressEvent
from enginewright.optimizer.verify.held_out import held_out
from enginewright.optimizer.verify.measuring_tokens import MeasuringTokens
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.spread import beginnings
from enginewright.passes.ir.program import Program
from enginewright.passes.sparsity.drop_layers import LENGTH, TOKENS, DropLayers
from enginewright.passes.sparsity.prune_channels import PruneChannels
from enginewright.passes.sparsity.prune_heads import PruneHeads

from .assign import Assignment, Options, fewest_bytes, pareto_curve
from .budget import ROUNDS, NothingToChooseError, NothingWithinError, smallest_within, try_within
from .check_formats import Check
from .format_sensitivity import cache_bytes
from .pruning_report import LayerChoice, PruneReport
from .pruning_sensitivity import LayerOptions, Option, layer_options


@dataclass(frozen=True)
class PruneChoice:
    """What was found: the recipe with an override for each layer, to be exported without searching, and how."""

    recipe: Recipe
    report: PruneReport


@dataclass(frozen=True)
class _Choice:
    """What goes of a layer: by module path."""

    layer: LayerOptions
    channels: dict[str, Option]
    heads: dict[str, Option]
    whole: Option | None

    @property
    def options(self) -> list[Option]:
        return [self.whole] if self.whole is not None else [*self.channels.values(), *self.heads.values()]

    @property
    def parameters(self) -> int:
        return sum(o.parameters for o in self.options)

    @property
    def cost(self) -> float:
        return sum(o.cost for o in self.options)


def choose_pruning_for_export(
    captured: CapturedModel, recipe: Recipe, context: PassContext, progress: Progress
) -> PruneChoice:
    """Chooses what goes by a recipe whose [prune] has a budget; see ``choose_pruning``.

    Every second calibration sequence is for measuring and fitting, the others are held out for the check, which looks
    at the package's text and at random tokens too, as the bundle's verification does.

    Raises RequestError if there are too few sequences, and what ``choose_pruning`` raises.
    """
    measured, checks = held_out(captured, context.calibration, "prune")
    own = replace(context, calibration=measured, required=frozenset())
    return choose_pruning(captured.program, recipe, own, checks, progress)


def choose_pruning(
    program: Program, recipe: Recipe, context: PassContext, checks: Sequence[MeasuringTokens], progress: Progress
) -> PruneChoice:
    """Chooses shares of channels and heads, and layers.

    Args:
        program: as captured; it is left as it is.
        recipe: says the budget, and the most that may go.
        context: of the passes, with the tokens that layers are measured with and fits are made of.
        checks: other tokens, of which each kind is held to the budget.
        progress: told the stage "prune".

    Raises:
        VerificationError: nothing can go within the budget; says what the least costs.
        RecipeError: nothing can go at all.
    """
    assert recipe.prune is not None and recipe.prune.max_kl is not None and context.pruning is not None
    start, max_kl, pruning = time.perf_counter(), recipe.prune.max_kl, context.pruning
    passes, _ = choose_passes(recipe.passes)
    program = program.copy()
    shaping = (DropLayers.name, PruneHeads.name, PruneChannels.name)
    PassManager(list(takewhile(lambda p: p.name not in shaping, passes)), context).run(program)

    def tell(done: int, total: int, where: str) -> None:
        progress(ProgressEvent("prune", done, total, where))

    seen = beginnings(context.calibration, TOKENS, LENGTH)
    layers, rejected = layer_options(program, pruning, seen, tell, cache_bytes(context.room))
    if not layers:
        raise NothingToChooseError(
            f"recipe {recipe.name}: prune: nothing of this model can go within these shares"
            + (f": {rejected[0].reason}" if rejected else ""),
            hint="Allow larger shares, or some layers.",
        )
    kinds = {c.origin: c.sequences for c in checks}
    check = Check(program, [DropLayers(), PruneHeads(), PruneChannels()], context, kinds)
    tried: list[tuple[int, float, float]] = []

    def measure(choices: Sequence[_Choice]) -> dict[str, float]:
        removed = sum(c.parameters for c in choices)
        tell(len(tried), ROUNDS, f"measuring {removed:,} parameters less")
        pruned = _resolved(recipe, choices).prune
        assert pruned is not None
        found = check.measure_with(replace(context, pruning=pruned.to_pruning(recipe.weights, recipe.auto)))
        tried.append((removed, sum(c.cost for c in choices), max(found.values())))
        return found

    choices, measured = _within(layers, max_kl, measure, recipe.name)
    report = PruneReport(
        max_kl=max_kl,
        tokens=sum(map(len, seen)),
        parameters_removed=sum(c.parameters for c in choices),
        predicted_kl=sum(c.cost for c in choices),
        measured_kl=measured,
        tried=tuple(tried),
        layers=tuple(_layer_choice(c) for c in choices),
        seconds=round(time.perf_counter() - start, 3),
    )
    return PruneChoice(_resolved(recipe, choices), report)


def _within(
    layers: Sequence[LayerOptions], max_kl: float, measure: Callable[[Sequence[_Choice]], dict[str, float]], name: str
) -> tuple[list[_Choice], dict[str, float]]:
    """The choice of the most parameters whose measured KL is within the budget, and that KL."""
    tables = [_choices(layer) for layer in layers]
    sizes = [max(c.parameters for c in table) for table in tables]
    options = [
        Options(tuple(most - c.parameters for c in table), tuple(c.cost for c in table))
        for table, most in zip(tables, sizes, strict=True)
    ]
    least = next(a for a in pareto_curve(options)[1:] if a.cost > 0 or a.size < sum(sizes))

    def most_removed(cost: float) -> Assignment:
        found = fewest_bytes(options, cost)
        return least if found is None or found.size == sum(sizes) else found

    def chosen(assignment: Assignment) -> list[_Choice]:
        return [table[i] for table, i in zip(tables, assignment.chosen, strict=True)]

    tried = try_within(max_kl, most_removed, lambda a: measure(chosen(a)))
    best = smallest_within(tried, max_kl)
    if best is None:
        nearest = min(tried, key=lambda t: t.kl)
        removed = sum(sizes) - nearest.choice.size
        each = ", ".join(f"{kl:.3g} on {kind}" for kind, kl in nearest.measured.items())
        raise NothingWithinError(
            f"recipe {name}: nothing that may go is within max_kl = {max_kl:g} of [prune]: without {removed:,} "
            f"parameters, the nearest that was found, KL is {each}",
            hint="Allow more with max_kl in [prune], or recover what pruning costs by training.",
        )
    return chosen(best.choice), best.measured


def _choices(layer: LayerOptions) -> list[_Choice]:
    """All that may be done to a layer: nothing first."""
    found = [_Choice(layer, {}, {}, None)]
    for path, options in layer.channels.items():
        found += [replace(c, channels={**c.channels, path: o}) for c in found for o in options]
    for path, options in layer.heads.items():
        found += [replace(c, heads={**c.heads, path: o}) for c in found for o in options]
    if layer.whole is not None:
        found.append(_Choice(layer, {}, {}, layer.whole))
    return found


def _resolved(recipe: Recipe, choices: Sequence[_Choice]) -> Recipe:
    """The recipe with what was chosen, and the budget for all of it."""
    assert recipe.prune is not None
    overrides = [
        PruneOverrideSection(layers=glob.escape(path), **{kind: option.share})
        for choice in choices
        for kind, modules in (("channels", choice.channels), ("heads", choice.heads))
        for path, option in modules.items()
    ]
    drop = tuple(glob.escape(c.layer.path) for c in choices if c.whole is not None)
    update = {"channels": 0.0, "heads": 0.0, "layers": 0, "max_kl": None}
    prune = recipe.prune.model_copy(
        update={**update, "overrides": tuple(overrides), "drop": (*recipe.prune.drop, *drop)}
    )
    budget = recipe.budget
    if budget.max_kl is None:
        budget = budget.model_copy(update={"max_kl": recipe.prune.max_kl})
    return recipe.model_copy(update={"prune": prune, "budget": budget})


def _layer_choice(choice: _Choice) -> LayerChoice:
    layer = choice.layer

    def measured(modules: dict[str, tuple[Option, ...]]) -> float | None:
        return sum(options[-1].cost for options in modules.values()) if modules else None

    return LayerChoice(
        layer=layer.path,
        dropped=choice.whole is not None,
        channels=max((o.share for o in choice.channels.values()), default=0.0),
        heads=max((o.share for o in choice.heads.values()), default=0.0),
        parameters=choice.parameters,
        predicted_kl=choice.cost,
        kl_channels=measured(layer.channels),
        kl_heads=measured(layer.heads),
        kl_layer=None if layer.whole is None else layer.whole.cost,
    )
