"""Mixed rows: values by plain loops, and every part that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enginewright.passes.ir.mixed_rows import Mix, MixedRows
from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.weights import Concat, Slice, Source
from enginewright.runtime.shared.errors import CapacityError, PassError


def source(name: str, *shape: int) -> Source:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    return Source(name, tuple(shape), torch.float32, lambda: value)


@pytest.mark.parametrize(("rows", "columns"), [(6, 5), (12, 3)])
def test_rows_and_columns_are_sums_of_the_chosen_ones(rows: int, columns: int) -> None:
    base, generator = source("w", rows, columns), torch.Generator().manual_seed(1)
    indices = [[0, 1, 4, 5], [2, 3, 0, 1]]
    matrices = torch.randn(2, 2, 4, generator=generator)
    mixed = MixedRows(base, Mix.of(indices, matrices))
    assert mixed.shape == (4, columns) and mixed.dtype == torch.float32
    value = base.evaluate()
    expected = torch.stack(
        [sum(matrices[j, n, m] * value[indices[j][m]] for m in range(4)) for j in (0, 1) for n in (0, 1)]
    )  # type: ignore[misc]
    torch.testing.assert_close(mixed.evaluate(), expected, rtol=1e-6, atol=1e-6)  # float32 sums of four
    turned = MixedRows(source("w", rows, columns), Mix.of([[0, 2]], torch.tensor([[[1.0, 2.0]]])), axis=1)
    torch.testing.assert_close(turned.evaluate(), value[:, :1] + 2 * value[:, 2:3])
    bias = source("b", rows)
    short = MixedRows(bias, Mix.of(indices, matrices))
    assert short.shape == (4,)
    torch.testing.assert_close(short.evaluate()[0], (matrices[0, 0] * bias.evaluate()[[0, 1, 4, 5]]).sum())


def test_parts_name_every_row_and_add_up() -> None:
    base = Concat((source("a", 4, 3), source("bb", 4, 3)))
    mixed = MixedRows(base, Mix.of([[0, 1, 6, 7], [2, 3, 4, 5]], torch.ones(2, 2, 4)))
    parts = mixed.parts(0)
    assert parts == (Part("a", 0, 2, 0, 2), Part("bb", 2, 4, 0, 0), Part("a", 2, 4, 0, 2), Part("bb", 0, 2, 0, 0))
    assert sum(p.size for p in parts) == 4
    assert mixed.parts(1) == base.parts(1)
    # Half of the second block is of all that the block is of.
    assert Slice(mixed, 0, 3, 4).parts(0) == (Part("a", 2, 4, 0, 1), Part("bb", 0, 2, 0, 0))


def test_heads_that_only_mix_within_themselves_have_plain_parts() -> None:
    mixed = MixedRows(source("w", 6, 2), Mix.of([[0, 1], [2, 3], [4, 5]], torch.ones(3, 2, 2)))
    assert mixed.parts(0) == (Part("w", 0, 6),)
    turned = MixedRows(source("w", 6, 2), Mix.of([[4, 5], [0, 1]], torch.eye(2).expand(2, 2, 2)))
    assert turned.parts(0) == (Part("w", 4, 6), Part("w", 0, 2))
    assert torch.equal(turned.evaluate(), turned.base.evaluate()[[4, 5, 0, 1]])


def test_a_file_keeps_the_same_numbers(tmp_path: Path) -> None:
    matrices, base = torch.randn(1, 2, 3), source("w", 4, 2)
    in_memory, filed = Mix.of([[0, 1, 3]], matrices), Mix.of([[0, 1, 3]], matrices, tmp_path / "mix")
    assert in_memory == filed and hash(in_memory) == hash(filed)
    assert torch.equal(MixedRows(base, in_memory).evaluate(), MixedRows(base, filed).evaluate())
    assert Mix.of([[0, 1, 3]], matrices + 1) != in_memory
    with pytest.raises(CapacityError, match="can't be written"):
        Mix.of([[0, 1, 3]], matrices, tmp_path / "nowhere" / "mix")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PassError, match="for 1 blocks of 2 indices"):
        Mix.of([[0, 1]], torch.ones(1, 2, 3))
    with pytest.raises(PassError, match="not finite"):
        Mix.of([[0]], torch.full((1, 1, 1), float("nan")))
    with pytest.raises(PassError, match="to be mixed"):
        MixedRows(source("w", 2, 2), Mix.of([[0, 2]], torch.ones(1, 1, 2)))
