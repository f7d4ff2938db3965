"""Replaces a program's weights by those that a recovery (training after pruning or quantization) has trained."""

from __future__ import annotations

from enginewright.passes.framework.base import Pass, PassContext, PassResult

from ..ir.program import Program
from ..ir.provenance import WHERE
from ..ir.recovered import trainable_weights


class LoadRecovered(Pass):
    """Replaces every float weight of the checkpoint by the recovery's tensor of that name, with its provenance.

    The pass comes after those that change shapes, since the trained weights have the changed shapes. It comes before
    fusion and quantization, so that a recovery has one tensor for each weight of the model, and can be used with any
    format.
    """

    name = "load_recovered"
    exact = False
    reshapes = True
    repairs = True

    def wanted(self, context: PassContext) -> bool:
        return context.recovered is not None

    def call(self, program: Program, context: PassContext) -> PassResult:
        if context.recovered is None:
            return PassResult()
        groups = trainable_weights(program.weights)
        new_weights = context.recovered.replacing({name: program.weights[name] for name in groups})
        first = {name: one for one, names in groups.items() for name in names}
        for node in [n for n in program.graph.nodes if n.op == "get_attr" and n.target in first]:
            name = first[str(node.target)]
            new = program.weight(f"{name}.recovered", new_weights[name], where=node.meta[WHERE])
            if new is not node:
                node.replace_all_uses_with(new)
        return PassResult(matched=len(groups))
