"""Tensors of a recovery in the places of weights: whose rows they are, when two are equal, and which weights move."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.ir.recovered import Recovered, trainable_weights
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.errors import PassError
from tests.passes.captured import normalized


def source(rows: int, dtype: torch.dtype = torch.float32) -> Source:
    value = torch.arange(rows * 3, dtype=dtype).view(rows, 3)
    return Source("w", (rows, 3), dtype, lambda: value)


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_the_rows_of_what_it_stands_for_and_numbers_of_its_own(rows: int, dtype: torch.dtype) -> None:
    base = source(rows, dtype)
    moved = torch.full((rows, 3), 0.5)
    expr = Recovered(base, "layer.w", "0123456789ab", lambda: moved)
    assert (expr.shape, expr.dtype) == (base.shape, torch.float32)
    assert expr.evaluate() is moved
    assert all(expr.parts(axis) == base.parts(axis) for axis in (0, 1))
    assert expr.describe() == f"recovered({base.describe()}, 01234567)"


def test_equal_are_those_of_one_name_and_digest_however_they_are_read() -> None:
    base = source(2)
    one, again = (
        Recovered(base, "w", "ab", lambda value=value: value) for value in (torch.zeros(2, 3), torch.ones(2, 3))
    )
    assert one == again and hash(one) == hash(again)
    assert one != Recovered(base, "w", "cd", one.read)
    assert one != Recovered(base, "v", "ab", one.read)
    assert Recovered(base, "w", "", one.read).describe() == f"recovered({base.describe()})"


@pytest.mark.parametrize("value", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(6)])
def test_a_tensor_that_is_not_one_of_these_floats_is_refused_by_name(value: torch.Tensor) -> None:
    with pytest.raises(PassError, match=r"recovered layer\.w: .* for a weight \(2, 3\)"):
        Recovered(source(2), "layer.w", "ab", lambda: value).evaluate()


def test_floats_of_the_checkpoint_move_and_what_is_computed_does_not() -> None:
    tied, _ = normalized("Llama", tie_word_embeddings=True)
    weights = trainable_weights(tied.weights)
    names = [name for same in weights.values() for name in same]
    assert sorted(names) == sorted(set(names))
    assert all(tied.weights[n] == tied.weights[first] for first, same in weights.items() for n in same)
    left = set(tied.weights) - set(names)
    assert left and all("inv_freq" in name or not tied.weights[name].dtype.is_floating_point for name in left)
    assert any("norm" in name for name in names) and any("q_proj" in name for name in names)
