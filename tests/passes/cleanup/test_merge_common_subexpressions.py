from __future__ import annotations

import pytest
import torch
from torch import nn

from enginewright.passes.cleanup.merge_common_subexpressions import MergeCommonSubexpressions
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

ew = torch.ops.ew


class Table(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, width))


@pytest.mark.parametrize("width", [4, 9])
def test_equal_calls_become_one_and_so_do_their_users(width: int) -> None:
    def call(m: nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        a = torch.tanh(ew.embedding(i["ids"], m.table)) * 2.0
        b = torch.tanh(ew.embedding(i["ids"], m.table)) * 2.0
        return a + b

    program = program_from(call, Table(width))
    (record,) = rewrite(program, MergeCommonSubexpressions())
    assert record.matched == 3
    assert op_counts(program) == {"ew.embedding": 1, "aten.tanh": 1, "aten.mul": 1, "aten.add": 1}


def test_defaults_count_as_given() -> None:
    def call(m: nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = ew.embedding(i["ids"], m.table)
        return torch.ops.aten.gelu.default(x) + torch.ops.aten.gelu.default(x, approximate="none")

    program = program_from(call, Table(4))
    (record,) = rewrite(program, MergeCommonSubexpressions())
    assert record.matched == 1
    assert op_counts(program)["aten.gelu"] == 1


def test_other_arguments_are_other_calls() -> None:
    def call(m: nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = ew.embedding(i["ids"], m.table)
        return torch.ops.aten.gelu.default(x) + torch.ops.aten.gelu.default(x, approximate="tanh") + x.sum(-1, True)

    program = program_from(call, Table(4))
    (record,) = rewrite(program, MergeCommonSubexpressions())
    assert record.matched == 0
    assert op_counts(program)["aten.gelu"] == 2


def test_the_one_that_stays_keeps_its_own_path() -> None:
    program = program_from(
        lambda m, i: torch.tanh(ew.embedding(i["ids"], m.table)) + torch.tanh(ew.embedding(i["ids"], m.table)), Table(4)
    )
    first, second = program.nodes_of(ew.embedding.default)
    first.meta["where"], second.meta["where"] = ("layers.0",), ("layers.1",)
    rewrite(program, MergeCommonSubexpressions())
    assert first.meta["where"] == ("layers.0",)
