from __future__ import annotations

import pytest
import torch
from torch import nn

from enginewright.passes.normalize.normalize_repeats import NormalizeRepeats
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import Table, program_from

aten = torch.ops.aten
Inputs = dict[str, torch.Tensor]


@pytest.mark.parametrize("width", [4, 9])
def test_columns_that_are_repeated_and_stacked(width: int) -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = aten.embedding.default(m.table, i["ids"])
        return torch.stack((x.repeat_interleave(2, -1), x.repeat_interleave(2, 1) * 3), -1).flatten(1)

    program = program_from(call, Table(width))
    (record,) = rewrite(program, NormalizeRepeats(), tolerance=0.0)
    assert record.matched == 3
    assert op_counts(program)["aten.cat"] == 3


def test_tokens_that_are_repeated_are_left_alone() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = aten.embedding.default(m.table, i["ids"])
        return aten.repeat_interleave.self_int(x, 2, 0)

    program = program_from(call, Table(4))
    (record,) = rewrite(program, NormalizeRepeats(), tolerance=0.0)
    assert [r.reason for r in record.rejected] == ["repeat_interleave: repeats tokens, or has several symbolic sizes"]
