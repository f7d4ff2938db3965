"""The search of [attention] for the numbers of key/value heads: the smallest cache within a KL, or the least KL within
a size.

One evaluation of the program measures the cost of each layer alone. At the call of an attention its heads are fitted in
every number. With the fewest heads the rest of the program is computed again, and the KL of the logits is measured. The
KL of the other numbers is predicted from their squared errors in the output of the attention.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.passes.attention.group_kv_heads import GroupKvHeads, some_tokens
from enginewright.passes.attention.kv_sites import Site, find_site
from enginewright.passes.attention.observe_heads import HeadObserver
from enginewright.passes.attention.regroup_heads import regroup
from enginewright.passes.framework.kv_options import KvHeadsOverride, KvOptions
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.stepwise_evaluation import StepwiseEvaluation
from enginewright.passes.framework.token_sequences import mean_kl
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE, join_where
from enginewright.runtime.shared.contracts import head_bytes

from .assign import Assignment, Options, fewest_bytes
from .measure_choices import FEWEST_TOKENS, affordable_tokens, cache_bytes, share_of
from .report import CachePoint, HeadsOption, KvSearchReport, LayerOptions
from .search import NothingToChooseError, NothingWithinError, Search, Task, Tried, smallest_within, some_of


@dataclass(frozen=True)
class LayerUnit:
    """An attention, and the numbers of key/value heads that it can have, from its own number to the fewest."""

    site: Site
    counts: tuple[int, ...]


class KvHeadSearch(Search[KvSearchReport]):
    """The search for a recipe whose [attention] has a budget. Sizes are the bytes of the cache for a token."""

    stage: ClassVar[str] = "heads"
    section: ClassVar[str] = "attention"
    passes: ClassVar[tuple[str, ...]] = (GroupKvHeads.name,)

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.context = replace(self.context, scratch=None)

    @property
    def attention(self) -> KvOptions:
        """The section [attention] of the recipe."""
        assert self.recipe.attention is not None
        return self.recipe.attention

    def find_units(self) -> None:
        self.units, reasons = list[LayerUnit](), list[str]()
        sizes = list[tuple[int, ...]]()
        for node in self.program.nodes_of(torch.ops.ew.attention.default):
            arguments, cache = bound_arguments(node), self.recipe.cache_of(join_where(node.meta[WHERE]))
            heads, size = (int(n) for n in self.program.value(arguments["k"]).shape[1:])
            each = head_bytes(cache, 0, size) + head_bytes(cache, 1, int(self.program.value(arguments["v"]).shape[2]))
            site = find_site(self.program, node)
            if isinstance(site, str) or heads == 1:
                self.fixed += heads * each
                reasons.append(site if isinstance(site, str) else "it has one key/value head already")
                continue
            counts = tuple(n for n in range(heads, 0, -1) if heads % n == 0)
            self.units.append(LayerUnit(site, counts))
            sizes.append(tuple(n * each for n in counts))
        if not self.units:
            why = "; ".join(dict.fromkeys(reasons)) or "it has no attention"
            raise NothingToChooseError(
                f"recipe {self.recipe.name}: attention: no key/value heads of this model can be grouped: {why}",
                hint="Leave [attention] out.",
            )
        affordable = max(FEWEST_TOKENS, affordable_tokens(len(self.units), self.task.parameters))
        self.tokens = min(self.attention.tokens, affordable)
        seen, method = some_tokens(self.task.sequences, self.tokens), self.attention
        costs = measure_layers(self.program, self.units, method, seen, self.on_progress, self.context.memory_budget)
        self.options = [Options(s, c) for s, c in zip(sizes, costs, strict=True)]
        self.check = self.checked_on([GroupKvHeads()])

    def choose(self) -> Tried:
        most, limit = self.attention.max_cache_bytes_per_token, self.attention.max_kl
        if most is not None:
            choice = self.least_kl(most)
            if choice is None:
                raise NothingWithinError(
                    f"recipe {self.recipe.name}: no numbers of heads are within max_cache_bytes_per_token = {most:,}: "
                    f"one head in each layer that can have it takes {self._bytes(self.curve[-1]):,} bytes",
                    hint="Allow more with max_cache_bytes_per_token in [attention].",
                )
            if limit is None:
                return choice
            if choice.kl > limit:
                raise NothingWithinError(
                    f"recipe {self.recipe.name}: no numbers of heads are within both max_kl = {limit:g} and "
                    f"max_cache_bytes_per_token = {most:,}: what costs least of those has a KL of {choice.kl:.3g}",
                    hint="Allow more of one of them in [attention].",
                )
        assert limit is not None
        first = len(self.tried)
        best = self.smallest(limit)
        if most is not None:  # what the KL alone would choose may be larger
            best = smallest_within([t for t in self.tried if self._bytes(t.choice) <= most], limit)
        if best is None:
            nearest = min(t.kl for t in self.tried[first:])
            raise NothingWithinError(
                f"recipe {self.recipe.name}: no layer can have fewer key/value heads within max_kl = {limit:g}: the "
                f"least that was found has a KL of {nearest:.3g}",
                hint="Allow more with max_kl in [attention], or recover what it costs by training.",
            )
        return best

    def fewest(self, most_kl: float) -> Assignment:
        """Returns the choice with the smallest cache whose predicted KL is at most ``most_kl``.

        It always changes a layer: if no change is within ``most_kl``, it makes the one with the least KL.
        """
        assignment = fewest_bytes(self.options, most_kl)
        if assignment is not None and any(assignment.chosen):
            return assignment
        each = [(costs.costs[o], i, o) for i, costs in enumerate(self.options) for o in range(1, len(costs.costs))]
        _, layer, option = min(each)
        return Assignment.from_choices(self.options, [option if i == layer else 0 for i in range(len(self.options))])

    def applied(self, choice: Assignment) -> Recipe:
        """Returns the recipe in which the layers with fewer heads have the numbers that ``choice`` has for them.

        If [budget] has no KL, it gets the KL of [attention].
        """
        attention, budget = self.attention, self.recipe.budget
        overrides = tuple(
            KvHeadsOverride(layers=glob.escape(unit.site.path), kv_heads=unit.counts[o])
            for unit, o in zip(self.units, choice.chosen, strict=True)
            if o
        )
        fewer = None
        if overrides:
            fewer = KvOptions(overrides=overrides, method=attention.method, grouping=attention.grouping)
        if budget.max_kl is None and attention.max_kl is not None:
            budget = budget.model_copy(update={"max_kl": attention.max_kl})
        return self.recipe.model_copy(update={"attention": fewer, "budget": budget})

    def label(self, choice: Assignment) -> str:
        return f"{self._bytes(choice):,} bytes a token"

    def report(self, taken: Tried, seconds: float) -> KvSearchReport:
        return KvSearchReport(
            max_kl=self.attention.max_kl,
            max_cache_bytes_per_token=self.attention.max_cache_bytes_per_token,
            tokens=self.tokens,
            chosen=self._point(taken.choice, taken.kl),
            measured_kl=taken.measured,
            curve=tuple(self._point(a) for a in some_of(self.curve)),
            tried=tuple(self._point(t.choice, t.kl) for t in self.tried),
            layers=tuple(
                LayerOptions(u.site.path, u.counts[chosen], tuple(map(HeadsOption, u.counts, options.costs)))
                for u, options, chosen in zip(self.units, self.options, taken.choice.chosen, strict=True)
            ),
            seconds=seconds,
        )

    def _point(self, choice: Assignment, measured: float | None = None) -> CachePoint:
        return CachePoint(self._bytes(choice), choice.cost, measured)


def measure_layers(
    program: Program,
    units: Sequence[LayerUnit],
    options: KvOptions,
    sequences: Sequence[torch.Tensor],
    on_progress: Callable[[int, int, str], None],
    memory_budget: int | None = None,
) -> list[tuple[float, ...]]:
    """Returns the predicted KL, in nats per token, of each number of heads of each layer; 0 for its own number.

    Args:
        program: a normalised program in 32-bit floats.
        units: the attentions of that program.
        options: the method that reduces the number of heads.
        sequences: token ids, [S] each.
        on_progress: called with the number of measured layers, the number of all, and the path of the next one.
        memory_budget: bytes of memory that may be used; see ``PassContext``.
    """
    run = StepwiseEvaluation(program, sequences, cache_bytes(memory_budget))
    observer = HeadObserver(program, [unit.site for unit in units], run.fast)
    unit_of = {unit.site.attention: unit for unit in units}
    values = run.start()
    reference = run.finish(dict(values))
    costs: list[tuple[float, ...]] = []
    for at, node in enumerate(run.calls):
        args, kwargs = run.arguments(node, values)
        observer.before(node, args)
        unit = unit_of.get(node)
        if unit is not None:
            on_progress(len(costs), len(units), unit.site.path)
            seen = observer.seen(unit.site, args, kwargs)
            regrouped = [regroup(seen, count, options) for count in unit.counts[1:]]
            fewest, output = regrouped[-1], unit.site.output
            replaced = {
                node: _always(fewest.context),
                output: run.with_argument(output, 1, _always(fewest.output)),
            }
            kl = mean_kl(reference, run.finish(dict(values), at, replaced))
            costs.append((0.0, *(share_of(kl, fewest.error) * one.error for one in regrouped)))
        run.step(node, values)
        observer.after(node, values[node])
    on_progress(len(units), len(units), "")
    return costs


def _always(value: torch.Tensor) -> Callable[[object], torch.Tensor]:
    return lambda _: value
