"""Removes channels of feed-forward networks: those whose removal, with compensation, changes the output least.

A network computes the sum over its channels c of a_c W_c, with the activation a_c and the column W_c of the closing
weight. Calibration tokens are evaluated with the networks before it already pruned. Channels are removed one by one,
always the one that costs the least (eliminate.py). The kept ones compensate by least squares: removed columns are added
to them in shares when the weight is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import torch

from enginewright.passes.framework.base import Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.pruning import Pruning
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.panel_layouts import PANEL

from ..ir.program import Program
from ..quantization.calibrated_walk import calibration_tokens
from .eliminate import Moments
from .feed_forwards import FeedForward, feed_forwards
from .fit_removed import Fit, Fitting, fit_in_order, fitted, single_inputs

MOST_TOKENS = 8192
"""The most calibration tokens: a few for each channel of a wide network."""

CHANNELS, KEPT = "channels", "channels kept"
"""Names of metrics."""


class PruneChannels(Pass):
    """Removes the least important channels of each feed-forward network.

    The recipe gives the share to remove, which is rounded to a multiple of channels that weights can be stored in.
    """

    name = "prune_channels"
    exact = False
    reshapes = True

    def wanted(self, context: PassContext) -> bool:
        return context.recipe.prune is not None and context.recipe.prune.wants("channels")

    def needs_tokens(self, context: PassContext) -> bool:
        return True

    def call(self, program: Program, context: PassContext) -> PassResult:
        pruning = context.recipe.prune
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
        sequences = calibration_tokens(
            program, context, f"the pass {self.name}", {n.down: _working(n) for n in chosen}, MOST_TOKENS
        )
        fittings = {n.down: (n.path, _fitting(n, counts[n], pruning)) for n in chosen}
        fits, metrics = fit_in_order(program, context, fittings, sequences)
        for network in chosen:
            fit, down = fits[network.down]
            network.keep(program, tuple(fit.kept.tolist()), down)
        return PassResult(len(chosen), rejected, metrics)


def step_of(network: FeedForward, pruning: Pruning) -> int:
    """Returns the step of a network's width: the number of remaining channels is a multiple of it.

    Then groups stay whole, and so do panels if the width had whole panels.
    """
    step = lcm(PANEL, pruning.multiple)  # weights are stored in panels of so many rows
    return step if network.width % step == 0 else pruning.multiple


def kept_channels(network: FeedForward, pruning: Pruning) -> int:
    """Returns the number of channels that a network keeps: the possible number that is nearest to the recipe's.

    Raises PassError if that is 0.
    """
    share, step = pruning.share("channels", network.path), step_of(network, pruning)
    if not share:
        return network.width
    width = min(network.width, round(network.width * (1 - share) / step) * step)
    if not width:
        raise PassError(
            f"prune.channels: a share of {share:g} leaves {network.path} none of its {network.width} channels, "
            f"which go {step} at a time",
            hint=f"Remove a share of {1 - step / network.width:.3g} at most.",
        )
    return width


def _working(network: FeedForward) -> int:
    """Returns the bytes that observing a network needs: moments, their inverse with its temporaries, and the weight."""
    return 8 * (6 * network.width**2 + 4 * network.width * 64)


def _fitting(network: FeedForward, count: int, pruning: Pruning) -> Fitting:
    def choose(halves: Sequence[Moments], weight: torch.Tensor) -> tuple[Fit, dict[str, float]]:
        fit = fitted(halves, weight, *single_inputs(network.width - count), pruning.correct)
        return fit, {CHANNELS: network.width, KEPT: count}

    return choose
