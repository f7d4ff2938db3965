"""Numbers of heads for all layers, so that a KL budget is met with the smallest cache, or a size with the least KL.

Each layer's numbers are measured alone (kv_head_sensitivity.py), an assignment is chosen by adding them up (assign.py),
and then converted as it would be and measured. The budget of the sum is corrected by that until the real one holds
(budget.py).
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch

from enginewright.optimizer.pipeline.pipeline import choose_passes
from enginewright.optimizer.recipes.attention_section import AttentionSection, KvHeadsOverrideSection
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.shared.progress import Progress, ProgressEvent
from enginewright.optimizer.verify.measuring_tokens import MeasuringTokens
from enginewright.passes.attention.group_kv_heads import GroupKvHeads, some_tokens
from enginewright.passes.attention.kv_sites import find_site
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import KvHeadsOverride, KvOptions
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.plugins.shared.contracts import head_bytes

from .assign import Assignment, Options, fewest_bytes, least_cost, pareto_curve
from .budget import ROUNDS, NothingToChooseError, NothingWithinError, smallest_within, some_of, try_within
from .check_formats import Check
from .format_sensitivity import WORK
from .kv_head_sensitivity import LayerUnit, measure_layers
from .kv_heads_report import HeadsOption, HeadsPoint, KvSearchReport, LayerOptions

FEWEST_TOKENS = 64
"""That a layer is measured with, however large the model."""


@dataclass(frozen=True)
class HeadsChoice:
    """What was found: the recipe with an override for each layer, to be exported without searching, and how."""

    recipe: Recipe
    report: KvSearchReport


def choose_heads(
    program: Program,
    recipe: Recipe,
    parameters: int,
    sequences: Sequence[torch.Tensor],
    checks: Sequence[MeasuringTokens],
    context: PassContext,
    progress: Progress,
) -> HeadsChoice:
    """Chooses the heads of a recipe whose [attention] has a budget.

    Args:
        program: as captured; it is left as it is.
        recipe: says the budget, and how heads become fewer.
        parameters: of the model, for how much can be measured.
        sequences: token ids, [S] each, that layers are measured with.
        checks: other tokens, of which each kind is held to the budget.
        context: for the passes, as of an export.
        progress: told the stage "heads".

    Raises:
        VerificationError: nothing meets the budget; says how near it came.
        RecipeError: no layer's heads can be grouped; says why.
    """
    assert recipe.attention is not None
    start = time.perf_counter()

    def tell(done: int, total: int, where: str) -> None:
        progress(ProgressEvent("heads", done, total, where))

    context = replace(context, required=frozenset(), scratch=None)
    passes, _ = choose_passes(recipe.passes)
    program = program.copy()
    before = [p for p in takewhile(lambda p: p.name != GroupKvHeads.name, passes) if p.wanted(context)]
    PassManager(before, context).run(program)
    options = recipe.attention.to_options(recipe.name)
    units, sizes, fixed = _units(program, recipe)
    tokens = min(recipe.attention.tokens, max(FEWEST_TOKENS, WORK // max(1, len(units) * parameters)))
    costs = measure_layers(program, units, options, some_tokens(sequences, tokens), tell, context.room)
    priced = [Options(s, c) for s, c in zip(sizes, costs, strict=True)]
    check = Check(program, [GroupKvHeads()], context, {c.origin: c.sequences for c in checks})
    search = _Search(recipe, recipe.attention, units, priced, fixed, check, context, options, tell)
    found, measured = search.run()
    report = KvSearchReport(
        max_kl=recipe.attention.max_kl,
        max_cache_bytes_per_token=recipe.attention.max_cache_bytes_per_token,
        tokens=tokens,
        chosen=search.point(found, max(measured.values())),
        measured_kl=measured,
        curve=tuple(search.point(a) for a in some_of(pareto_curve(priced))),
        tried=tuple(search.tried),
        layers=tuple(
            LayerOptions(u.site.path, u.counts[o], tuple(map(HeadsOption, u.counts, c)))
            for u, c, o in zip(units, costs, found.chosen, strict=True)
        ),
        seconds=round(time.perf_counter() - start, 3),
    )
    return HeadsChoice(_resolved(recipe, search.overrides(found)), report)


def _units(program: Program, recipe: Recipe) -> tuple[list[LayerUnit], list[tuple[int, ...]], int]:
    """The attentions that can have fewer heads, the cache's bytes for a token of each number, and those of others."""
    units, sizes, fixed, reasons = [], list[tuple[int, ...]](), 0, []
    for node in program.nodes_of(torch.ops.ew.attention.default):
        given = bound_arguments(node)
        heads, size = (int(n) for n in program.value(given["k"]).shape[1:])
        each = head_bytes(recipe.cache, size) + head_bytes(recipe.cache, int(program.value(given["v"]).shape[2]))
        site = find_site(program, node)
        if isinstance(site, str) or heads == 1:
            fixed += heads * each
            reasons.append(site if isinstance(site, str) else "it has one key/value head already")
            continue
        counts = tuple(n for n in range(heads, 0, -1) if heads % n == 0)
        units.append(LayerUnit(site, counts))
        sizes.append(tuple(n * each for n in counts))
    if not units:
        why = "; ".join(dict.fromkeys(reasons)) or "it has no attention"
        raise NothingToChooseError(
            f"recipe {recipe.name}: attention: no key/value heads of this model can be grouped: {why}",
            hint="Leave [attention] out.",
        )
    return units, sizes, fixed


@dataclass
class _Search:
    recipe: Recipe
    section: AttentionSection
    units: Sequence[LayerUnit]
    options: Sequence[Options]
    fixed: int
    check: Check
    context: PassContext
    method: KvOptions
    tell: Callable[[int, int, str], None]
    tried: list[HeadsPoint] = field(default_factory=list)

    def run(self) -> tuple[Assignment, dict[str, float]]:
        most, limit = self.section.max_cache_bytes_per_token, self.section.max_kl
        if most is not None:
            found = least_cost(self.options, most - self.fixed)
            if found is None:
                smallest = self.point(pareto_curve(self.options)[-1])
                raise NothingWithinError(
                    f"recipe {self.recipe.name}: no numbers of heads are within max_cache_bytes_per_token = {most:,}: "
                    f"one head in each layer that can have it takes {smallest.bytes_per_token:,} bytes",
                    hint="Allow more with max_cache_bytes_per_token in [attention].",
                )
            measured = self._measure(found)
            kl = max(measured.values())
            if limit is not None and kl > limit:
                raise NothingWithinError(
                    f"recipe {self.recipe.name}: no numbers of heads are within both max_kl = {limit:g} and "
                    f"max_cache_bytes_per_token = {most:,}: what costs least of those has a KL of {kl:.3g}",
                    hint="Allow more of one of them in [attention].",
                )
            if limit is None:
                return found, measured
        assert limit is not None
        return self._within_kl(limit)

    def _within_kl(self, limit: float) -> tuple[Assignment, dict[str, float]]:
        tried = try_within(limit, self._fewest, self._measure)
        best = smallest_within(tried, limit)
        if best is None:
            nearest = min(t.kl for t in tried)
            raise NothingWithinError(
                f"recipe {self.recipe.name}: no layer can have fewer key/value heads within max_kl = {limit:g}: the "
                f"least that was found has a KL of {nearest:.3g}",
                hint="Allow more with max_kl in [attention], or recover what it costs by training.",
            )
        return best.choice, best.measured

    def _fewest(self, most: float) -> Assignment:
        """The smallest cache for a predicted KL; where nothing is, the layer that alone costs the least."""
        found = fewest_bytes(self.options, most)
        if found is not None and any(found.chosen):
            return found
        each = [(costs.costs[o], i, o) for i, costs in enumerate(self.options) for o in range(1, len(costs.costs))]
        _, layer, option = min(each)
        chosen = [option if i == layer else 0 for i in range(len(self.options))]
        pairs = list(zip(self.options, chosen, strict=True))
        return Assignment(tuple(chosen), sum(u.sizes[o] for u, o in pairs), sum(u.costs[o] for u, o in pairs))

    def _measure(self, tried: Assignment) -> dict[str, float]:
        self.tell(len(self.tried), ROUNDS, f"measuring {tried.size + self.fixed:,} bytes a token")
        overrides = tuple(KvHeadsOverride(o.layers, o.kv_heads) for o in self.overrides(tried))
        changed = replace(self.method, overrides=overrides) if overrides else None
        measured = self.check.measure_with(replace(self.context, kv_heads=changed))
        self.tried.append(self.point(tried, max(measured.values())))
        return measured

    def overrides(self, found: Assignment) -> tuple[KvHeadsOverrideSection, ...]:
        """One for each layer that gets fewer heads."""
        return tuple(
            KvHeadsOverrideSection(layers=glob.escape(unit.site.path), kv_heads=unit.counts[o])
            for unit, o in zip(self.units, found.chosen, strict=True)
            if o
        )

    def point(self, found: Assignment, measured: float | None = None) -> HeadsPoint:
        return HeadsPoint(found.size + self.fixed, found.cost, measured)


def _resolved(recipe: Recipe, overrides: tuple[KvHeadsOverrideSection, ...]) -> Recipe:
    """The recipe with the numbers that were chosen, if they are fewer. What its heads may cost, it may cost."""
    assert recipe.attention is not None
    given = recipe.attention
    fewer = AttentionSection(overrides=overrides, method=given.method, grouping=given.grouping) if overrides else None
    budget = recipe.budget
    if budget.max_kl is None and given.max_kl is not None:
        budget = budget.model_copy(update={"max_kl": given.max_kl})
    return recipe.model_copy(update={"attention": fewer, "budget": budget})
