"""Scales and offsets of 4 bits: values are the nearest, and the search for offsets beats where it begins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from enginewright.passes.formats.round_to_4_bits import round_symmetric, round_with_offsets


def error(
    groups: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None
) -> float:
    stands_for = values.double() * scales.double()[..., None]
    if offsets is not None:
        stands_for += offsets.double()[..., None]
    return float((stands_for - groups).square().sum() / groups.double().square().sum())


def counted_error(
    groups: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Gives the error of each group [N, G], with what an error of each weight counts: sqrt(mean(x x) + x x)."""
    wide = groups.double()
    counts = (wide.square().mean(-1, keepdim=True) + wide.square()).sqrt()
    stands_for = values.double() * scales.double()[:, None] + offsets.double()[:, None]
    return ((stands_for - wide).square() * counts).sum(-1)


def nearest(groups: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    return (groups / scales.float()[..., None]).round().clamp(least, most)


@pytest.mark.parametrize(("rows", "size"), [(300, 32), (200, 64)])
def test_symmetric_groups(rows: int, size: int) -> None:
    torch.manual_seed(0)
    groups = torch.randn(rows, 2, size)
    values, scales = round_symmetric(groups)
    assert torch.equal(values.float(), nearest(groups, scales, -8, 7)), "the nearest, for the scale as it is stored"
    largest = (groups.abs().amax(-1) / 7).half()
    assert error(groups, values, scales) < 0.85 * error(groups, nearest(groups, largest, -7, 7), largest)
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    assert torch.equal(scales, (peak / -8).half())
    assert (values == -8).any(-1).all(), "the largest is never clipped, whatever its sign"


@pytest.mark.parametrize(("rows", "size"), [(300, 32), (200, 64)])
def test_groups_with_offsets(rows: int, size: int) -> None:
    torch.manual_seed(0)
    groups = torch.randn(rows, 2, size) + torch.randn(rows, 2, 1)
    values, scales, offsets = round_with_offsets(groups)
    moved = groups - offsets.float()[..., None]
    assert torch.equal(values.float(), nearest(moved, scales, 0, 15))
    low, high = torch.aminmax(groups, dim=-1)
    plain, least = ((high - low) / 15).half(), low.half()
    whole = nearest(groups - least.float()[..., None], plain, 0, 15)
    assert error(groups, values, scales, offsets) < 0.9 * error(groups, whole, plain, least)


def test_no_group_is_worse_than_where_the_search_begins() -> None:
    torch.manual_seed(1)
    groups = torch.randn(500, 32) ** 3  # far outliers
    values, scales, offsets = round_with_offsets(groups)
    low, high = torch.aminmax(groups, dim=-1)
    plain, least = ((high - low) / 15).half(), low.half()
    whole = nearest(groups - least.float()[..., None], plain, 0, 15)
    begin = counted_error(groups, whole, plain, least)
    assert (counted_error(groups, values, scales, offsets) <= begin * (1 + 1e-6)).all()


@pytest.mark.parametrize("size", [32, 64])
def test_what_lies_on_a_grid_is_found_again(size: int) -> None:
    rng = np.random.default_rng(2)
    values = torch.from_numpy(rng.integers(0, 16, (40, size)).astype(np.int8))
    values[:, 0], values[:, 1] = 0, 15  # both ends, as whoever made the grid left them
    scales, offsets = torch.rand(40).half() + 0.5, torch.randn(40).half()
    codes = round_with_offsets(values * scales.float()[:, None] + offsets.float()[:, None])
    for got, want in zip(codes, (values, scales, offsets), strict=True):
        assert torch.equal(got, want)


def test_special_groups() -> None:
    groups = torch.zeros(4, 32)
    groups[1], groups[2, 3], groups[3, 0] = 2.5, -3.0, torch.inf
    values, scales = round_symmetric(groups)
    assert values[0].tolist() == [0] * 32
    assert scales[0] == 0
    assert (values[1] * scales[1].float()).tolist() == [2.5] * 32
    assert (values[2] * scales[2].float()).tolist() == groups[2].tolist()
    assert not scales[3].isfinite()
    values, scales, offsets = round_with_offsets(groups)
    assert (values[1] * scales[1].float() + offsets[1].float()).tolist() == [2.5] * 32
    assert not scales[3].isfinite()
