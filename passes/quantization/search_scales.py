"""Searches for the scales of a value's channels with the least rounding error, and for the clipping of each group of a
weight.

Scales are s = m^alpha, normalised, with alpha from a grid. m is the mean magnitude of a channel (AWQ, Lin et al. 2023,
https://arxiv.org/abs/2306.00978), or that divided by the magnitude of the channel's weights (SmoothQuant, Xiao et al.
2023, https://arxiv.org/abs/2211.10438). The scales with the least error are chosen, with weights and activations
rounded as in the final program. AWQ's second search chooses for each group of a weight the share of its range with the
least error in the group's part of the product.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache, decoded
from enginewright.passes.framework.token_sequences import packed_inputs

from ..formats.rounding import round_to_8_bits
from ..ir.clipped import SHARES, range_of, rounded, share_of
from ..ir.prequantized import CodeFormat, Codes, decode
from ..ir.program import Program
from ..ir.provenance import join_where, where_of
from ..ir.weights import WeightExpr
from ..ops.quantization import quantize_activation
from .choose_formats import FORMAT, WEIGHT_ARGUMENT
from .scalable_channels import Channels, Producer

ew = torch.ops.ew

ALPHAS = tuple(i / 20 for i in range(20))
"""The exponents to try; 0 leaves the channels unchanged."""

MOST_TOKENS = 256
MOST_OUTPUTS = 512
"""The most outputs of a weight on which the errors of scales are measured; they are evenly spaced."""

MOST_CALIBRATION_TOKENS = 2048
"""The most tokens of the search. More would hardly change a mean magnitude."""

_LAST_ROWS = 256
"""The most rows that the end of the program computes, where only the sampled rows are needed."""

_MOST_EXPERTS = 8
"""The most experts of a layer on which the scale of their common input is searched."""

_CHUNK_ELEMENTS = 1 << 22
_LEAST = 1e-5
"""The least mean magnitude of a channel, as a share of the largest one. It gives a channel that is always 0 a usable
scale.
"""


@dataclass
class Product:
    """A weight and its inputs on calibration tokens.

    Attributes:
        x: [M, K], some of the tokens.
        weight: [N, K] float32.
        parts: the number of outputs (of N) of each fused linear; the errors of all linears count equally.
        code_format: the format of the weight's integers.
        activation_group: the group size of quantized activations; None if they stay floats.
    """

    x: torch.Tensor
    weight: torch.Tensor
    parts: tuple[int, ...]
    code_format: CodeFormat
    activation_group: int | None


@dataclass(frozen=True)
class Scales:
    """The result of a search for scales.

    Attributes:
        factors: s [K].
        alpha: the exponent of s.
        before, after: the errors without and with s, relative to the size of the products.
    """

    factors: torch.Tensor
    alpha: float
    before: float
    after: float


def gram_of_groups(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """Returns X^T X of each group of channels: x [M, K] -> [K / G, G, G]."""
    groups = x.view(len(x), -1, group_size).transpose(0, 1)  # [K/G, M, G]
    return groups.transpose(1, 2) @ groups


def spread_rows(size: int, most: int) -> torch.Tensor:
    """Returns at most ``most`` of the indices below ``size``, evenly spaced."""
    return torch.arange(size) if size <= most else torch.arange(most) * size // most


def search_scales(
    products: list[Product],
    magnitude: torch.Tensor,
    alphas: Sequence[float] = ALPHAS,
    weights: torch.Tensor | None = None,
) -> Scales:
    """Returns the best scales of the channels of an input that some products share.

    Args:
        products: at least one product; all with the same K.
        magnitude: the mean |x| of each channel, [K]; equal for channels that have to share a scale.
        alphas: the exponents to try, 0 first.
        weights: the magnitude of the weights of each channel, [K], to try powers of ``magnitude / weights`` too; None
            tries only powers of ``magnitude``.
    """
    bases = [_bounded(magnitude)]
    if weights is not None:
        bases.append(bases[0] / _bounded(weights))
    sampled = [_sampled(p)[0] for p in products]
    exact = [p.x @ p.weight.t() for p in sampled]
    sizes = [_size_of_outputs(y, p.parts) for y, p in zip(exact, sampled, strict=True)]
    best: Scales | None = None
    before = 0.0
    normalised = _as_awq if weights is None else _normalised
    tried = [(bases[0], alphas[0]), *((base, alpha) for base in bases for alpha in alphas[1:])]
    for base, alpha in tried if magnitude.max() > 0 else tried[:1]:
        factors = normalised(base.pow(alpha)) if alpha else torch.ones_like(magnitude)
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


def search_clipping(product: Product, gram: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Chooses the clipping of each group of ``weight * factors``. Returns indices into SHARES, uint8 [N, K / G].

    If rounding changes a group by d, the error is the sum of (d . x)^2 over all tokens, d^T gram d.

    Args:
        product: the weight and its inputs.
        gram: ``gram_of_groups`` of the tokens, [K / G, G, G].
        factors: s [K].
    """
    size = product.code_format.group_size
    split = factors.unflatten(-1, (-1, size))  # [C, G]
    gram = gram / (split[:, :, None] * split[:, None, :])
    if not gram.any():  # no token came here: the weight's own error
        gram = torch.eye(size).expand_as(gram)
    chosen = []
    for rows in product.weight.split(max(1, _CHUNK_ELEMENTS // product.weight.shape[1])):
        scaled = (rows * factors).unflatten(-1, (-1, size))  # [N, C, G]
        of = range_of(scaled, product.code_format)
        least = torch.full((len(rows), len(gram)), torch.inf)
        indices = torch.zeros((len(rows), len(gram)), dtype=torch.uint8)
        for i, share in enumerate(SHARES):
            if product.code_format.offsets and share > 1:
                continue
            off = (rounded(scaled, of, share) - scaled).transpose(0, 1)  # [C, N, G]
            error = ((off @ gram) * off).sum(-1).t()  # [N, C]
            better = error < least
            least = torch.where(better, error, least)
            indices[better] = i
        chosen.append(indices)
    return torch.cat(chosen)


def output_error(product: Product, factors: torch.Tensor, choices: torch.Tensor) -> float:
    """Returns the error of a scaled and clipped weight, relative to the exact product, over sampled tokens and outputs.

    ``factors`` is s [K]; ``choices`` has the index of each group's share, [N, K / G].
    """
    sampled, sampled_rows = _sampled(product)
    exact = sampled.x @ sampled.weight.t()
    groups = (sampled.weight * factors).unflatten(-1, (-1, product.code_format.group_size))
    weight = rounded(groups, range_of(groups, product.code_format), share_of(choices[sampled_rows])).flatten(-2)
    off = _rounded_activation(sampled.x / factors, product.activation_group) @ weight.t() - exact
    return float((off / _size_of_outputs(exact, sampled.parts)).square().sum()) / len(product.parts)


def _sampled(product: Product) -> tuple[Product, torch.Tensor]:
    """Returns the product with at most MOST_OUTPUTS outputs, from each part in proportion, and the indices of these
    outputs.
    """
    rows, parts, start = [], [], 0
    for size in product.parts:
        most = max(1, MOST_OUTPUTS * size // len(product.weight))
        rows.append(start + spread_rows(size, most))
        parts.append(len(rows[-1]))
        start += size
    sampled_rows = torch.cat(rows)
    return replace(product, weight=product.weight[sampled_rows], parts=tuple(parts)), sampled_rows


def _size_of_outputs(y: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    """Returns for each output the norm of its part of a product: y [M, N] -> [N]."""
    norms = [torch.full((p.shape[1],), max(float(p.square().sum()), 1e-30) ** 0.5) for p in y.split(parts, dim=-1)]
    return torch.cat(norms)


def _bounded(magnitude: torch.Tensor) -> torch.Tensor:
    return magnitude.clamp(min=float(magnitude.max()) * _LEAST)


def _as_awq(scale: torch.Tensor) -> torch.Tensor:
    """Normalises scales as in the code of AWQ: the largest times the smallest is 1."""
    return scale / (scale.max() * scale.min()).sqrt()


def _normalised(scale: torch.Tensor) -> torch.Tensor:
    """Normalises scales to a geometric mean of 1, so that the scales of small weights stay in float16's normal
    range.
    """
    return scale / scale.log().mean().exp()


def _rounded_product(product: Product, factors: torch.Tensor) -> torch.Tensor:
    """Returns the product [M, N] of ``x / factors`` and ``weight * factors``, both rounded."""
    x = _rounded_activation(product.x / factors, product.activation_group)
    chunks = product.weight.split(max(1, _CHUNK_ELEMENTS // product.weight.shape[1]))
    return torch.cat([x @ _rounded(rows * factors, product.code_format).t() for rows in chunks], dim=-1)


def _rounded_activation(x: torch.Tensor, group_size: int | None) -> torch.Tensor:
    if group_size is None:
        return x
    values, scales, _ = quantize_activation(x, group_size)
    return decoded(values, scales, group=group_size)


def _rounded(weight: torch.Tensor, code_format: CodeFormat) -> torch.Tensor:
    if code_format.bits == 8:
        eight = round_to_8_bits(weight, code_format.group_size)
        return decode(Codes(eight.values, eight.scales), code_format)
    groups = weight.unflatten(-1, (-1, code_format.group_size))
    return rounded(groups, range_of(groups, code_format), 1.0).flatten(-2)


@dataclass
class Seen:
    """The recorded inputs of a linear.

    Attributes:
        products: one product, or one for each expert.
        rows: all tokens of each product, [M, K].
        magnitude: the mean |x| of each channel, [1 or E, K].
    """

    products: list[Product]
    rows: list[torch.Tensor]
    magnitude: torch.Tensor


@dataclass
class ScaledValue:
    """The scales of one value.

    Attributes:
        channels: the value.
        factors: s for its readers, [1 or E, K]; None if the value isn't scaled.
        folded: s for its producer; None if the value isn't scaled.
    """

    channels: Channels
    factors: torch.Tensor | None
    folded: torch.Tensor | None


@dataclass
class ScaleSweep:
    """One evaluation of the program that searches for the scales of each value when the last linear that reads it is
    called.

    Attributes:
        program: the program.
        channels: the values to scale.
        linears: the linears whose products are measured.
        context: the pass's context, with the calibration tokens.
        alphas: the exponents to try.
        by_weights: True if scales by the magnitudes of weights are tried too.
        found_one: called with the scales of each value, the inputs of its linears, and the result of each search (one,
            or one for each expert).
        scaled: the scales so far.
    """

    program: Program
    channels: Sequence[Channels]
    linears: Sequence[Node]
    context: PassContext
    alphas: Sequence[float]
    by_weights: bool
    found_one: Callable[[ScaledValue, Mapping[Node, Seen], list[Scales]], None]
    scaled: list[ScaledValue] = field(default_factory=list)

    def run(self) -> None:
        self._of = {n: c for c in self.channels for n in c.readers if n in set(self.linears)}
        self._seen: dict[Node, dict[Node, Seen]] = defaultdict(dict)
        self._fast = FastEvaluation(self.program, WeightCache(0))
        sequences = _some(self.context.calibration)
        inputs = packed_inputs(self.program, sequences)
        inputs["rows"] = inputs["rows"][spread_rows(len(inputs["rows"]), _LAST_ROWS)]
        self.program.evaluate(inputs, compute=self._compute, read=self._fast.read)

    def _compute(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        channels = self._of.get(node)
        if channels is not None:
            seen = self._seen[channels.origin]
            seen[node] = _look(self.program, node, args, channels.producer)
            if len(seen) == sum(1 for n in channels.readers if n in self._of):
                self._search(channels, self._seen.pop(channels.origin))
        return self._fast.compute(node, args, kwargs)

    def _search(self, channels: Channels, seen: dict[Node, Seen]) -> None:
        self.context.progress(len(self.scaled), len(self.channels), join_where(where_of(seen)))
        producer, first = channels.producer, next(iter(seen.values()))
        count, size = first.magnitude.shape  # [1 or E, K]
        factors, scales = torch.ones(count, size), list[Scales]()
        if producer is not None:
            magnitude = [_tied(m, producer) for m in first.magnitude]
            each = [_shared(seen)] if count == 1 else [[s.products[e] for s in seen.values()] for e in range(count)]
            used = [e for e, p in enumerate(each) if any(len(q.x) for q in p)]
            weights = [_tied(_weights_of(each[e]), producer) if self.by_weights else None for e in used]
            scales = [search_scales(each[e], magnitude[e], self.alphas, w) for e, w in zip(used, weights, strict=True)]
            for e, one in zip(used, scales, strict=True):
                factors[e] = one.factors
        changed = bool((factors != 1).any())
        folded = _untied(factors, producer) if changed and producer is not None else None
        self.scaled.append(ScaledValue(channels, factors if changed else None, folded))
        self.found_one(self.scaled[-1], seen, scales)


def _some(sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns evenly spaced sequences of about MOST_CALIBRATION_TOKENS tokens in total, at least one sequence."""
    total = sum(len(s) for s in sequences)
    most = max(1, len(sequences) * MOST_CALIBRATION_TOKENS // max(total, 1))
    return [sequences[i] for i in spread_rows(len(sequences), most).tolist()]


def _look(program: Program, node: Node, args: Sequence[Any], producer: Producer | None) -> Seen:
    """Returns the inputs and the weight of a linear for the search. ``args`` has the values of its arguments."""
    weight_format, weight = node.meta[FORMAT], args[WEIGHT_ARGUMENT[node.target]].float()
    code_format = CodeFormat.of(weight_format)
    assert code_format is not None
    x = args[0].float().flatten(0, -2)  # [M, K]
    expr = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
    assert expr is not None
    inputs, weights, parts = [x], [weight], _fused_sizes(expr, weight.shape[-2])
    if node.target is ew.grouped_linear.default:
        inputs = [x[a:b] for a, b in pairwise(args[1].tolist())]
        weights, parts = list(weight), (weight.shape[-2],)
    most = max(1, MOST_TOKENS // len(inputs) * 2) if len(inputs) > 1 else MOST_TOKENS
    products = [
        Product(
            rows[spread_rows(len(rows), most)],
            w,
            parts,
            code_format,
            weight_format.activation_group_size if weight_format.activation == "int8" else None,
        )
        for rows, w in zip(inputs, weights, strict=True)
    ]
    each = inputs if producer is not None and producer.experts else [x]
    return Seen(products, inputs, torch.stack([rows.abs().sum(0) / max(len(rows), 1) for rows in each]))


def _fused_sizes(expr: WeightExpr, rows: int) -> tuple[int, ...]:
    """Returns the number of outputs of each of the linears that were fused into one with ``rows`` outputs."""
    sizes = tuple(p.size for p in expr.parts(0) if p.size)
    return sizes if sum(sizes) == rows else (rows,)


def _shared(seen: Mapping[Node, Seen]) -> list[Product]:
    """Returns the products of linears with a common input. Of experts, it takes some of those that got tokens."""
    products = []
    for one in seen.values():
        used = [p for p in one.products if len(p.x)]
        products += [used[i] for i in spread_rows(len(used), _MOST_EXPERTS).tolist()]
    return products


def _weights_of(products: Sequence[Product]) -> torch.Tensor:
    """Returns the magnitude of the weights of each channel, [K]. All products count equally."""
    squares = [p.weight.square().mean(0) for p in products]
    return torch.stack([s / s.mean().clamp(min=1e-30) for s in squares]).mean(0).sqrt()


def _tied(magnitude: torch.Tensor, producer: Producer) -> torch.Tensor:
    """Returns the magnitudes [K] with the mean over the query heads of a value head in place of their own."""
    if producer.heads is None:
        return magnitude
    heads, shared, size = producer.heads
    mean = magnitude.view(heads, shared, size).mean(1, keepdim=True)
    return mean.expand(heads, shared, size).reshape(-1)


def _untied(factors: torch.Tensor, producer: Producer) -> torch.Tensor:
    """Returns s for the producer, given s for the readers [1 or E, K]: one of the equal query heads of each value
    head.
    """
    if producer.heads is None:
        return factors
    heads, shared, size = producer.heads
    return factors.view(-1, heads, shared, size)[:, :, 0].flatten(1)
