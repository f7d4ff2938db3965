from __future__ import annotations

import pytest
import sympy
import torch
from torch import nn

from enginewright.passes.framework.views import is_viewable, last_or, size_arguments, slice_bounds, view_as
from enginewright.passes.ir.program import named_symbol
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew
T, R = named_symbol("T"), named_symbol("R")


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, 12))


def _integers(*values: object) -> list[sympy.Expr]:
    return [sympy.sympify(v) for v in values]


def test_size_arguments() -> None:
    assert size_arguments(_integers(T, 3, 4)) == [-1, 3, 4]
    assert size_arguments(_integers(2, 6)) == [2, 6]
    assert size_arguments(_integers(T, R)) is None


@pytest.mark.parametrize(
    ("sliced", "bounds"),
    [
        (lambda x: aten.slice.Tensor(x, 1, 2, 5), (1, 2, 5, 1)),
        (lambda x: aten.slice.Tensor(x, -1, 2, 2**62), (1, 2, 12, 1)),
        (lambda x: aten.slice.Tensor(x, -1, -3, 2**62), (1, 9, 12, 1)),
        (lambda x: aten.slice.Tensor(x, 1, 1, 12, 2), (1, 1, 12, 2)),
    ],
)
def test_slice_bounds(sliced, bounds: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    program = program_from(lambda m, i: sliced(ew.embedding(i["ids"], m.table)), Table())
    result = slice_bounds(program, program.logits)
    assert result is not None
    assert result[0].target is ew.embedding.default
    assert result[1:] == bounds


def test_what_has_no_bounds() -> None:
    program = program_from(lambda m, i: aten.slice.Tensor(ew.embedding(i["ids"], m.table), 0, 0, 2**62) * 2.0, Table())
    (sliced,) = program.nodes_of(aten.slice.Tensor)
    assert slice_bounds(program, sliced) is None  # of T tokens
    assert slice_bounds(program, program.logits) is None
    assert slice_bounds(program, 3) is None


def test_views_are_copied_only_where_they_must_be() -> None:
    program = program_from(lambda m, i: ew.embedding(i["ids"], m.table), Table())
    x = program.logits
    with program.inserting_before(program.output):
        assert view_as(program, x, program.shape(x), ("",)) is x
        heads = view_as(program, x, _integers(T, 3, 4), ("",))
        assert heads is not None
        turned = program.call(aten.transpose.int, heads, 1, 2, where=("",))
        flat = view_as(program, turned, _integers(T, 12), ("",))
        assert view_as(program, x, _integers(T, R), ("",)) is None
    assert heads.args == (x, [-1, 3, 4])
    assert is_viewable(program, x, [-1, 6, 2])
    assert not is_viewable(program, turned, [-1, 12])
    assert flat is not None
    assert flat.args[0].target is aten.clone.default  # type: ignore[union-attr]


def test_last_or() -> None:
    assert [last_or(d, 3) for d in range(3)] == [0, 1, -1]
