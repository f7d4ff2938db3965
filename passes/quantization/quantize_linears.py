"""Quantizes linears whose format is integers: an input is quantized once for all linears that read it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import Node, Target

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node

from ..formats.weight_format import WeightFormat
from ..ir.prequantized import CodeFormat
from ..ir.program import Program
from ..ir.provenance import WHERE
from ..ir.quantized import quantized
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS

ew = torch.ops.ew

_QUANTIZED: dict[Target, Callable[..., Any]] = {
    ew.linear.default: ew.quantized_linear.default,
    ew.grouped_linear.default: ew.quantized_grouped_linear.default,
}


def _left(program: Program) -> list[str]:
    return [describe_node(n) for n in program.nodes_of(*LINEARS) if n.meta[FORMAT].stored.integers]


class QuantizeLinears(Pass):
    """Replaces ``ew.linear`` and ``ew.grouped_linear`` by ``ew.quantize_activation`` and a quantized op if their format
    is integers.

    Products with the same input and group size share the quantized input.
    """

    name = "quantize_linears"
    exact = False
    requires = (HAS_FORMATS,)
    ensures = (Condition("no linear has integers as its weight in float", _left),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        inputs: dict[tuple[Node, int], list[Node]] = {}
        for node in program.nodes_of(*LINEARS):
            if node.meta[FORMAT].stored.integers:
                with program.inserting_before(node):
                    new = _quantize(program, node, inputs, context)
                program.replace(node, new)
                result.matched += 1
        return result


def quantized_weight(
    program: Program, node: Node, wanted: WeightFormat, context: PassContext
) -> tuple[Node, Node, Node | None]:
    """Returns the values, scales and offsets of the weight of a call, in the format ``wanted``; offsets are None if it
    has none.

    All calls with this weight and format share them.
    """
    expr, code_format = program.weight_of(node), CodeFormat.of(wanted)
    assert expr is not None
    assert code_format is not None
    values, scales, offsets = quantized(expr, code_format, context.code_files)
    where = node.meta[WHERE]
    return (
        program.weight(f"{node.target}.{wanted.storage}", values, where=where),
        program.weight(f"{node.target}.scales", scales, where=where),
        None if offsets is None else program.weight(f"{node.target}.offsets", offsets, where=where),
    )


def _quantize(program: Program, node: Node, inputs: dict[tuple[Node, int], list[Node]], context: PassContext) -> Node:
    weight_format, where = node.meta[FORMAT], node.meta[WHERE]
    x, *between, weight, bias = node.args  # ew.grouped_linear has its starts between them
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    key = (x, weight_format.activation_group_size)
    if key not in inputs:
        activation = program.call(ew.quantize_activation.default, *key, where=where)
        inputs[key] = [program.call(operator.getitem, activation, i, where=where) for i in range(3)]
    integers = quantized_weight(program, weight, weight_format, context)
    kinds = (weight_format.stored.multiplied_bits, weight_format.group_size, weight_format.activation_group_size)
    return program.call(_QUANTIZED[node.target], *inputs[key], *between, *integers, bias, *kinds, where=where)
