"""Measures the cost of pruning each layer alone: the KL without some channels, without some heads, or without the
layer.

An evaluation of the program over some tokens measures the contribution of each channel and head to the output of its
network or attention. Then one unit at a time loses the largest number that the recipe allows, the least contributions
first. The rest of the program is computed again, and the KL is measured. The KL of smaller shares is predicted from the
squared error in the unit's output, since small errors cost KL in proportion to their square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Rejection
from enginewright.passes.framework.pruning import Pruning
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import layer_path
from enginewright.passes.quantization.calibrated_walk import walk
from enginewright.passes.sparsity.attention_heads import Heads, attention_heads
from enginewright.passes.sparsity.feed_forwards import FeedForward, feed_forwards
from enginewright.passes.sparsity.layers import Layer, LeavingOut, find_layers
from enginewright.passes.sparsity.prune_channels import kept_channels, step_of
from enginewright.passes.sparsity.prune_heads import possible_counts, possible_splits

SHARES = (0.25, 0.5, 0.75, 1.0)
"""The shares to choose from, as parts of the largest share of channels that a recipe allows."""


@dataclass(frozen=True)
class Share:
    """A share of the channels or heads of a module that may be removed.

    Attributes:
        share: the share.
        parameters: the number of parameters that are removed with it.
        cost: the predicted KL, in nats per token.
    """

    share: float
    parameters: int
    cost: float


@dataclass(frozen=True)
class PrunableLayer:
    """The parts of one layer that can be removed.

    Attributes:
        path: the layer's path.
        channels, heads: module path -> the shares that may be removed, smallest first; the last one was measured.
        whole: the removal of the whole layer; None if it has to stay.
    """

    path: str
    channels: dict[str, tuple[Share, ...]]
    heads: dict[str, tuple[Share, ...]]
    whole: Share | None


def measure_layers(
    program: Program,
    pruning: Pruning,
    sequences: Sequence[torch.Tensor],
    on_progress: Callable[[int, int, str], None],
    cache_bytes: int,
) -> tuple[list[PrunableLayer], list[Rejection]]:
    """Measures every layer. Returns the layers with removable parts, and rejections of the others.

    Args:
        program: a normalised program.
        pruning: the largest shares that may be removed; whole layers are measured if some may be removed.
        sequences: token ids, [S] each.
        on_progress: called with the number of measured units, the number of all, and the path of the next one.
        cache_bytes: the bytes of weights to cache.
    """
    networks, rejected = feed_forwards(program)
    attentions, more = attention_heads(program)
    layers, others = find_layers(program)
    channels = {n: c for n in networks if (c := _channel_counts(n, pruning))}
    heads = {h: c for h in attentions if (c := _head_counts(h, pruning))}
    contributions = _contributions(program, [n.down for n in channels] + [h.site.output for h in heads], sequences)
    runs = LeavingOut(program, layers, sequences, cache_bytes)
    total = len(channels) + len(heads) + (len(layers) if pruning.layers else 0)
    done = 0

    def measured(where: str, kl: Callable[[], float]) -> float:
        nonlocal done
        on_progress(done, total, where)
        done += 1
        return kl()

    prunable: dict[str, PrunableLayer] = {}

    def layer_of(path: str) -> PrunableLayer:
        layer = layer_path(path)
        return prunable.setdefault(layer, PrunableLayer(layer, {}, {}, None))

    for network, counts in channels.items():
        added = contributions[network.down]
        size = _parameters(program, network) // network.width
        kl = measured(network.path, partial(runs.kl_without, network.down, added.argsort()[: counts[-1]]))
        layer_of(network.path).channels[network.path] = _shares(added, counts, network.width, size, kl)
    for attention, counts in heads.items():
        added = contributions[attention.site.output].view(attention.queries, -1).sum(1)  # [Nq]
        size = attention.value_size * 2 * _width(program, attention)
        gone = torch.tensor(attention.columns(added.argsort()[: counts[-1]].tolist()))
        kl = measured(attention.path, partial(runs.kl_without, attention.site.output, gone))
        layer_of(attention.path).heads[attention.path] = _shares(added, counts, attention.queries, size, kl)
    if pruning.layers:
        whole: dict[Layer, float] = {x: measured(x.path, partial(runs.kl, [x])) for x in layers}
        most = min(pruning.layers, len(layers) + len(others) - 1)  # one has to stay, whatever the recipe allows
        for layer in sorted(layers, key=whole.__getitem__)[:most]:
            entry = layer_of(layer.path)
            size = _layer_parameters(program, layer.path)
            prunable[entry.path] = PrunableLayer(
                entry.path, entry.channels, entry.heads, Share(1.0, size, whole[layer])
            )
    on_progress(total, total, "")
    return list(prunable.values()), [*rejected, *more, *others]


def _channel_counts(network: FeedForward, pruning: Pruning) -> list[int]:
    """Returns the numbers of channels of a network that may be removed: some steps up to the recipe's limit."""
    most, step = network.width - kept_channels(network, pruning), step_of(network, pruning)
    return sorted({round(most * share / step) * step for share in SHARES} - {0}) if most else []


def _head_counts(heads: Heads, pruning: Pruning) -> list[int]:
    splits = possible_splits(heads, pruning) if pruning.share("heads", heads.path) else []
    left = splits[0].groups * splits[0].each if splits else heads.queries
    return sorted(heads.queries - n for n in possible_counts(heads, pruning) if left <= n < heads.queries)


def _contributions(
    program: Program, linears: Sequence[Node], sequences: Sequence[torch.Tensor]
) -> dict[Node, torch.Tensor]:
    """Returns the contribution of each input of some linears to their outputs, [K] each: squared, and summed over
    tokens and outputs.
    """
    contributions: dict[Node, torch.Tensor] = {}

    def look(node: Node, args: Sequence[Any]) -> torch.Tensor:
        x, weight, bias = args[0], args[1].float(), args[2]
        contributions[node] = x.double().square().sum(0) * weight.double().square().sum(0)
        return torch.nn.functional.linear(x, weight, bias)

    if linears:
        walk(program, dict.fromkeys(linears, look), sequences)
    return contributions


def _shares(added: torch.Tensor, counts: Sequence[int], total: int, size: int, measured: float) -> tuple[Share, ...]:
    """Returns a share for each count of channels or heads.

    Args:
        added: the contribution of each channel or head.
        counts: the numbers that may be removed, the largest last.
        total: the number of all.
        size: the parameters of one of them.
        measured: the KL without the largest number.
    """
    error = added.sort().values.cumsum(0)
    most = max(float(error[counts[-1] - 1]), 1e-300)
    return tuple(Share(n / total, n * size, measured * float(error[n - 1]) / most) for n in counts)


def _parameters(program: Program, network: FeedForward) -> int:
    """Returns the number of parameters of the weights that lose channels. The bias of the closing linear loses none."""
    linears = [network.down, *(o.linear for o in network.openings)]
    exprs = [program.weight_of(n.args[1]) for n in linears] + [program.weight_of(n.args[2]) for n in linears[1:]]
    return sum(prod(e.shape) for e in exprs if e is not None)


def _width(program: Program, heads: Heads) -> int:
    expr = program.weight_of(heads.site.output.args[1])
    assert expr is not None
    return expr.shape[0]


def _layer_parameters(program: Program, path: str) -> int:
    return sum(prod(program.weights[n].shape) for n in program.weights if layer_path(n) == path)
