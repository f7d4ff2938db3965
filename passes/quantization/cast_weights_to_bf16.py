"""Converts products and tables to bf16: weights are rounded at export, inputs before a product. Sums are 32-bit
floats.
"""

from __future__ import annotations

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node

from ..ir.program import Program
from ..ir.provenance import WHERE
from ..ir.weights import Cast
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS, WEIGHT_ARGUMENT, weight_node

aten, ew = torch.ops.aten, torch.ops.ew


def _wide(program: Program) -> list[Node]:
    """Returns the calls with the format bf16 whose weights aren't converted yet."""
    nodes = program.nodes_of(*LINEARS, ew.embedding.default)
    chosen = [n for n in nodes if n.meta[FORMAT].storage == "bf16"]
    return [n for n in chosen if program.value(weight_node(n)).dtype != torch.bfloat16]


class CastWeightsToBf16(Pass):
    """Converts the weights and the inputs of linears, grouped linears and embeddings whose format is bf16.

    Products with the same input share its conversion.
    """

    name = "cast_weights_to_bf16"
    exact = False
    requires = (HAS_FORMATS,)
    ensures = (Condition("no bf16 weight is left in float", lambda p: [describe_node(n) for n in _wide(p)]),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        casts: dict[Node, Node] = {}
        for node in _wide(program):
            args = list(node.args)
            with program.inserting_before(node):
                args[WEIGHT_ARGUMENT[node.target]] = _narrow(program, args[WEIGHT_ARGUMENT[node.target]])
                if node.target in LINEARS:
                    x = args[0]
                    assert isinstance(x, Node)
                    if x not in casts:
                        where = node.meta[WHERE]
                        casts[x] = program.call(aten._to_copy.default, x, dtype=torch.bfloat16, where=where)
                    args[0] = casts[x]
                assert callable(node.target)
                new = program.call(node.target, *args, where=node.meta[WHERE])
            new.meta[FORMAT] = node.meta[FORMAT]
            program.replace(node, new)
            result.matched += 1
        return result


def _narrow(program: Program, node: object) -> Node:
    expr = program.weight_of(node)
    assert isinstance(node, Node)
    assert expr is not None
    return program.weight(f"{node.target}.bf16", Cast(expr, torch.bfloat16), where=node.meta[WHERE])
