"""Converts int4 with an offset per group to int4 without offsets, for targets or recipes without offsets."""

from __future__ import annotations

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pass_options import OffsetOptions
from enginewright.runtime.shared.errors import PassError

from ..ir.dequantized import Dequantized
from ..ir.prequantized import CodeFormat
from ..ir.program import Program
from ..ir.provenance import WHERE
from ..ir.quantized import quantized

ew = torch.ops.ew

_PRODUCTS = (ew.quantized_linear.default, ew.quantized_grouped_linear.default)


def _left(program: Program) -> list[Node]:
    return [n for n in program.nodes_of(*_PRODUCTS) if bound_arguments(n)["weight_offsets"] is not None]


def _treatment(context: PassContext) -> str:
    return (context.recipe.engines or OffsetOptions()).offsets


class RequantizeOffsets(Pass):
    """Rounds integers with offsets, as dequantized floats, to integers without offsets in the same groups.

    Such a weight is rounded twice, which causes more error than rounding the source once. With ``offsets`` "refuse" in
    [engines] integers with offsets are an error; with "keep" they stay.
    """

    name = "requantize_offsets"
    exact = False
    ensures = (Condition("no product has integers with offsets", lambda p: [describe_node(n) for n in _left(p)]),)

    def wanted(self, context: PassContext) -> bool:
        return _treatment(context) != "keep"

    def call(self, program: Program, context: PassContext) -> PassResult:
        """Converts the weights. Raises PassError, naming the first weight with offsets, if the recipe refuses them."""
        result = PassResult()
        for node in _left(program):
            if _treatment(context) == "refuse":
                raise PassError(
                    f"{describe_node(node)}: int4 with offsets, which engines.offsets of the recipe refuses",
                    hint='Take a format without zero_point, or offsets = "keep" or "requantize" in [engines].',
                )
            a, where = bound_arguments(node), node.meta[WHERE]
            parts = [program.weight_of(a[name]) for name in ("weight", "weight_scales", "weight_offsets")]
            values, scales, offsets = parts
            assert values is not None and scales is not None
            floats = Dequantized(values, scales, offsets, a["weight_group"])
            integers, factors, _ = quantized(floats, CodeFormat(4, a["weight_group"]), context.code_files)
            name = str(a["weight"].target).removesuffix(".int4")
            with program.inserting_before(node):
                a["weight"] = program.weight(f"{name}.requantized.int4", integers, where=where)
                a["weight_scales"] = program.weight(f"{name}.requantized.scales", factors, where=where)
                a["weight_offsets"] = None
                assert callable(node.target)
                new = program.call(node.target, *a.values(), where=where)
            new.meta |= {key: value for key, value in node.meta.items() if key not in new.meta}
            program.replace(node, new)
            result.matched += 1
        return result
