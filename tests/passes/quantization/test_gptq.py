from __future__ import annotations

import pytest
import torch

from enginewright.passes.formats.round_to_4_bits import round_symmetric, round_with_offsets
from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode
from enginewright.passes.quantization import gptq as module
from enginewright.passes.quantization.gptq import (
    DAMPING,
    Hessian,
    choose_scales,
    factorize,
    gptq,
    refit_scales,
)
from enginewright.runtime.shared.errors import PassError

SIZES = [
    (64, 32, 32, 128),
    (192, 40, 64, 300),
    (96, 33, 32, 64),
    (256, 33, 128, 300),
    (72, 20, 72, 128),
]  # K, N, group, tokens


def problem(size: int, rows: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [T, K] whose columns hang together and differ in size, and a weight [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.eye(size) + torch.randn(size, size, generator=generator) / size**0.5
    x = torch.randn(tokens, size, generator=generator) @ mixed
    x[:, ::7] *= 6
    return x, torch.randn(rows, size, generator=generator)


def hessian_of(x: torch.Tensor) -> torch.Tensor:
    hessian = Hessian(x.shape[1])
    for part in x.split(50):
        hessian.add(part)
    assert hessian.tokens == len(x)
    return hessian.sum


def error(x: torch.Tensor, weight: torch.Tensor, codes: Codes, code_format: CodeFormat) -> float:
    return float((x @ (decode(codes, code_format) - weight).t()).norm() / (x @ weight.t()).norm())


def nearest(weight: torch.Tensor, code_format: CodeFormat) -> Codes:
    groups = weight.unflatten(-1, (-1, code_format.group_size))
    values, *factors = round_with_offsets(groups) if code_format.offsets else round_symmetric(groups)
    return Codes(values.flatten(-2), *factors)


def by_elimination(
    weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, group: int
) -> torch.Tensor:
    """The paper's section 3 without its reformulation, in float64: after each column the best change of all that are
    not rounded yet, from the inverse Hessian of these, which is shrunk by elimination of that column."""
    damped = hessian.double() + torch.eye(len(hessian)).double() * DAMPING * hessian.double().diagonal().mean()
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True).tolist()
    w, inverse = weight.double().clone(), torch.linalg.inv(damped)
    values = torch.zeros(weight.shape, dtype=torch.int8)
    for q in order:
        scale = scales[:, q // group].double()
        offset = torch.zeros_like(scale) if offsets is None else offsets[:, q // group].double()
        low, high = (-8, 7) if offsets is None else (0, 15)
        chosen = ((w[:, q] - offset) / scale).round().clamp(low, high)
        values[:, q] = chosen.to(torch.int8)
        delta = (w[:, q] - (chosen * scale + offset)) / inverse[q, q]
        w -= delta[:, None] * inverse[q][None]
        inverse = inverse - torch.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return values


@pytest.mark.parametrize(("size", "rows", "group", "tokens"), SIZES)
@pytest.mark.parametrize("offsets", [False, True])
def test_integers_are_those_of_the_plain_algorithm(
    size: int, rows: int, group: int, tokens: int, offsets: bool
) -> None:
    """In exact arithmetic both are the same; a value halfway between two integers may fall to either side, and what
    comes behind it in its row then differs. That is rare: 97 of 100 rows are equal throughout."""
    x, weight = problem(size, rows, tokens)
    hessian, code_format = hessian_of(x), CodeFormat(4, group, offsets)
    importance = hessian.diagonal() / hessian.diagonal().mean()
    scales, shifts = choose_scales(weight, importance, code_format)
    expected = by_elimination(weight, hessian, scales, shifts, group)
    values = module._round_columns(weight, factorize(hessian), scales, shifts, code_format)
    assert (values == expected).all(1).float().mean() >= 0.97


@pytest.mark.parametrize(("size", "rows", "group", "tokens"), SIZES)
@pytest.mark.parametrize("offsets", [False, True])
def test_the_error_is_far_below_the_nearest_s(size: int, rows: int, group: int, tokens: int, offsets: bool) -> None:
    x, weight = problem(size, rows, tokens)
    code_format = CodeFormat(4, group, offsets)
    codes = gptq(weight, hessian_of(x), code_format)
    low, high = (0, 15) if offsets else (-8, 7)
    assert codes.values.dtype == torch.int8
    assert codes.values.min() >= low
    assert codes.values.max() <= high
    assert codes.scales.shape == (rows, size // group)
    assert (codes.offsets is not None) == offsets
    assert error(x, weight, codes, code_format) < 0.75 * error(x, weight, nearest(weight, code_format), code_format)


@pytest.mark.parametrize("size", [64, 600])  # one panel, and three
def test_the_factor_is_that_of_the_damped_inverse(size: int) -> None:
    x, _ = problem(size, 1, 2 * size)
    hessian = hessian_of(x)
    factor = factorize(hessian)
    permuted = hessian.double()[factor.order][:, factor.order]
    damped = permuted + torch.eye(size).double() * DAMPING * hessian.double().diagonal().mean()
    assert torch.equal(factor.upper, factor.upper.triu())
    product = factor.upper.double() @ damped @ factor.upper.double().t()
    # R H R^T is the identity, but for the rounding of R to float32: 2^-24 of terms that are at most cond(H)^0.5 large.
    assert torch.allclose(product, torch.eye(size).double(), atol=1e-4)
    assert (factor.damping, factor.unused) == (DAMPING, 0)
    assert (hessian.diagonal()[factor.order].diff() <= 0).all()
    assert torch.equal(factorize(hessian, activation_order=False).order, torch.arange(size))


def test_inputs_without_relation_leave_nothing_to_make_up_for() -> None:
    """With X^T X a multiple of one, the nearest integers are the best ones."""
    _, weight = problem(64, 16, 64)
    code_format = CodeFormat(4, 32)
    scales, offsets = choose_scales(weight, torch.ones(64), code_format)
    values = module._round_columns(weight, factorize(torch.eye(64) * 7), scales, offsets, code_format)
    assert torch.equal(values, (weight / scales.float().repeat_interleave(32, 1)).round().clamp(-8, 7).to(torch.int8))


def test_columns_that_no_token_uses_are_rounded_to_the_nearest() -> None:
    x, weight = problem(64, 16, 128)
    x[:, [3, 40]] = 0
    factor = factorize(hessian_of(x))
    assert factor.unused == 2
    assert set(factor.order[-2:].tolist()) == {3, 40}
    codes = gptq(weight, hessian_of(x), CodeFormat(4, 32))
    scales = codes.scales.float().repeat_interleave(32, 1)[:, [3, 40]]
    # Of the scales that were refitted since, or of those before, which are a few percent off.
    assert (
        (codes.values[:, [3, 40]].float() * scales - weight[:, [3, 40]]).abs() < 0.75 * scales.abs()
    ).float().mean() > 0.9


def test_fewer_tokens_than_columns_are_damped_as_little_as_possible() -> None:
    x, weight = problem(96, 16, 5)
    factor = factorize(hessian_of(x))
    assert factor.damping == DAMPING
    assert error(x, weight, gptq(weight, hessian_of(x), CodeFormat(4, 32)), CodeFormat(4, 32)) < 0.05


def test_more_damping_where_a_matrix_is_not_positive_definite() -> None:
    matrix = torch.eye(64) - 0.2 * torch.outer(torch.ones(64), torch.ones(64)) / 8
    factor = factorize(matrix, damping=0.01)
    assert factor.damping == pytest.approx(1)  # a hundred times as much
    with pytest.raises(PassError, match="no positive definite matrix") as failure:
        factorize(torch.eye(64) - 3 * torch.ones(64, 64))
    assert failure.value.hint


def test_what_is_not_finite_is_refused() -> None:
    x, weight = problem(64, 4, 64)
    x[0, 0] = torch.inf
    with pytest.raises(PassError, match="not finite"):
        factorize(x.t() @ x)
    with pytest.raises(PassError, match="too large for float16 scales"):
        gptq(weight * 1e6, torch.eye(64), CodeFormat(4, 32))


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("size", "rows", "group"), [(64, 8, 32), (192, 20, 64), (72, 12, 72)])
def test_refitted_scales_are_the_least_squares_ones(size: int, rows: int, group: int, offsets: bool) -> None:
    x, weight = problem(size, rows, 3 * size)
    code_format = CodeFormat(4, group, offsets)
    before = nearest(weight, code_format)
    scales, shifts = refit_scales(weight, hessian_of(x), before.values, before.scales, before.offsets, damping=0.0)
    after = Codes(before.values, scales, shifts)
    assert error(x, weight, after, code_format) < error(x, weight, before, code_format)
    best = []
    for row in range(rows):  # the same by a solver that knows nothing of Hessians
        values = before.values[row].double().view(-1, group)
        parts = x.double().view(len(x), -1, group)
        basis = torch.einsum("tcg,cg->tc", parts, values)
        if offsets:
            basis = torch.cat([basis, parts.sum(-1)], 1)
        solution = torch.linalg.lstsq(basis, x.double() @ weight[row].double()).solution
        best.append(float((x.double() @ weight[row].double() - basis @ solution).norm()))
    got = (x @ (decode(after, code_format) - weight).t()).norm(dim=0)
    # float16 scales are 2^-11 off, at most; of the result's size, where errors are some percent of it.
    assert (got <= torch.tensor(best) * 1.02).all()


def test_an_exact_weight_stays_exact() -> None:
    values = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales = torch.full((16, 2), 0.25, dtype=torch.half)
    values[:, ::32] = -8
    weight = decode(Codes(values, scales), CodeFormat(4, 32))
    x, _ = problem(64, 1, 128)
    assert torch.equal(decode(gptq(weight, hessian_of(x), CodeFormat(4, 32)), CodeFormat(4, 32)), weight)


def test_wide_weights_keep_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = problem(64, 16, 128)
    hessian = hessian_of(x)
    monkeypatch.setattr(module, "MOST_TO_REFIT", 32)
    codes = gptq(weight, hessian, CodeFormat(4, 32))
    scales, _ = choose_scales(weight, hessian.diagonal() / hessian.diagonal().mean(), CodeFormat(4, 32))
    assert torch.equal(codes.scales, scales)
