from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.normalize.normalize_spellings import NormalizeSpellings
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

aten = torch.ops.aten
Inputs = dict[str, torch.Tensor]
Apply = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Table(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.table = nn.Parameter(torch.randn(256, width))
        self.bound = nn.Parameter(torch.tensor(0.1))


SPELLINGS: dict[str, tuple[Apply, str]] = {
    "min": (lambda m, x: torch.min(x, m.bound), "aten.minimum"),
    "max": (lambda m, x: torch.max(x, -x), "aten.maximum"),
    "repeat": (lambda m, x: x.repeat(1, 3), "aten.cat"),
    "where": (lambda m, x: torch.where(x > 0, x, -2.5), "aten.where"),
    "repeat once": (lambda m, x: x.repeat(1, 1) * 2, "aten.mul"),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("width", [4, 9])
def test_spellings(name: str, width: int) -> None:
    apply, op = SPELLINGS[name]

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return apply(m, aten.embedding.default(m.table, i["ids"]))

    program = program_from(call, Table(width))
    (record,) = rewrite(program, NormalizeSpellings(), tolerance=0.0)
    assert record.matched == 1
    assert op_counts(program)[op] == 1
    assert not program.nodes_of(aten.min.other, aten.max.other, aten.repeat.default, aten.where.ScalarOther)


def test_other_repeats_are_left_alone() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return aten.repeat.default(aten.embedding.default(m.table, i["ids"]), [2, 2])

    program = program_from(call, Table(4))
    (record,) = rewrite(program, NormalizeSpellings(), tolerance=0.0)
    assert [r.reason for r in record.rejected] == ["repeat: repeats more than one dimension, or new ones"]


def test_a_repeat_of_once_is_the_value() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        return aten.repeat.default(aten.embedding.default(m.table, i["ids"]), [1, 1])

    program = program_from(call, Table(4))
    (record,) = rewrite(program, NormalizeSpellings(), tolerance=0.0)
    assert record.matched == 1 and not program.nodes_of(aten.repeat.default, aten.cat.default)


def test_two_numbers_are_two_weights() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = aten.embedding.default(m.table, i["ids"])
        return torch.where(x > 0, x, -2.5) + torch.where(x < 1, x, 3.5) + torch.where(x > 0.5, x, -2.5)

    program = program_from(call, Table(4))
    (record,) = rewrite(program, NormalizeSpellings(), tolerance=0.0)
    assert record.matched == 3
