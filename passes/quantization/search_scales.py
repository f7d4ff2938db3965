"""AWQ's two searches: a scale for each channel of a value, and how much each group of a weight is clipped.

Lin et al. 2023, https://arxiv.org/abs/2306.00978. Scales are s = mean|x|^alpha, normalised, with alpha from a grid; the
one is taken whose error after rounding is least, weights and activations rounded as they will be. Then every group of a
weight gets the share of its range with the least error of its part of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from enginewright.passes.framework.fast_evaluation import decoded
from enginewright.plugins.ops.quantization import quantize_activation

from ..ir.clipped import SHARES, range_of, rounded, share_of
from ..ir.prequantized import CodeFormat

ALPHAS = tuple(i / 20 for i in range(20))
"""Exponents tried; 0 leaves the channels as they are."""

MOST_TOKENS = 256
MOST_OUTPUTS = 512
"""Of one weight, that errors of scales are measured on: evenly spread tokens and rows."""

_CHUNK_ELEMENTS = 1 << 22
_LEAST = 1e-5
"""Of the mean magnitude of a channel, as a share of the largest: a channel that is always 0 keeps a usable scale."""


@dataclass
class Product:
    """A weight and what it is multiplied with.

    Attributes:
        x: [M, K], some of the tokens.
        gram: [K / G, G, G], the sum of x x^T within each group, over all tokens.
        weight: [N, K] float32.
        parts: how many of the N outputs belong to each of the linears that were fused: their errors count alike.
        code_format: what the weight will be.
        activation_group: and the activations.
    """

    x: torch.Tensor
    gram: torch.Tensor
    weight: torch.Tensor
    parts: tuple[int, ...]
    code_format: CodeFormat
    activation_group: int


@dataclass(frozen=True)
class Scales:
    """What a search found: s [K], its exponent, and the error relative to the products' size without and with it."""

    factors: torch.Tensor
    alpha: float
    before: float
    after: float


def gram_of_groups(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """[M, K] -> [K / G, G, G]."""
    groups = x.view(len(x), -1, group_size).transpose(0, 1)  # [K/G, M, G]
    return groups.transpose(1, 2) @ groups


def spread_rows(size: int, most: int) -> torch.Tensor:
    """At most so many indices of ``size``, evenly spread."""
    return torch.arange(size) if size <= most else torch.arange(most) * size // most


def search_scales(products: list[Product], magnitude: torch.Tensor) -> Scales:
    """The scale of the channels that these products share.

    Args:
        products: at least one; with the same K.
        magnitude: mean |x| of each channel, [K]; channels that are to have the same scale have the same.
    """
    magnitude = magnitude.clamp(min=float(magnitude.max()) * _LEAST)
    sampled = [_sampled(p)[0] for p in products]
    exact = [p.x @ p.weight.t() for p in sampled]
    sizes = [_size_of_outputs(y, p.parts) for y, p in zip(exact, sampled, strict=True)]
    best: Scales | None = None
    before = 0.0
    for alpha in ALPHAS if magnitude.max() > 0 else ALPHAS[:1]:
        factors = _normalised(magnitude.pow(alpha)) if alpha else torch.ones_like(magnitude)
        error = sum(
            float(((_rounded_product(p, factors) - y) / size).square().sum())
            for p, y, size in zip(sampled, exact, sizes, strict=True)
        ) / sum(len(p.parts) for p in products)
        if best is None:
            before = error
        if best is None or error < best.after:
            best = Scales(factors, alpha, before, error)
    assert best is not None
    return best


def search_clipping(product: Product, factors: torch.Tensor) -> torch.Tensor:
    """How much each group of ``weight * factors`` is clipped: indices into SHARES, uint8 [N, K / G].

    Of the error (d . x)^2 that rounding a group by d causes, summed over all tokens, d^T gram d.
    """
    size = product.code_format.group_size
    split = factors.unflatten(-1, (-1, size))  # [C, G]
    gram = product.gram / (split[:, :, None] * split[:, None, :])
    if not gram.any():  # no token came here: the weight's own error
        gram = torch.eye(size).expand_as(gram)
    chosen = []
    for rows in product.weight.split(max(1, _CHUNK_ELEMENTS // product.weight.shape[1])):
        scaled = (rows * factors).unflatten(-1, (-1, size))  # [N, C, G]
        of = range_of(scaled, product.code_format)
        least = torch.full((len(rows), len(gram)), torch.inf)
        found = torch.zeros((len(rows), len(gram)), dtype=torch.uint8)
        for i, share in enumerate(SHARES):
            if product.code_format.offsets and share > 1:
                continue
            off = (rounded(scaled, of, share) - scaled).transpose(0, 1)  # [C, N, G]
            error = ((off @ gram) * off).sum(-1).t()  # [N, C]
            better = error < least
            least = torch.where(better, error, least)
            found[better] = i
        chosen.append(found)
    return torch.cat(chosen)


def output_error(product: Product, factors: torch.Tensor, choices: torch.Tensor) -> float:
    """The error of a clipped weight, relative to the exact product's size; over the sampled tokens and outputs."""
    sampled, kept = _sampled(product)
    exact = sampled.x @ sampled.weight.t()
    groups = (sampled.weight * factors).unflatten(-1, (-1, product.code_format.group_size))
    weight = rounded(groups, range_of(groups, product.code_format), share_of(choices[kept])).flatten(-2)
    off = _rounded_activation(sampled.x / factors, product.activation_group) @ weight.t() - exact
    return float((off / _size_of_outputs(exact, sampled.parts)).square().sum()) / len(product.parts)


def _sampled(product: Product) -> tuple[Product, torch.Tensor]:
    """With fewer outputs, as many of each part in proportion; and which these are."""
    rows, parts, start = [], [], 0
    for size in product.parts:
        most = max(1, MOST_OUTPUTS * size // len(product.weight))
        rows.append(start + spread_rows(size, most))
        parts.append(len(rows[-1]))
        start += size
    kept = torch.cat(rows)
    return replace(product, weight=product.weight[kept], parts=tuple(parts)), kept


def _size_of_outputs(y: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    """[M, N] -> [N]: the root of the sum of squares of the part that an output belongs to."""
    norms = [torch.full((p.shape[1],), max(float(p.square().sum()), 1e-30) ** 0.5) for p in y.split(parts, dim=-1)]
    return torch.cat(norms)


def _normalised(scale: torch.Tensor) -> torch.Tensor:
    return scale / (scale.max() * scale.min()).sqrt()


def _rounded_product(product: Product, factors: torch.Tensor) -> torch.Tensor:
    """[M, N]: of rounded activations with the rounded weight."""
    x = _rounded_activation(product.x / factors, product.activation_group)
    chunks = product.weight.split(max(1, _CHUNK_ELEMENTS // product.weight.shape[1]))
    return torch.cat([x @ _rounded(rows * factors, product.code_format).t() for rows in chunks], dim=-1)


def _rounded_activation(x: torch.Tensor, group_size: int) -> torch.Tensor:
    values, scales, _ = quantize_activation(x, group_size)
    return decoded(values, scales, group=group_size)


def _rounded(weight: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    groups = weight.unflatten(-1, (-1, code_format.group_size))
    return rounded(groups, range_of(groups, code_format), 1.0).flatten(-2)
