"""Removes what nothing reads."""

from __future__ import annotations

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node

from ..ir.program import Program


def _unread(program: Program) -> list[str]:
    return [describe_node(n) for n in program.graph.nodes if n.op in ("call_function", "get_attr") and not n.users]


class RemoveDeadCode(Pass):
    """Calls and weights that nothing reads go; step inputs stay, being the contract with the runtime."""

    name = "remove_dead_code"
    ensures = (Condition("every call and weight is read", _unread),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        return PassResult(matched=program.remove_dead_code())
