"""Views against torch's own, by the elements that they reach in memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from enginewright.passes.lowering.views import (
    View,
    collapse,
    contiguous_strides,
    elements,
    expand,
    permute,
    reshape,
    select,
    slice_view,
)
from enginewright.runtime.shared.lowered_program import Affine

T = Affine(0, t=1)
SIZES = ((3, 1, 1), (5, 2, 4), (1, 1, 1))
"""T, B, R"""


def dense(*shape: Affine | int) -> View:
    sizes = tuple(Affine.parse(s) for s in shape)
    return View("buffer", "b", "f32", sizes, contiguous_strides(sizes))


def reached(view: View, batch: tuple[int, int, int]) -> torch.Tensor:
    shape, strides = ([a.evaluate(*batch) for a in x] for x in (view.shape, view.strides))
    memory = torch.arange(1 << 14)
    return torch.as_strided(memory, shape, strides, view.offset.evaluate(*batch))


def base(batch: tuple[int, int, int], *shape: Affine | int) -> torch.Tensor:
    sizes = [Affine.parse(s).evaluate(*batch) for s in shape]
    return torch.arange(1 << 14)[: torch.Size(sizes).numel()].view(sizes)


@pytest.mark.parametrize("batch", SIZES)
def test_view_ops_reach_what_torch_reaches(batch: tuple[int, int, int]) -> None:
    view, tensor = dense(T, 4, 6), base(batch, T, 4, 6)
    pairs = [
        (slice_view(view, 2, Affine(1), Affine(2), 3), tensor[:, :, 1:6:3]),
        (select(view, 1, Affine(3)), tensor[:, 3]),
        (permute(view, (2, 0, 1)), tensor.permute(2, 0, 1)),
        (expand(select(view, 2, Affine(0)), (Affine(7), T, Affine(4))), tensor[:, :, 0].expand(7, -1, 4)),
        (slice_view(view, 0, T - 1, Affine(1)), tensor[-1:]),
    ]
    for ours, theirs in pairs:
        assert torch.equal(reached(ours, batch), theirs)


@pytest.mark.parametrize("seed", range(200))
def test_reshape_agrees_with_torch(seed: int) -> None:
    """If torch can view it, so can we, with the same elements; otherwise torch can't either, except for sizes of 1."""
    rng = random.Random(seed)
    shape = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))]
    view, tensor = dense(T, *shape), base((5, 1, 1), T, *shape)
    if rng.random() < 0.7:
        order = rng.sample(range(len(shape) + 1), len(shape) + 1)
        view, tensor = permute(view, order), tensor.permute(order)
    if rng.random() < 0.5:
        dim = rng.randrange(len(shape) + 1)
        view, tensor = slice_view(view, dim, Affine(), Affine(1)), tensor.narrow(dim, 0, 1)
    total = list(view.shape)
    factors = [Affine(f) for n in total if n.is_constant for f in _split(rng, n.constant)]
    expected = [n for n in total if not n.is_constant] + factors
    rng.shuffle(expected)
    ours = reshape(view, tuple(expected))
    sizes = [a.evaluate(5, 1, 1) for a in expected]
    try:
        theirs = tensor.view(sizes)
    except RuntimeError:
        assert ours is None
        return
    assert ours is not None
    assert torch.equal(reached(ours, (5, 1, 1)), theirs)


def _split(rng: random.Random, n: int) -> list[int]:
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    d = rng.choice(divisors)
    return [d, n // d]


def test_collapse_merges_only_what_is_dense_in_all() -> None:
    a = dense(T, 2, 3, 4, 5)
    b = permute(dense(T, 4, 5, 2, 3), (0, 3, 4, 1, 2))
    merged = collapse([a, b], 3)
    assert merged is not None
    assert [m.shape for m in merged] == [(T, Affine(6), Affine(20))] * 2
    for ours, whole in zip(merged, (a, b), strict=True):
        assert torch.equal(reached(ours, (3, 1, 1)).flatten(), reached(whole, (3, 1, 1)).flatten())
    assert collapse([a, permute(a, (0, 2, 1, 3, 4))], 2) is None


def test_sizes_that_are_not_affine() -> None:
    with pytest.raises(ValueError, match="affine"):
        elements((T, T))
    assert reshape(dense(T, 4), (T, Affine(5))) is None


def test_a_size_of_one_has_unit_inner_stride() -> None:
    column = slice_view(dense(T, 6), 1, Affine(2), Affine(1))
    assert column.has_unit_inner_stride and column.operand().strides == (Affine(6), Affine(1))
    assert not replace(column, shape=(T, Affine(2)), strides=(Affine(6), Affine(3))).has_unit_inner_stride
