"""Rounds weights whose format has scales, but whose products and tables are computed with floats."""

from __future__ import annotations

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node

from ..formats.weight_format import WeightFormat
from ..ir.prequantized import CodeFormat
from ..ir.program import Program
from ..ir.provenance import WHERE
from ..ir.quantized import QuantizedFloats, quantized_floats
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS, WEIGHT_ARGUMENT, weight_node
from .quantize_linears import quantized_weight

ew = torch.ops.ew


def _left(program: Program) -> list[Node]:
    """Returns the calls whose weight isn't rounded yet."""
    nodes = program.nodes_of(*LINEARS, ew.embedding.default)
    scaled = (n for n in nodes if n.meta[FORMAT].stored.scaled_floats)
    return [n for n in scaled if not (is_dequantized(weight_node(n)) or _is_rounded(program, weight_node(n)))]


class RoundWeights(Pass):
    """Gives linears, grouped linears and embeddings whose format has scales, but no integers, a rounded weight.

    The weight is ``ew.dequantize`` of values and scales for formats that kernels read, such as fp8. For other formats,
    such as nf4, it is a weight of floats, which a bundle may store in fewer bits. Readers of one weight in one format
    share the rounded weight.
    """

    name = "round_weights"
    exact = False
    requires = (HAS_FORMATS,)
    ensures = (Condition("no weight is left to be rounded", lambda p: [describe_node(n) for n in _left(p)]),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        rounded: dict[tuple[Node, WeightFormat], Node] = {}
        for node in _left(program):
            weight, weight_format, where = weight_node(node), node.meta[FORMAT], node.meta[WHERE]
            with program.inserting_before(node):
                if (weight, weight_format) not in rounded:
                    rounded[weight, weight_format] = _rounded(program, weight, weight_format, context, where)
                args = list(node.args)
                args[WEIGHT_ARGUMENT[node.target]] = rounded[weight, weight_format]
                assert callable(node.target)
                new = program.call(node.target, *args, where=where)
            new.meta[FORMAT] = weight_format
            program.replace(node, new)
            result.matched += 1
        return result


def _rounded(
    program: Program, weight: Node, wanted: WeightFormat, context: PassContext, where: tuple[str, ...]
) -> Node:
    if wanted.stored.layout is not None:
        values, scales, _ = quantized_weight(program, weight, wanted, context)
        return program.call(ew.dequantize.default, values, scales, wanted.group_size, where=where)
    expr, code_format = program.weight_of(weight), CodeFormat.of(wanted)
    assert expr is not None and code_format is not None
    floats = quantized_floats(expr, code_format, context.code_files)
    return program.weight(f"{weight.target}.{wanted.storage}", floats, where=where)


def _is_rounded(program: Program, weight: Node) -> bool:
    return isinstance(program.weight_of(weight), QuantizedFloats)


def is_dequantized(weight: object) -> bool:
    """Returns True if a call's argument is an ``ew.dequantize`` of stored values and scales."""
    return isinstance(weight, Node) and weight.target is ew.dequantize.default
