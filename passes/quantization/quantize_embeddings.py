"""Quantizes embedding tables to integers. A head with the same weight shares them."""

from __future__ import annotations

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, describe_node

from ..ir.program import Program
from ..ir.provenance import WHERE
from .choose_formats import FORMAT, HAS_FORMATS
from .quantize_linears import quantized_weight

ew = torch.ops.ew


def _left(program: Program) -> list[str]:
    return [describe_node(n) for n in program.nodes_of(ew.embedding.default) if n.meta[FORMAT].stored.integers]


class QuantizeEmbeddings(Pass):
    """Replaces ``ew.embedding`` by ``ew.quantized_embedding`` if the table's format is integers. A tied head shares the
    weight.
    """

    name = "quantize_embeddings"
    exact = False
    requires = (HAS_FORMATS,)
    ensures = (Condition("no embedding has a table of integers in float", _left),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        for node in program.nodes_of(ew.embedding.default):
            weight_format = node.meta[FORMAT]
            if not weight_format.stored.integers:
                continue
            ids, table = node.args
            assert isinstance(table, Node)
            with program.inserting_before(node):
                integers = quantized_weight(program, table, weight_format, context)
                kind = (weight_format.stored.multiplied_bits, weight_format.group_size)
                new = program.call(ew.quantized_embedding.default, ids, *integers, *kind, where=node.meta[WHERE])
            program.replace(node, new)
            result.matched += 1
        return result
