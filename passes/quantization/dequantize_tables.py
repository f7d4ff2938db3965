"""Turns tables of integers into tables of floats, for targets that can only gather rows of floats."""

from __future__ import annotations

import torch

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node
from enginewright.passes.framework.match import bound_arguments

from ..ir.dequantized import Dequantized
from ..ir.program import Program
from ..ir.provenance import WHERE

ew = torch.ops.ew

_LEFT = Condition(
    "no table of integers is left",
    lambda p: [describe_node(n) for n in p.nodes_of(ew.quantized_embedding.default)],
)


class DequantizeTables(Pass):
    """Replaces ``ew.quantized_embedding`` by ``ew.embedding`` of the dequantized floats.

    A table that is also the head's weight is then stored twice, as integers for the head.
    """

    name = "dequantize_tables"
    ensures = (_LEFT,)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        for node in program.nodes_of(ew.quantized_embedding.default):
            a, where = bound_arguments(node), node.meta[WHERE]
            values, scales = program.weight_of(a["table"]), program.weight_of(a["scales"])
            assert values is not None and scales is not None
            floats = Dequantized(values, scales, program.weight_of(a["offsets"]), a["group_size"])
            with program.inserting_before(node):
                table = program.weight(f"{a['table'].target}.floats", floats, where=where)
                new = program.call(ew.embedding.default, a["ids"], table, where=where)
            program.replace(node, new)
            result.matched += 1
        return result
