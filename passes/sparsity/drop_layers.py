"""Removes whole layers: those whose removal changes the model least.

A layer adds to the residual stream, so the model works without it, though less well. The candidates are the layers that
change the direction of the stream least (1 - cosine, as in ShortGPT: Men et al. 2024,
https://arxiv.org/abs/2403.03853). They are removed one by one: always the one that increases the KL divergence from the
original model least. The first and the last layer are candidates too. The other layers keep their numbers and caches.
"""

from __future__ import annotations

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult
from enginewright.passes.framework.pruning import Pruning, matches, unmatched
from enginewright.passes.framework.token_sequences import beginnings
from enginewright.runtime.shared.errors import PassError

from ..ir.program import Program
from .layers import Layer, LeavingOut, find_layers

TOKENS = 256
"""The number of calibration tokens, in sequences of LENGTH. It is small because there are many evaluations, and enough
to compare layers.
"""

LENGTH = 64

CANDIDATES = 6
"""The number of layers that are tried in addition to the number to remove."""

SIMILARITY, KL = "cosine of the stream before and behind", "KL without this layer and those before"
"""Names of metrics: the cosine of the residual stream before and after a layer, and the KL divergence after its
removal.
"""


class DropLayers(Pass):
    """Removes the layers that the recipe names, and as many further ones as it asks for."""

    name = "drop_layers"
    exact = False
    reshapes = True

    def wanted(self, context: PassContext) -> bool:
        return context.recipe.prune is not None and bool(context.recipe.prune.layers or context.recipe.prune.drop)

    def needs_tokens(self, context: PassContext) -> bool:
        return context.recipe.prune is not None and context.recipe.prune.layers > 0

    def call(self, program: Program, context: PassContext) -> PassResult:
        pruning = context.recipe.prune
        if pruning is None or not (pruning.layers or pruning.drop):
            return PassResult()
        layers, rejected = find_layers(program)
        dropped = named_layers(layers, pruning)
        total = len(layers) + len(rejected)
        if len(dropped) + pruning.layers >= total:
            raise PassError(
                f"prune.layers: {len(dropped) + pruning.layers} layers are to go, and the model has {total}",
                hint="Leave one at the least.",
            )
        if len(dropped) + pruning.layers > len(layers):
            raise PassError(
                f"prune.layers: {pruning.layers} layers are to go, and only {len(layers)} can: {rejected[0].reason}",
                hint="Drop fewer layers.",
            )
        metrics: list[Metric] = []
        if pruning.layers:
            sequences = beginnings(context.calibration, TOKENS, LENGTH)
            keep = 1 << 30 if context.memory_budget is None else min(1 << 30, context.memory_budget // 4)
            runs = LeavingOut(program, layers, sequences, keep)
            chosen, metrics = least_missed(runs, layers, dropped, pruning.layers, context)
            dropped += chosen
        for layer in sorted(dropped, key=layers.index, reverse=True):
            program.replace(layer.behind, layer.before)
        return PassResult(len(dropped), rejected, metrics)


def named_layers(layers: list[Layer], pruning: Pruning) -> list[Layer]:
    """Returns the layers whose paths match the recipe's patterns ``drop``. Raises RecipeError for a pattern without a
    match.
    """
    paths = [layer.path for layer in layers]
    for pattern in pruning.drop:
        if not any(matches(pattern, path) for path in paths):
            raise unmatched(pattern, paths, "prune.drop")
    return [layer for layer in layers if any(matches(pattern, layer.path) for pattern in pruning.drop)]


def least_missed(
    runs: LeavingOut, layers: list[Layer], dropped: list[Layer], count: int, context: PassContext
) -> tuple[list[Layer], list[Metric]]:
    """Chooses ``count`` further layers to remove. Returns them in the order of their removal, and measurements.

    Args:
        runs: evaluates the program without some layers.
        layers: all layers that can be removed.
        dropped: the layers that are removed already.
        count: the number of layers to choose.
        context: the pass's context, for progress.
    """
    left = sorted((x for x in layers if x not in dropped), key=lambda x: -runs.similarity[x])[: count + CANDIDATES]
    chosen: list[Layer] = []
    metrics: list[Metric] = []
    total = sum(len(left) - n for n in range(count))
    done = 0
    for _ in range(count):
        costs: dict[Layer, float] = {}
        for layer in left:
            context.progress(done, total, layer.path)
            costs[layer] = runs.kl([*dropped, *chosen, layer])
            done += 1
        best = min(costs, key=costs.__getitem__)
        left.remove(best)
        chosen.append(best)
        metrics += [Metric(best.path, SIMILARITY, runs.similarity[best]), Metric(best.path, KL, costs[best])]
    context.progress(total, total, "")
    return chosen, metrics
