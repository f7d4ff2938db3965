"""Channels of feed-forward networks go: those whose removal, compensated as well as can be, costs the output least.

The network computes the sum over its channels c of a_c W_c, with a_c the activation and W_c a column of the weight that
closes it. On calibration tokens, as the pruned networks before leave them, channels go one by one, each the cheapest
after those before (see eliminate.py), and what is kept compensates by least squares: a mix of columns, which the weight
is multiplied with when it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.pruning import Pruning
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.panel_layouts import PANEL

from ..ir.program import Program
from ..ir.weights import WeightExpr
from .calibrated_walk import calibration_tokens, walk
from .eliminate import Moments
from .feed_forwards import FeedForward, feed_forwards
from .fit_removed import ERROR, PLAIN_ERROR, fitted, halves_of, single_inputs

MOST_TOKENS = 8192
"""Of the calibration's: a few for each channel of a wide network."""

CHANNELS, KEPT = "channels", "channels kept"
"""Names of metrics."""


class PruneChannels(Pass):
    """The share of each network's channels that the recipe says, to the nearest multiple that weights are stored in."""

    name = "prune_channels"
    exact = False
    reshapes = True

    def wanted(self, context: PassContext) -> bool:
        return context.pruning is not None and context.pruning.wants("channels")

    def call(self, program: Program, context: PassContext) -> PassResult:
        pruning = context.pruning
        if pruning is None or not pruning.wants("channels"):
            return PassResult()
        networks, rejected = feed_forwards(program)
        pruning.check_matched("channels", [n.path for n in networks])
        counts = {n: kept_channels(n, pruning) for n in networks}
        chosen = [n for n in networks if counts[n] < n.width]
        for network in networks:
            share = pruning.share("channels", network.path)
            if share and network not in chosen:
                least = f"less than half of the {step_of(network, pruning)} that go together"
                reason = f"a share of {share:g} of {network.width} channels is {least}"
                rejected.append(Rejection(network.down.name, network.path, reason))
        if not chosen:
            if pruning.channels:
                raise PassError(
                    "prune.channels: no channel of this model can go",
                    hint=rejected[0].reason if rejected else "It has no feed-forward networks of linears.",
                )
            return PassResult(0, rejected)
        sweep = _Sweep(program, context, {n.down: (n, counts[n]) for n in chosen}, pruning)
        sequences = calibration_tokens(program, context, self.name, {n.down: _working(n) for n in chosen}, MOST_TOKENS)
        sweep.run(sequences)
        for network in chosen:
            kept, down = sweep.found[network]
            network.keep(program, kept, down)
        return PassResult(len(chosen), rejected, sweep.metrics)


def step_of(network: FeedForward, pruning: Pruning) -> int:
    """How many channels go at a time: what is left must be whole groups, and whole panels if it was before."""
    step = lcm(PANEL, pruning.multiple)  # weights are stored in panels of so many rows
    return step if network.width % step == 0 else pruning.multiple


def kept_channels(network: FeedForward, pruning: Pruning) -> int:
    """How many channels a network keeps: the nearest number to what the recipe says that can be stored.

    Raises PassError if that is none.
    """
    share, step = pruning.share("channels", network.path), step_of(network, pruning)
    if not share:
        return network.width
    kept = min(network.width, round(network.width * (1 - share) / step) * step)
    if not kept:
        raise PassError(
            f"prune.channels: a share of {share:g} leaves {network.path} none of its {network.width} channels, "
            f"which go {step} at a time",
            hint=f"Remove a share of {1 - step / network.width:.3g} at most.",
        )
    return kept


def _working(network: FeedForward) -> int:
    """Bytes that looking at a network takes: moments, their inverse and what that takes, and the weight."""
    return 8 * (6 * network.width**2 + 4 * network.width * 64)


@dataclass
class _Sweep:
    """One run over the tokens, which chooses while it runs. ``found``: what each network keeps, and its weight."""

    program: Program
    context: PassContext
    targets: dict[Node, tuple[FeedForward, int]]
    pruning: Pruning

    def run(self, sequences: Sequence[torch.Tensor]) -> None:
        self.found: dict[FeedForward, tuple[tuple[int, ...], WeightExpr]] = {}
        self.metrics: list[Metric] = []
        self._halves = halves_of(sequences)
        walk(self.program, dict.fromkeys(self.targets, self._look), sequences)
        self.context.progress(len(self.targets), len(self.targets), "")

    def _look(self, node: Node, args: Sequence[Any]) -> torch.Tensor:
        network, count = self.targets[node]
        self.context.progress(len(self.found), len(self.targets), network.path)
        x, weight, bias = args[0], args[1].float(), args[2]
        moments = [Moments.of(x[half]) for half in self._halves]
        fit = fitted(moments, weight, *single_inputs(network.width - count), self.pruning.correct)
        expr = self.program.weight_of(node.args[1])
        assert expr is not None
        scratch = self.context.scratch
        file = None if scratch is None else scratch / f"{network.path}.mix"
        self.found[network] = tuple(fit.kept.tolist()), fit.expression(expr, file)
        values = {CHANNELS: network.width, KEPT: count, ERROR: fit.error, PLAIN_ERROR: fit.plain_error}
        self.metrics += [Metric(network.path, name, float(value)) for name, value in values.items()]
        return fit.apply(x, weight, bias)
