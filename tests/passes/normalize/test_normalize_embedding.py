from __future__ import annotations

import pytest
import torch
from torch import nn

from enginewright.passes.framework.base import PassContext
from enginewright.passes.normalize.normalize_embedding import NormalizeEmbedding
from enginewright.passes.normalize.sink_views import SinkViews
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import Table, program_from

aten = torch.ops.aten
Inputs = dict[str, torch.Tensor]


@pytest.mark.parametrize("width", [4, 9])
def test_tokens_and_shifted_positions(width: int) -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return aten.embedding.default(m.table, i["ids"], 0) + aten.embedding.default(m.table, i["positions"] + 2)

    program = program_from(call, Table(width))
    (record,) = rewrite(program, NormalizeEmbedding())
    assert record.matched == 2
    assert op_counts(program) == {"ew.embedding": 2, "aten.add": 2}


@pytest.mark.parametrize("width", [4, 9])
def test_an_indexed_table(width: int) -> None:
    """CTRL and Whisper look up positions so; [1, T] as [T]."""

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return m.table[i["positions"][None]][0] + m.table[i["ids"]]

    program = program_from(call, Table(width))
    rewrite(program, SinkViews(), NormalizeEmbedding())
    assert op_counts(program) == {"ew.embedding": 2, "aten.add": 1}


def test_rows_that_are_selected() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return m.table.index_select(0, i["positions"]) + m.table[i["ids"]]

    program = program_from(call, Table(4))
    rewrite(program, NormalizeEmbedding())
    assert op_counts(program) == {"ew.embedding": 2, "aten.add": 1}


def test_an_index_of_one_dimension_is_no_table() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return m.table[:, 0][i["ids"]][:, None] * aten.embedding.default(m.table, i["ids"])

    program = program_from(call, Table(4))
    (record,) = rewrite(program, NormalizeEmbedding())
    assert [r.reason for r in record.rejected] == ["indexed_table: the table is computed by the program"]


@pytest.mark.parametrize("width", [4, 9])
def test_a_mask_is_no_index(width: int) -> None:
    """Bytes as an index are a mask: they pick rows, and are none."""

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return m.table[(i["ids"] * 0).to(torch.int32)] + m.table[i["ids"]]

    program = program_from(call, Table(width))
    index = next(n for n in program.nodes_of(aten.index.Tensor) if n.args[1][0].target is aten._to_copy.default)
    (ids,) = index.args[1]
    ids.kwargs = {**ids.kwargs, "dtype": torch.uint8}
    ids.meta["val"] = ids.meta["val"].to(torch.uint8)
    result = NormalizeEmbedding().call(program, PassContext())  # no program any more that the verifier lets pass
    assert result.matched == 1
    assert [r.reason for r in result.rejected] == ["indexed_table: no rows of a table are looked up"]


def test_reasons() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        batched = aten.embedding.default(m.table, i["ids"][None])[0]
        return batched + aten.embedding.default(m.table * 2.0, i["ids"])

    program = program_from(call, Table(4))
    (record,) = rewrite(program, NormalizeEmbedding())
    assert record.matched == 0
    assert [r.reason for r in record.rejected] == [
        "embedding: the ids have rank 2, not 1",
        "embedding: the table is computed by the program",
    ]
