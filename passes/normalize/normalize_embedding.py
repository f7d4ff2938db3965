"""Replaces every look-up of rows in a weight by ``ew.embedding``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Bind, Call, Match, RewritePass, Rule

from ..ir.program import Program

aten, ew = torch.ops.aten, torch.ops.ew


class Embedding(Rule):
    """Replaces ``aten.embedding``, of tokens or positions, by ``ew.embedding``. Arguments such as ``padding_idx`` only
    matter to gradients.
    """

    name = "embedding"
    pattern = Call(aten.embedding.default, Bind("table"), Bind("ids"))

    def check(self, program: Program, match: Match) -> str | None:
        if match.node("table").op != "get_attr":
            return "the table is computed by the program"
        rank = program.value(match.node("ids")).dim()
        return None if rank == 1 else f"the ids have rank {rank}, not 1"

    def rewrite(self, program: Program, match: Match) -> Node:
        return program.call(ew.embedding.default, match.node("ids"), match.node("table"), where=match.where)


class IndexedTable(Embedding):
    """Replaces ``table[ids]``, of a table that is a weight, by ``ew.embedding``."""

    name = "indexed_table"
    pattern = Call(aten.index.Tensor, Bind("table"), [Bind("ids")])

    def check(self, program: Program, match: Match) -> str | None:
        table, ids = match.node("table"), program.value(match.node("ids"))
        if table.op == "get_attr" and (program.value(table).dim() != 2 or ids.dtype not in (torch.int32, torch.int64)):
            return "no rows of a table are looked up"  # bytes and conditions pick rows as a mask does
        return super().check(program, match)


class SelectedRows(Embedding):
    """Replaces index_select(table, 0, ids) by ``ew.embedding``."""

    name = "selected_rows"
    pattern = Call(aten.index_select.default, Bind("table"), 0, Bind("ids"))


class NormalizeEmbedding(RewritePass):
    """Replaces look-ups of rows with ids [T] by ``ew.embedding``: aten.embedding, aten.index_select and an indexed
    table.
    """

    name = "normalize_embedding"
    rules: ClassVar[tuple[Rule, ...]] = (Embedding(), IndexedTable(), SelectedRows())
