"""Two of every four: which are kept, what they keep of the source, and which expressions are known to have the form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enginewright.passes.ir.prequantized import CodeFormat
from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.quantized import quantized
from enginewright.passes.ir.scaled import Factors, Scaled
from enginewright.passes.ir.two_of_four import Sparsified, TwoOfFour, best_two, is_two_of_four
from enginewright.passes.ir.weights import Cast, Concat, Slice, Source, Transpose
from enginewright.runtime.shared.errors import CapacityError, PassError


def source(value: torch.Tensor, name: str = "w") -> Source:
    return Source(name, tuple(value.shape), value.dtype, lambda: value)


@pytest.mark.parametrize(("rows", "columns"), [(3, 8), (7, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_largest_of_every_four_stay_as_they_are(rows: int, columns: int, dtype: torch.dtype) -> None:
    value = torch.randn((rows, columns), generator=torch.Generator().manual_seed(1)).to(dtype)
    sparse = TwoOfFour(source(value)).evaluate()
    assert sparse.dtype == dtype
    assert torch.equal(sparse[sparse != 0], value[sparse != 0])
    fours, before = sparse.view(rows, -1, 4), value.view(rows, -1, 4).abs()
    assert (fours != 0).sum(-1).eq(2).all()
    least = torch.where(fours != 0, before, torch.inf).amin(-1)
    assert (torch.where(fours == 0, before, 0).amax(-1) <= least).all()


def test_inputs_weigh_columns_and_one_that_is_never_used_goes_by_its_weights() -> None:
    value = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    norms = torch.tensor([[1.0, 1.0, 1.0, 9.0]])
    assert TwoOfFour(source(value), Factors("norms", norms)).evaluate().tolist() == [[4, 0, 0, 1]]
    unused = Factors("norms", torch.zeros(1, 4))
    assert TwoOfFour(source(value), unused).evaluate().tolist() == [[4, 3, 0, 0]]
    assert best_two(torch.ones(1, 4)).tolist() == [[True, True, False, False]]


def test_a_weight_that_has_the_form_stays_bit_for_bit() -> None:
    value = torch.tensor([[0.0, 1e-30, 0.0, -5.0], [0.0, 0.0, 0.0, 2.0]])
    for norms in (torch.tensor([[9.0, 0.0, 9.0, 0.0]]), torch.zeros(1, 4)):
        assert torch.equal(TwoOfFour(source(value), Factors("norms", norms)).evaluate(), value)


def test_provenance_is_the_sources(tmp_path: Path) -> None:
    base = Concat((source(torch.ones(2, 4), "a"), source(torch.ones(3, 4), "b")))
    parts = (Part("a", 0, 2), Part("b", 0, 3))
    assert TwoOfFour(base).parts() == parts
    chosen = Sparsified.from_values(base, torch.zeros(5, 4), tmp_path / "kept")
    assert chosen.parts() == parts
    assert chosen == Sparsified.from_values(base, torch.zeros(5, 4))
    assert torch.equal(chosen.evaluate(), torch.zeros(5, 4))
    with pytest.raises(CapacityError, match="can't be written"):
        Sparsified.from_values(base, torch.zeros(5, 4), tmp_path / "none" / "kept")


def test_what_keeps_zeros_keeps_the_form() -> None:
    sparse = TwoOfFour(source(torch.randn(32, 64, generator=torch.Generator().manual_seed(2))))
    scaled = Scaled(sparse, Factors("s", torch.full((1, 64), 2.0)))
    values, scales, _ = quantized(sparse, CodeFormat(4, 32))
    for expr in (
        sparse,
        scaled,
        values,
        Cast(sparse, torch.bfloat16),
        Slice(sparse, 0, 1, 3),
        Concat((sparse, scaled)),
    ):
        assert is_two_of_four(expr)
        assert (expr.evaluate().unflatten(-1, (-1, 4)) != 0).sum(-1).max() <= 2
    with_offsets, _, _ = quantized(sparse, CodeFormat(4, 32, offsets=True))
    dense = source(torch.ones(32, 64))
    for expr in (dense, with_offsets, scales, Transpose(sparse), Slice(sparse, 1, 2, 10), Concat((sparse, dense))):
        assert not is_two_of_four(expr)


def test_a_weight_without_fours_is_refused() -> None:
    for value in (torch.ones(2, 6), torch.ones(2, 2, 4), torch.ones(2, 4, dtype=torch.int8)):
        with pytest.raises(PassError, match="two of every four"):
            TwoOfFour(source(value))
