"""Embeddings of tables that are kept as 8-bit integers, shared with the head where that has the same weight."""

from __future__ import annotations

import torch
from torch.fx.node import Node

from ..base import Condition, Pass, PassContext, PassResult, describe_node
from ..ir.program import Program
from ..ir.provenance import WHERE
from .choose_formats import FORMAT, HAS_FORMATS
from .quantize_linears import quantized_weight

ew = torch.ops.ew


def _left(program: Program) -> list[str]:
    return [describe_node(n) for n in program.nodes_of(ew.embedding.default) if n.meta[FORMAT].storage == "int8"]


class QuantizeEmbeddings(Pass):
    """``ew.embedding`` of an int8 table -> ``ew.quantized_embedding``. Its weight is a tied head's very own."""

    name = "quantize_embeddings"
    requires = (HAS_FORMATS,)
    ensures = (Condition("no embedding has an int8 table in float", _left),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        for node in program.nodes_of(ew.embedding.default):
            if node.meta[FORMAT].storage != "int8":
                continue
            ids, table = node.args
            assert isinstance(table, Node)
            group = node.meta[FORMAT].group_size
            with program.inserting_before(node):
                pair = quantized_weight(program, table, group)
                new = program.call(ew.quantized_embedding.default, ids, *pair, group, where=node.meta[WHERE])
            program.replace(node, new)
            result.matched += 1
        return result
