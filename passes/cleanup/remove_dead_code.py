"""Removes calls and weights without readers."""

from __future__ import annotations

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node

from ..ir.program import Program


def _unread(program: Program) -> list[str]:
    return [describe_node(n) for n in program.graph.nodes if n.op in ("call_function", "get_attr") and not n.users]


class RemoveDeadCode(Pass):
    """Removes calls and weights whose values nothing reads. Step inputs stay, since the runtime passes them."""

    name = "remove_dead_code"
    ensures = (Condition("every call and weight is read", _unread),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        return PassResult(matched=program.remove_dead_code())
