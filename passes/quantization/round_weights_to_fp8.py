"""Products and tables with weights of 8-bit floats: what is multiplied stays as it is, in floats."""

from __future__ import annotations

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node

from ..formats.weight_format import WeightFormat
from ..ir.program import Program
from ..ir.provenance import WHERE
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS, WEIGHT_ARGUMENT
from .quantize_linears import quantized_weight

ew = torch.ops.ew


def _left(program: Program) -> list[Node]:
    """Calls whose weight has yet to be rounded."""
    nodes = program.nodes_of(*LINEARS, ew.embedding.default)
    return [n for n in nodes if n.meta[FORMAT].storage == "fp8" and not is_dequantized(_weight(n))]


class RoundWeightsToFp8(Pass):
    """Linears, grouped linears and embeddings whose format is fp8 read ``ew.dequantize`` of their weight's codes.

    A weight that several of them read in one format is dequantized once.
    """

    name = "round_weights_to_fp8"
    exact = False
    requires = (HAS_FORMATS,)
    ensures = (Condition("no fp8 weight is left in float", lambda p: [describe_node(n) for n in _left(p)]),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        rounded: dict[tuple[Node, WeightFormat], Node] = {}
        for node in _left(program):
            weight, wanted, where = _weight(node), node.meta[FORMAT], node.meta[WHERE]
            with program.inserting_before(node):
                if (weight, wanted) not in rounded:
                    values, scales, _ = quantized_weight(program, weight, wanted)
                    arguments = (values, scales, wanted.group_size)
                    rounded[weight, wanted] = program.call(ew.dequantize.default, *arguments, where=where)
                args = list(node.args)
                args[WEIGHT_ARGUMENT[node.target]] = rounded[weight, wanted]
                assert callable(node.target)
                new = program.call(node.target, *args, where=where)
            new.meta[FORMAT] = wanted
            program.replace(node, new)
            result.matched += 1
        return result


def is_dequantized(weight: object) -> bool:
    """Whether an argument is a weight of 8-bit floats."""
    return isinstance(weight, Node) and weight.target is ew.dequantize.default


def _weight(node: Node) -> Node:
    weight = node.args[WEIGHT_ARGUMENT[node.target]]
    assert isinstance(weight, Node)
    return weight
