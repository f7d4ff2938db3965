"""Multiplies weights of integers by activations that aren't rounded, for targets that compute in 16-bit floats."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node
from enginewright.passes.framework.match import bound_arguments
from enginewright.runtime.shared.errors import PassError

from ..ir.program import Program
from ..ir.provenance import WHERE

ew = torch.ops.ew

_PRODUCTS = (ew.quantized_linear.default, ew.quantized_grouped_linear.default)

_LEFT = Condition(
    "no activation is quantized",
    lambda p: [describe_node(n) for n in p.nodes_of(*_PRODUCTS, ew.quantized_embedding.default)],
)


class DequantizeProducts(Pass):
    """Replaces ``ew.quantized_linear`` by ``ew.linear`` of the activation before it was quantized, and of an
    ``ew.dequantize`` of the weight.

    Grouped products and tables are changed likewise. Weights stay as they are stored, and kernels dequantize them.
    Activations aren't rounded to 8 bits.
    """

    name = "dequantize_products"
    exact = False
    ensures = (_LEFT,)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        floats: dict[Node, Node] = {}
        for node in program.nodes_of(*_PRODUCTS, ew.quantized_embedding.default):
            a, where = bound_arguments(node), node.meta[WHERE]
            with program.inserting_before(node):
                if node.target is ew.quantized_embedding.default:
                    of = (a["table"], a["scales"], a["group_size"], a["offsets"], a["bits"])
                    new = program.call(ew.embedding.default, a["ids"], _floats(program, node, floats, of), where=where)
                else:
                    of = (a["weight"], a["weight_scales"], a["weight_group"], a["weight_offsets"], a["weight_bits"])
                    weight = _floats(program, node, floats, of)
                    rest = [a["activation"], *([a["residual"]] if "residual" in a else [])]
                    starts = [a["starts"]] if "starts" in a else []
                    op: Any = ew.grouped_linear.default if starts else ew.linear.default
                    new = program.call(op, _activation(a["values"]), *starts, weight, a["bias"], *rest, where=where)
            new.meta |= {key: value for key, value in node.meta.items() if key not in new.meta}
            program.replace(node, new)
            result.matched += 1
        return result


def _floats(program: Program, node: Node, made: dict[Node, Node], of: tuple[Any, ...]) -> Node:
    """Returns an ``ew.dequantize`` of a weight of integers, which all readers of the weight share.

    ``of`` has the op's arguments, the values first. ``made`` maps values to existing calls; a new one is added.
    """
    if of[0] not in made:
        made[of[0]] = program.call(ew.dequantize.default, *of, where=node.meta[WHERE])
    return made[of[0]]


def _activation(values: Node) -> Node:
    """Returns the float value from which ``values`` was quantized. Raises PassError if a pass has fused the
    quantization.
    """
    if values.target is operator.getitem and isinstance(values.args[0], Node):
        quantize = values.args[0]
        if quantize.target is ew.quantize_activation.default and isinstance(quantize.args[0], Node):
            return quantize.args[0]
    raise PassError(f"{describe_node(values)}: what was quantized here isn't there as floats")
