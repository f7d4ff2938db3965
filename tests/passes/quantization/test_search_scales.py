"""The searches for scales and clipping on products whose best scale and clipping are plain."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.ir.clipped import SHARES, range_of, rounded, share_of
from enginewright.passes.ir.prequantized import CodeFormat
from enginewright.passes.quantization.search_scales import (
    Product,
    gram_of_groups,
    output_error,
    search_clipping,
    search_scales,
    spread_rows,
)


def product(rows: int, size: int, group: int, *, loud: int = 0, offsets: bool = False) -> Product:
    """``loud``: so many channels are a hundred times the others."""
    torch.manual_seed(rows + size)
    x = torch.randn(96, size)
    x[:, :loud] *= 100
    weight = torch.randn(rows, size)
    return Product(x, weight, (rows,), CodeFormat(4, group, offsets), group)


@pytest.mark.parametrize(("rows", "size", "group"), [(24, 64, 32), (40, 192, 64)])
def test_channels_that_are_loud_get_a_finer_weight(rows: int, size: int, group: int) -> None:
    some = product(rows, size, group, loud=2)
    scales = search_scales([some], some.x.abs().mean(0))
    assert scales.alpha > 0
    assert scales.after < 0.5 * scales.before
    assert scales.factors[:2].min() > 3 * scales.factors[2:].max()
    torch.testing.assert_close(scales.factors.max() * scales.factors.min(), torch.tensor(1.0))
    with_weights = search_scales([some], some.x.abs().mean(0), weights=some.weight.abs().mean(0))
    torch.testing.assert_close(with_weights.factors.log().mean(), torch.tensor(0.0))


def test_the_error_is_that_of_the_rounded_product() -> None:
    """Unscaled, and with the shares of no clipping: what rounding a weight and its input alone does."""
    some = product(24, 64, 32)
    factors, choices = torch.ones(64), torch.full((24, 2), SHARES.index(1.0), dtype=torch.uint8)
    scales = search_scales([some], torch.ones(64))  # all channels alike: nothing to gain
    assert scales.alpha == 0
    assert torch.equal(scales.factors, factors)
    groups = some.weight.unflatten(-1, (-1, 32))
    weight = rounded(groups, range_of(groups, some.code_format), 1.0).flatten(-2)
    largest = some.x.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
    x = (some.x * 127 / largest).round() * largest / 127
    exact = some.x @ some.weight.t()
    expected = float((x @ weight.t() - exact).square().sum() / exact.square().sum())
    assert scales.before == pytest.approx(expected, rel=1e-3)  # an activation on the edge of two integers
    assert output_error(some, factors, choices) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("rows", "size", "group"), [(8, 64, 32), (40, 128, 64)])
def test_each_group_has_the_share_of_least_error(rows: int, size: int, group: int, offsets: bool) -> None:
    some = product(rows, size, group, offsets=offsets)
    factors = torch.rand(size) + 0.5
    factors_of = search_clipping(some, gram_of_groups(some.x, group), factors)
    groups = (some.weight * factors).unflatten(-1, (-1, group))
    x = (some.x / factors).unflatten(-1, (-1, group))  # [M, C, G]
    of = range_of(groups, some.code_format)
    errors = torch.stack(
        [
            torch.einsum("ncg,mcg->ncm", rounded(groups, of, share) - groups, x).square().sum(-1)
            for share in SHARES
            if share <= 1 or not offsets
        ]
    )  # [shares, N, C]
    skipped = len(SHARES) - len(errors)
    chosen = errors.gather(0, factors_of.long()[None] - skipped)[0]
    # The sum over tokens comes in another order: of two shares that are as good, either may win.
    assert (chosen <= errors.amin(0) * 1.001).all()
    assert (errors.argmin(0) != 0).any()
    plain = torch.full_like(factors_of, SHARES.index(1.0))
    assert output_error(some, factors, factors_of) < output_error(some, factors, plain)


def test_fused_linears_count_alike_and_experts_share_a_scale() -> None:
    one = product(24, 64, 32, loud=2)
    louder = Product(one.x, one.weight * 1024, one.parts, one.code_format, 32)
    fused = Product(one.x, torch.cat((one.weight, louder.weight)), (24, 24), one.code_format, 32)
    magnitude = one.x.abs().mean(0)
    alone, both, together = (search_scales(p, magnitude) for p in ([one], [one, louder], [fused]))
    assert alone.before == pytest.approx(both.before) == pytest.approx(together.before)
    assert alone.alpha == both.alpha == together.alpha


def test_an_input_that_no_token_reached_keeps_its_scale() -> None:
    some = product(8, 64, 32)
    silent = Product(some.x * 0, some.weight, (8,), some.code_format, 32)
    scales = search_scales([silent], torch.zeros(64))
    assert scales.alpha == 0
    weight = some.weight.unflatten(-1, (-1, 32))
    of = range_of(weight, some.code_format)
    chosen = search_clipping(silent, gram_of_groups(silent.x, 32), torch.ones(64))
    off = (rounded(weight, of, share_of(chosen)) - weight).square().sum()
    assert off <= (rounded(weight, of, 1.0) - weight).square().sum()  # the weight's own error decides


def test_rows_are_spread_evenly() -> None:
    assert spread_rows(3, 5).tolist() == [0, 1, 2]
    assert spread_rows(10, 4).tolist() == [0, 2, 5, 7]
