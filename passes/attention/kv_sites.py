"""Finds the linears around an attention: those that compute q, k and v, and the one that reads its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx.node import Node, Target

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.views import RESHAPES

from ..ir.program import Program
from ..ir.provenance import WHERE, join_where

aten, ew = torch.ops.aten, torch.ops.ew

MOVES: frozenset[Target] = frozenset(
    {*RESHAPES, aten.slice.Tensor, aten.select.int, aten.permute.default, aten.transpose.int, aten.clone.default}
    | {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
)
"""Ops that compute nothing: they move the elements of a value, or select some."""

_NORMS: frozenset[Target] = frozenset({ew.rms_norm.default, ew.layer_norm.default})


@dataclass(frozen=True)
class Branch:
    """The computation of q, k or v from its projection to attention.

    Attributes:
        linear: the projection.
        rows: [N, D], the row of the projection's weight that computes each element of ``pre``.
        pre: the value [T, N, D] before ``post``.
        post: the norms and rotations between ``pre`` and attention, in order; each treats heads separately.
        alone: True if nothing else reads the projection.
    """

    linear: Node
    rows: torch.Tensor
    pre: Node
    post: tuple[Node, ...]
    alone: bool

    @property
    def normed(self) -> bool:
        """True if there is a norm between the projection and attention. Combining heads before the norm isn't the same
        as after it.
        """
        return any(node.target in _NORMS for node in self.post)

    @property
    def rope(self) -> Node | None:
        """The op that rotates this branch by position (RoPE); None if there is none."""
        return next((node for node in self.post if node.target is ew.rope.default), None)


@dataclass(frozen=True)
class Site:
    """An attention whose heads can be grouped.

    Attributes:
        attention: the call of ``ew.attention``.
        q, k, v: the computations of its inputs.
        output: the linear that reads its result with the heads next to each other.
    """

    attention: Node
    q: Branch
    k: Branch
    v: Branch
    output: Node

    @property
    def path(self) -> str:
        return join_where(self.attention.meta[WHERE])


def attention_paths(program: Program) -> dict[str, int]:
    """Returns the module path of every ``ew.attention`` -> its number of key/value heads."""
    return {
        join_where(node.meta[WHERE]): int(program.value(bound_arguments(node)["k"]).shape[1])
        for node in program.nodes_of(ew.attention.default)
    }


def find_site(program: Program, attention: Node) -> Site | str:
    """Returns the linears around an attention, or the reason why its heads can't be grouped."""
    arguments = bound_arguments(attention)
    branches: dict[str, Branch] = {}
    for name in ("q", "k", "v"):
        if sum(user.target is ew.attention.default for user in arguments[name].users) > 1:
            return f"{name} is read by another attention as well"
        branch = _branch(program, arguments[name])
        if isinstance(branch, str):
            return f"{name} {branch}"
        branches[name] = branch
    if branches["v"].post:
        return f"v goes through {branches['v'].post[0].target}"
    ropes = [branches[name].rope for name in ("q", "k")]
    if (ropes[0] is None) != (ropes[1] is None):
        return "only one of q and k is rotated"
    if ropes[0] is not None and ropes[1] is not None and ropes[0].args[1:] != ropes[1].args[1:]:
        return "q and k are rotated by different tables"
    output = _output(program, attention)
    if isinstance(output, str):
        return output
    return Site(attention, branches["q"], branches["k"], branches["v"], output)


def _branch(program: Program, value: Node) -> Branch | str:
    """Returns the `Branch` whose last value is ``value``, or the reason why there is none."""
    size = int(program.value(value).shape[2])
    post: list[Node] = []
    node = value
    while node.target is ew.rope.default or node.target in _NORMS:
        if tuple(program.value(node).shape)[1:] != tuple(program.value(value).shape)[1:]:
            return f"has a {node.target} over all of its heads behind it"
        if sum(n.target is node.target for n in post):
            return f"goes through {node.target} twice"
        weight = program.weight_of(bound_arguments(node).get("weight"))
        if weight is not None and weight.shape != (size,):
            return f"has a {node.target} with weights of their own for each head behind it"
        post.insert(0, node)
        node = node.all_input_nodes[0]
    pre, moves = node, list[Node]()
    while node.target in MOVES:
        moves.insert(0, node)
        node = node.all_input_nodes[0]
    reason = why_not_linear(program, node)
    if reason is not None:
        return reason
    index = torch.arange(int(program.value(node).shape[-1]))[None]  # [1, rows]
    rows = moved_rows(index, moves)
    shape = tuple(program.value(value).shape)[1:]
    if rows is None or tuple(rows.shape) != (1, *shape):
        return "is not cut out of its projection in a way that is known here"
    alone = all(len(n.users) == 1 for n in (node, *moves, *post))
    return Branch(node, rows[0], pre, tuple(post), alone)


def why_not_linear(program: Program, node: Node) -> str | None:
    if node.target is not ew.linear.default:
        return f"does not come from a linear, but from {node.target}"
    arguments = bound_arguments(node)
    if arguments.get("activation") or arguments.get("residual") is not None:
        return "comes from a linear that has an activation or a residual"
    for name in ("weight", "bias"):
        argument = arguments[name]
        if argument is None:
            continue
        if program.weight_of(argument) is None:
            return f"comes from a linear whose {name} is computed"
        if len(argument.users) > 1:
            return f"comes from a linear whose {name} is used elsewhere too"
    return None


def moved_rows(index: torch.Tensor, moves: list[Node]) -> torch.Tensor | None:
    """Applies ops that only move or select elements (views, permutations, slices) to a tensor of indices.

    Args:
        index: the indices of the elements of one token, [1, ...].
        moves: the ops, in order.

    Returns:
        the indices, moved as the elements are, [1, ...]. None if an op has a second tensor as an argument, or a shape
            with a fixed number of tokens.
    """
    for node in moves:
        if len(node.all_input_nodes) > 1:
            return None
        try:
            index = node.target(index, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        except RuntimeError:  # a view with a fixed number of tokens
            return None
    return index


def _output(program: Program, attention: Node) -> Node | str:
    """Returns the linear that reads an attention's result with its heads next to each other, or the reason why there is
    none.
    """
    heads, size = (int(n) for n in program.value(attention).shape[1:])
    node, moves = attention, list[Node]()
    while True:
        if len(node.users) != 1:
            return "its result is read in several places"
        (user,) = node.users
        if user.target is ew.linear.default and user.args[0] is node:
            break
        if user.target not in MOVES:
            return f"its result goes into {user.target}, not into a linear"
        moves.append(user)
        node = user
    index = torch.arange(heads * size)
    moved = moved_rows(index.view(1, heads, size), moves)
    if moved is None or not torch.equal(moved.reshape(-1), index) or moved.shape[-1] != heads * size:
        return "its result is not read head by head"
    reason = why_not_linear(program, user)
    return user if reason is None else f"its result {reason}"


def run_post(branch: Branch, value: torch.Tensor, arguments: Mapping[Node, tuple[object, ...]]) -> torch.Tensor:
    """Applies the norms and rotations of a branch to heads [T, N, D].

    ``arguments`` has the values of the arguments of each of these calls; the first is replaced.
    """
    for node in branch.post:
        value = node.target(value, *arguments[node][1:])  # type: ignore[operator]
    return value
