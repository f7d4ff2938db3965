"""Chosen rows and columns, and mixed ones: values, and where they are from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enginewright.passes.ir.chosen_rows import Chosen, Mix, MixedColumns
from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.weights import Concat, Slice, Source, Transpose, WeightExpr
from enginewright.runtime.shared.errors import CapacityError, PassError


def source(name: str, *shape: int) -> WeightExpr:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    return Source(name, shape, value.dtype, lambda: value)


@pytest.mark.parametrize("dim", [0, 1])
def test_values_and_parts(dim: int) -> None:
    base = source("w", 6, 6)
    chosen = Chosen(base, dim, (1, 2, 5))
    torch.testing.assert_close(chosen.evaluate(), base.evaluate().index_select(dim, torch.tensor([1, 2, 5])))
    assert chosen.shape == ((3, 6) if dim == 0 else (6, 3))
    assert chosen.parts(dim) == (Part("w", 1, 3, dim), Part("w", 5, 6, dim))
    assert chosen.parts(1 - dim) == (Part("w", 0, 6, 1 - dim),)


def test_parts_of_what_is_put_together_turned_and_cut() -> None:
    both = Concat((source("a", 4, 3), Transpose(source("bb", 3, 5))))
    chosen = Chosen(Slice(both, 0, 2, 8), 0, (0, 1, 2, 5))
    assert chosen.parts(0) == (Part("a", 2, 4), Part("bb", 0, 1, 1), Part("bb", 3, 4, 1))
    torch.testing.assert_close(chosen.evaluate(), both.evaluate()[[2, 3, 4, 7]])
    assert Chosen(chosen, 0, (3, 0)).parts(0) == (Part("bb", 3, 4, 1), Part("a", 2, 3))


@pytest.mark.parametrize("shape", [(4, 6), (9, 8)])
def test_mixed_columns(shape: tuple[int, int], tmp_path: Path) -> None:
    base, columns = source("w", *shape), (0, 2, 3)
    removed = [i for i in range(shape[1]) if i not in columns]
    values = torch.randn(len(removed), 3, generator=torch.Generator().manual_seed(1))
    inside, stored = Mix.of(values), Mix.of(values, tmp_path / "mix")
    assert inside == stored and MixedColumns(base, columns, inside) == MixedColumns(base, columns, stored)
    expected = base.evaluate()[:, list(columns)] + base.evaluate()[:, removed] @ values
    for mix in (inside, stored):
        expr = MixedColumns(base, columns, mix)
        torch.testing.assert_close(expr.evaluate(), expected)
        assert expr.shape == (shape[0], 3) and expr.dtype == torch.float32
        assert expr.parts(0) == (Part("w", 0, shape[0]),)
        assert expr.parts(1) == (Part("w", 0, 1, 1), Part("w", 2, 4, 1))
    assert Mix.of(values + 1) != inside


def test_what_can_not_be(tmp_path: Path) -> None:
    base = source("w", 4, 6)
    for indices in ((), (1, 1), (6,), (-1,)):
        with pytest.raises(PassError):
            Chosen(base, 1, indices)
    with pytest.raises(PassError, match="a mix"):
        MixedColumns(base, (0, 1), Mix.of(torch.zeros(3, 2)))
    with pytest.raises(CapacityError, match="can't be written"):
        Mix.of(torch.zeros(3, 2), tmp_path / "missing" / "mix")
