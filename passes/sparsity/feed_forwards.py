"""Finds feed-forward networks in a normalised program: linears whose inputs are computed from other linears channel by
channel.

No other call reads the channels, so some can be removed. That removes rows of the linears that open a network (gate and
up, or one linear) and of their biases, and columns of the linear that closes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx.node import Node, Target

from enginewright.passes.framework.base import Rejection

from ..ir.chosen_rows import Chosen
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.weights import WeightExpr

aten, ew = torch.ops.aten, torch.ops.ew

POINTWISE: frozenset[Target] = frozenset(
    {
        aten.abs.default,
        aten.add.Tensor,
        aten.clamp.default,
        aten.clamp_max.default,
        aten.clamp_min.default,
        aten.clone.default,
        aten.div.Tensor,
        aten.elu.default,
        aten.erf.default,
        aten.exp.default,
        aten.gelu.default,
        aten.hardswish.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.maximum.default,
        aten.minimum.default,
        aten.mul.Tensor,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.reciprocal.default,
        aten.relu.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.softplus.default,
        aten.square.default,
        aten.sub.Tensor,
        aten.tanh.default,
    }
)
"""Ops whose result in a channel depends only on the same channel of their arguments."""


@dataclass(frozen=True)
class Opening:
    """A linear whose outputs are all channels in order, ``parts`` times: twice for gate and up in one linear."""

    linear: Node
    parts: int


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward network.

    Attributes:
        down: the linear that closes the network; its inputs are the channels.
        openings: the linears that open the network.
        between: the calls between these linears, in order.
        width: the number of channels.
        path: the path of the module of ``down``.
    """

    down: Node
    openings: tuple[Opening, ...]
    between: tuple[Node, ...]
    width: int
    path: str

    def keep(self, program: Program, kept: tuple[int, ...], down: WeightExpr) -> None:
        """Removes all channels but ``kept`` from a program. ``down`` [H, kept] is the new weight of the closing
        linear.
        """
        for opening in self.openings:
            rows = tuple(part * self.width + i for part in range(opening.parts) for i in kept)
            for argument in opening.linear.args[1:3]:
                expr = program.weight_of(argument)
                if isinstance(argument, Node) and expr is not None:
                    program.change_weight(argument, Chosen(expr, 0, rows))
        weight = self.down.args[1]
        assert isinstance(weight, Node)
        program.change_weight(weight, down)
        for node in (*(o.linear for o in self.openings), *self.between, self.down):
            node.meta["val"] = program.infer(node)


class _NotPrunableError(Exception):
    """An error with the reason why something isn't a feed-forward network whose channels can be removed."""


def feed_forwards(program: Program) -> tuple[list[FeedForward], list[Rejection]]:
    """Returns the feed-forward networks of a program, in order, and rejections of those whose channels can't be
    removed.
    """
    networks: list[FeedForward] = []
    rejected: list[Rejection] = []
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    for down in program.nodes_of(ew.linear.default):
        first = down.args[0]
        if not isinstance(first, Node) or (first.target is not ew.gated_activation.default and not _acts(first)):
            continue
        try:
            networks.append(_network(program, down, order))
        except _NotPrunableError as e:
            rejected.append(Rejection(down.name, join_where(down.meta[WHERE]), str(e)))
    for node in program.nodes_of(ew.moe.default):
        rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), "experts keep their channels"))
    return networks, rejected


def _acts(node: Node) -> bool:
    """Returns True if a value is the result of a pointwise op on a linear's result that does more than add a
    residual.
    """
    if node.target not in POINTWISE or node.target in (aten.add.Tensor, aten.clone.default):
        return False
    return any(a.target is ew.linear.default or a.target in POINTWISE for a in node.all_input_nodes)


def _network(program: Program, down: Node, order: dict[Node, int]) -> FeedForward:
    """Returns the network that a linear closes. Raises _NotPrunableError if its channels can't be removed.

    Args:
        program: the program.
        down: the linear.
        order: each node's index in the program.
    """
    width = _free_weight(program, down, 1)
    between: dict[Node, None] = {}
    openings: dict[Node, Opening] = {}
    waiting = [(n, 1) for n in down.all_input_nodes[:1]]
    while waiting:
        node, parts = waiting.pop()
        if node.target is ew.linear.default:
            if openings.setdefault(node, Opening(node, parts)).parts != parts:
                raise _NotPrunableError(f"the outputs of {node.name} are several channels'")
            if _free_weight(program, node, 0) != parts * width:
                raise _NotPrunableError(f"{node.name} has other outputs than the {width} channels")
        elif node not in between:
            between[node] = None
            waiting += _arguments(program, node, parts, width)
    members = {down, *between}
    for node in (*openings, *between):
        if other := next((u for u in node.users if u not in members), None):
            raise _NotPrunableError(f"{node.name} is also read by {other.name}")
    if not openings:
        raise _NotPrunableError("no linear opens it")
    ordered = tuple(sorted(between, key=order.__getitem__))
    return FeedForward(down, tuple(openings.values()), ordered, width, down.meta[WHERE][0])


def _arguments(program: Program, node: Node, parts: int, width: int) -> list[tuple[Node, int]]:
    """Returns the arguments of a call between the linears, each with the number of times that it holds all channels.

    Args:
        program: the program.
        node: the call.
        parts: the number of times that its result holds all channels: 2 for gate and up next to each other.
        width: the number of channels.

    Raises:
        _NotPrunableError: the op doesn't compute channels one by one.
    """
    if node.target is ew.gated_activation.default and parts == 1:
        return [(n, 2) for n in node.all_input_nodes]
    if node.target is aten.cat.default and parts == 2:
        _check_halves(program, node, width)
    elif node.target not in POINTWISE or parts != 1:
        raise _NotPrunableError(f"{node.name} ({node.target}) is between the linears")
    elif any([int(s) for s in program.value(n).shape[-1:]] != [width] for n in node.all_input_nodes):
        raise _NotPrunableError(f"{node.name} ({node.target}) mixes values of other widths in")
    return [(n, 1) for n in node.all_input_nodes]


def _check_halves(program: Program, cat: Node, width: int) -> None:
    """Raises _NotPrunableError unless a cat joins two values with ``width`` channels along the last dimension."""
    rank = program.value(cat).dim()
    dim = cat.args[1] if len(cat.args) > 1 else 0
    assert isinstance(dim, int)
    if dim % rank != rank - 1 or [int(program.value(n).shape[-1]) for n in cat.all_input_nodes] != [width, width]:
        raise _NotPrunableError(f"{cat.name} doesn't put gate and up side by side")


def _free_weight(program: Program, linear: Node, axis: int) -> int:
    """Returns the size of a linear's weight along an axis.

    Raises _NotPrunableError if weight or bias have other readers or are computed, or if the linear has an epilogue.
    """
    for argument in linear.args[1:3]:
        if argument is None:
            continue
        if program.weight_of(argument) is None:
            raise _NotPrunableError(f"a weight of {linear.name} is computed from the inputs")
        assert isinstance(argument, Node)
        if len(argument.users) > 1:
            raise _NotPrunableError(f"the weight {argument.target} has other uses than {linear.name}")
    if any(linear.args[3:]) or any(linear.kwargs.values()):
        raise _NotPrunableError(f"{linear.name} does more than multiply")
    expr = program.weight_of(linear.args[1])
    assert expr is not None
    if len(expr.shape) != 2 or not expr.dtype.is_floating_point:
        raise _NotPrunableError(f"the weight of {linear.name} isn't a matrix of floats")
    return expr.shape[axis]
