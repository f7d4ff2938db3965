from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.cleanup.remove_noops import RemoveNoops
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

Inputs = dict[str, torch.Tensor]
Call = Callable[[nn.Module, Inputs], torch.Tensor]

aten = torch.ops.aten


class Table(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(256, width))


def _x(m: nn.Module, i: Inputs) -> torch.Tensor:
    return torch.ops.ew.embedding(i["ids"], m.table)  # [T, 12]


NOOPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast": lambda x: x.to(torch.float32, copy=True),
    "type_as": lambda x: aten.type_as.default(x, x),
    "clone": lambda x: x.clone(),
    "alias": lambda x: aten.alias.default(x),
    "dropout": lambda x: aten.dropout.default(x, 0.5, False),
    "times one": lambda x: x * 1.0,
    "over one": lambda x: x / 1,
    "plus zero": lambda x: x + 0.0,
    "minus zero": lambda x: x - 0,
    "view": lambda x: x.view(-1, 12),
    "expand": lambda x: x.expand(-1, -1),
    "whole slice": lambda x: aten.slice.Tensor(x, 1, 0, 12),
    "permute": lambda x: aten.permute.default(x, [0, 1]),
    "transposed twice": lambda x: x.transpose(0, 1).transpose(-1, 0),
    "views that cancel": lambda x: x.view(-1, 3, 4).view(-1, 12),
    "unsqueeze and select": lambda x: x.unsqueeze(0).select(0, 0),
    "cut and joined": lambda x: torch.cat(x.split([4, 3, 5], 1), 1),
    "chunked and joined": lambda x: torch.cat(aten.chunk.default(x, 2, -1), -1),
    "joined with nothing": lambda x: torch.cat([x[:, 12:], x], 1),
}

KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast": lambda x: x.to(torch.float64),
    "times two": lambda x: x * 2.0,
    "plus x": lambda x: x + x,
    "dropout in training": lambda x: aten.native_dropout.default(x, 0.0, True)[0],
    "transpose": lambda x: x.view(-1, 3, 4).transpose(1, 2).sum(1),
    "other transposes": lambda x: x.view(-1, 3, 2, 2).transpose(1, 2).transpose(1, 3).sum((1, 2)),
    "part of it": lambda x: x[:, :5],
    "another order": lambda x: torch.cat([x[:, 6:], x[:, :6]], 1),
    "a gap": lambda x: torch.cat([x[:, :4], x[:, 5:]], 1),
    "two values": lambda x: torch.cat([x[:, :6], (x * 2)[:, 6:]], 1),
}


@pytest.mark.parametrize("name", NOOPS)
def test_noops_go(name: str) -> None:
    program = program_from(lambda m, i: NOOPS[name](_x(m, i)) * 3.0, Table(), decomposed=name in ("cast", "type_as"))
    (record,) = rewrite(program, RemoveNoops())
    assert record.matched
    assert op_counts(program) == {"ew.embedding": 1, "aten.mul": 1}


@pytest.mark.parametrize("name", KEPT)
def test_what_does_something_stays(name: str) -> None:
    program = program_from(lambda m, i: KEPT[name](_x(m, i)) * 3.0, Table())
    before = op_counts(program)
    (record,) = rewrite(program, RemoveNoops())
    assert record.matched == 0
    assert op_counts(program) == before


def test_the_cast_turned_down_leaves_its_reason() -> None:
    program = program_from(lambda m, i: _x(m, i).to(torch.float64), Table())
    (record,) = rewrite(program, RemoveNoops())
    assert [r.reason for r in record.rejected] == ["drop_cast: changes torch.float32 into torch.float64"]


def test_a_copy_that_a_view_needs_stays() -> None:
    """[T, 3, 4] transposed can't be seen as [T, 12] without copying."""

    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        turned = _x(m, i).view(-1, 3, 4).transpose(1, 2)
        return aten.view.default(turned.clone(memory_format=torch.contiguous_format), [-1, 12])

    program = program_from(call, Table())
    (record,) = rewrite(program, RemoveNoops())
    assert op_counts(program)["aten.clone"] == 1
    assert [r.reason for r in record.rejected] == ["drop_copy: a view needs the order in memory that the copy has"]


@pytest.mark.parametrize(("sizes", "width"), [([4, 8], 12), ([2, 2, 16], 20)])
def test_splits_become_slices(sizes: list[int], width: int) -> None:
    program = program_from(lambda m, i: torch.cat(_x(m, i).split(sizes, -1)[::-1], -1), Table(width))
    rewrite(program, RemoveNoops())
    assert op_counts(program) == {"ew.embedding": 1, "aten.slice": len(sizes), "aten.cat": 1}
    bounds = [n.args[1:] for n in program.nodes_of(aten.slice.Tensor)]
    assert sorted(bounds) == [(-1, sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]


def test_unbind_becomes_selects() -> None:
    program = program_from(lambda m, i: torch.add(*_x(m, i).view(-1, 2, 6).unbind(1)), Table())
    rewrite(program, RemoveNoops())
    assert op_counts(program)["aten.select"] == 2
