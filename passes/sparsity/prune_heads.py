"""Removes attention heads: those whose removal, with compensation, changes the output least.

The linear after an attention multiplies the result of each query head by columns of its own, so heads are like the
channels of a feed-forward network (eliminate.py). Attention needs the same number of query heads for each key/value
head. So either the same number is removed from each group, or whole groups with their keys and values, or both,
whichever has the least error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from enginewright.passes.framework.base import Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.pruning import Pruning
from enginewright.runtime.shared.errors import PassError

from ..ir.program import Program
from ..quantization.calibrated_walk import calibration_tokens
from .attention_heads import Heads, attention_heads
from .eliminate import Moments, eliminate_blocks
from .fit_removed import CHOICE_DAMPING, Choose, Fit, Fitting, fit_in_order, fitted

MOST_TOKENS = 8192
"""The most calibration tokens."""

HEADS, KEPT, GROUPS_KEPT = "query heads", "query heads kept", "key/value heads kept"
"""Names of metrics."""


class PruneHeads(Pass):
    """Removes the recipe's share of each attention's query heads, rounded to the nearest possible number."""

    name = "prune_heads"
    exact = False
    reshapes = True

    def wanted(self, context: PassContext) -> bool:
        return context.recipe.prune is not None and context.recipe.prune.wants("heads")

    def needs_tokens(self, context: PassContext) -> bool:
        return True

    def call(self, program: Program, context: PassContext) -> PassResult:
        pruning = context.recipe.prune
        if pruning is None or not pruning.wants("heads"):
            return PassResult()
        all_heads, rejected = attention_heads(program)
        pruning.check_matched("heads", [h.path for h in all_heads])
        splits = {h: possible_splits(h, pruning) for h in all_heads if pruning.share("heads", h.path)}
        chosen = [h for h, options in splits.items() if options]
        for heads in splits.keys() - set(chosen):
            counts = ", ".join(map(str, possible_counts(heads, pruning)))
            reason = f"a share of {pruning.share('heads', heads.path):g} is next to all {heads.queries}, of {counts}"
            rejected.append(Rejection(heads.site.attention.name, heads.path, reason))
        if not chosen:
            if pruning.heads:
                raise PassError(
                    f"prune.heads: no head of this model can go: {rejected[0].reason if rejected else 'it has none'}",
                    hint="Remove a larger share of the heads, or none.",
                )
            return PassResult(0, rejected)
        working = {h.site.output: 48 * (h.queries * h.value_size) ** 2 for h in chosen}
        sequences = calibration_tokens(program, context, f"the pass {self.name}", working, MOST_TOKENS)
        fittings = {h.site.output: (h.path, _fitting(h, splits[h], pruning)) for h in chosen}
        fits, metrics = fit_in_order(program, context, fittings, sequences)
        for heads in chosen:
            fit, output = fits[heads.site.output]
            heads.keep(program, *_left(heads, fit), output)
        return PassResult(len(chosen), rejected, metrics)


@dataclass(frozen=True)
class Split:
    """A possible result of pruning: ``groups`` key/value heads, with ``each`` query heads for each of them."""

    groups: int
    each: int


def possible_counts(heads: Heads, pruning: Pruning) -> list[int]:
    """Returns the numbers of query heads that can stay, from the fewest to all."""
    return sorted({s.groups * s.each for s in _splits(heads, pruning)})


def possible_splits(heads: Heads, pruning: Pruning) -> list[Split]:
    """Returns the ways to keep the number of query heads that is nearest to the recipe's; [] if that is all heads.

    Raises PassError if the recipe leaves no head.
    """
    share = pruning.share("heads", heads.path)
    target = heads.queries * (1 - share)
    counts = possible_counts(heads, pruning)
    if target < counts[0] / 2:
        raise PassError(
            f"prune.heads: a share of {share:g} leaves {heads.path} none of its {heads.queries} heads; {counts[0]} can "
            "be left at the least",
            hint=f"Remove a share of {1 - counts[0] / heads.queries:.3g} at most.",
        )
    nearest = min(reversed(counts), key=lambda count: abs(count - target))
    if nearest == heads.queries:
        return []
    return [s for s in _splits(heads, pruning) if s.groups * s.each == nearest]


def _splits(heads: Heads, pruning: Pruning) -> list[Split]:
    """Returns all ways to keep some heads. If all columns fill whole groups of the weight's format, so do the columns
    of each way.
    """
    size, each = heads.value_size, heads.queries // heads.groups
    unit = pruning.multiple if heads.queries * size % pruning.multiple == 0 else 1
    options = [Split(n, m) for n in range(1, heads.groups + 1) for m in range(1, each + 1)]
    return [s for s in options if s.groups * s.each * size % unit == 0]


def _fitting(heads: Heads, splits: list[Split], pruning: Pruning) -> Fitting:
    def choose(halves: Sequence[Moments], weight: torch.Tensor) -> tuple[Fit, dict[str, float]]:
        fits = [fitted(halves, weight, *_choices(heads, split), pruning.correct) for split in splits]
        best = min(range(len(fits)), key=lambda i: fits[i].error)
        queries, _ = _left(heads, fits[best])
        return fits[best], {HEADS: heads.queries, KEPT: len(queries), GROUPS_KEPT: splits[best].groups}

    return choose


def _left(heads: Heads, fit: Fit) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the indices of the query heads and of the key/value heads that stay, in order."""
    each = heads.queries // heads.groups
    queries = tuple(dict.fromkeys(int(c) // heads.value_size for c in fit.kept))
    return queries, tuple(dict.fromkeys(q // each for q in queries))


def _choices(heads: Heads, split: Split) -> tuple[Choose, Choose]:
    """Returns the functions ``choose`` and ``plainly`` of ``fitted`` that choose the columns of heads to remove.

    In the first, other heads compensate for removed ones. Both first remove whole groups until ``split.groups`` are
    left, then heads of each of these until ``split.each`` are left.
    """
    each = heads.queries // heads.groups
    members = [list(range(g * each, (g + 1) * each)) for g in range(heads.groups)]

    def choose(moments: Moments, weight: torch.Tensor) -> torch.Tensor:
        blocks = [heads.columns(m) for m in members]
        gone = eliminate_blocks(moments, weight, blocks, heads.groups - split.groups, CHOICE_DAMPING)
        return _columns(heads, members, gone, lambda left: _within(heads, moments, weight, left, split.each))

    def plainly(moments: Moments, weight: torch.Tensor) -> torch.Tensor:
        costs = [
            moments.of_some(heads.columns([h])).output(weight[:, heads.columns([h])]) for h in range(heads.queries)
        ]
        order = sorted(range(heads.groups), key=lambda g: sum(costs[h] for h in members[g]))
        gone = order[: heads.groups - split.groups]
        return _columns(
            heads,
            members,
            gone,
            lambda left: [h for m in left for h in sorted(m, key=costs.__getitem__)[: each - split.each]],
        )

    return choose, plainly


Within = Callable[[list[list[int]]], Sequence[int]]
"""A function that gets the heads of each remaining group and returns those to remove."""


def _columns(heads: Heads, members: list[list[int]], gone: Sequence[int], within: Within) -> torch.Tensor:
    """Returns the columns of the removed heads: of the groups ``gone``, and of the heads that ``within`` chooses in
    other groups.

    ``members`` has the heads of each group.
    """
    left = [m for g, m in enumerate(members) if g not in set(gone)]
    removed = sorted([h for g in gone for h in members[g]] + list(within(left)))
    return torch.tensor(heads.columns(removed))


def _within(heads: Heads, moments: Moments, weight: torch.Tensor, left: list[list[int]], each: int) -> list[int]:
    """Chooses the heads to remove from each remaining group in ``left``, the cheapest first, until it has ``each``
    heads.

    Args:
        heads: the heads of the attention.
        moments: of the inputs of the linear after the attention.
        weight: of that linear, [N, K].
        left: the heads of each remaining group.

    Returns:
        the indices of the removed heads. Heads of removed groups don't take part in the compensation.
    """
    columns_left = heads.columns([h for m in left for h in m])
    moments_left, columns = moments.of_some(columns_left), weight[:, columns_left]
    size, count = heads.value_size, len(left[0])
    gone: list[int] = []
    for number, group in enumerate(left):
        blocks = [list(range((number * count + i) * size, (number * count + i + 1) * size)) for i in range(count)]
        gone += [group[i] for i in eliminate_blocks(moments_left, columns, blocks, count - each, CHOICE_DAMPING)]
    return gone
