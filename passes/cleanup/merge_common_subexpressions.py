"""Computes equal calls once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.fx.node import Node

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult
from enginewright.passes.framework.match import bound_arguments

from ..ir.program import Program


def _key(node: Node) -> Hashable:
    """Returns the op and its arguments, with defaults filled in, as a key. Calls with equal keys have equal results."""
    return node.target, tuple((k, _freeze(v)) for k, v in bound_arguments(node).items())


def _freeze(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    # 1, 1.0 and True are equal in Python and not the same to an op.
    return (type(value).__name__, value)


def _repeated(program: Program) -> list[str]:
    seen: set[Hashable] = set()
    repeats = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            key = _key(node)
            if key in seen:
                repeats.append(f"{node.name} repeats an earlier call of {node.target}")
            seen.add(key)
    return repeats


class MergeCommonSubexpressions(Pass):
    """Replaces calls of one op with the same arguments by the first of them, which keeps its module path.

    Every op in a program is pure, so equal arguments have equal results. The paths of the other calls are dropped: for
    example, a value that each of 30 layers computes from the positions gets the path of the first layer.
    """

    name = "merge_common_subexpressions"
    ensures = (Condition("no call is repeated", _repeated),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        first: dict[Hashable, Node] = {}
        for node in list(program.graph.nodes):
            if node.op != "call_function":
                continue
            same = first.setdefault(_key(node), node)
            if same is not node:
                program.replace(node, same)
                result.matched += 1
        return result
