"""Scales for the channels of a value, by what rounding costs with them; and how much each group of a weight is clipped.

Scales are s = m^alpha, normalised, with alpha from a grid. m is the mean magnitude of a channel (AWQ, Lin et al. 2023,
https://arxiv.org/abs/2306.00978), or that over the magnitude of the channel's weights (SmoothQuant, Xiao et al. 2023,
https://arxiv.org/abs/2211.10438). The one is taken whose error after rounding is least, weights and activations rounded
as they will be. AWQ's second search gives every group of a weight the share of its range with the least error of its
part of the sum.
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
"""Exponents tried; 0 leaves the channels as they are."""

MOST_TOKENS = 256
MOST_OUTPUTS = 512
"""The most outputs of one weight that errors of scales are measured on: evenly spread tokens and rows."""

MOST_CALIBRATION_TOKENS = 2048
"""More make no difference to a mean magnitude."""

_LAST_ROWS = 256
"""Tokens that go through the end of the program, where only sampled rows do: what is sampled here."""

_MOST_EXPERTS = 8
"""The most experts of a layer that the search for the scale of their common input looks at."""

_CHUNK_ELEMENTS = 1 << 22
_LEAST = 1e-5
"""The least mean magnitude of a channel, as a share of the largest: one that is always 0 keeps a usable scale."""


@dataclass
class Product:
    """A weight and what it is multiplied with.

    Attributes:
        x: [M, K], some of the tokens.
        weight: [N, K] float32.
        parts: the numbers of the N outputs that belong to each of the fused linears, whose errors count alike.
        code_format: the format that the weight will have.
        activation_group: and the activations; None leaves them floats.
    """

    x: torch.Tensor
    weight: torch.Tensor
    parts: tuple[int, ...]
    code_format: CodeFormat
    activation_group: int | None


@dataclass(frozen=True)
class Scales:
    """A search's result: s [K], its exponent, and the error relative to the products' size without and with it."""

    factors: torch.Tensor
    alpha: float
    before: float
    after: float


def gram_of_groups(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """[M, K] -> [K / G, G, G]."""
    groups = x.view(len(x), -1, group_size).transpose(0, 1)  # [K/G, M, G]
    return groups.transpose(1, 2) @ groups


def spread_rows(size: int, most: int) -> torch.Tensor:
    """Spreads at most that many indices evenly over ``size``."""
    return torch.arange(size) if size <= most else torch.arange(most) * size // most


def search_scales(
    products: list[Product],
    magnitude: torch.Tensor,
    alphas: Sequence[float] = ALPHAS,
    weights: torch.Tensor | None = None,
) -> Scales:
    """The scale of the channels that these products share.

    Args:
        products: at least one product; all with the same K.
        magnitude: mean |x| of each channel, [K]; channels that are to have the same scale have the same.
        alphas: exponents to try, 0 first.
        weights: the magnitude of weights in each channel, [K], as ``magnitude``; if not None, powers of ``magnitude /
            weights`` are tried too.
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
    """Chooses how much each group of ``weight * factors`` is clipped: indices into SHARES, uint8 [N, K / G].

    The error of rounding a group by d is the sum of (d . x)^2 over all tokens, d^T gram d; ``gram`` [K / G, G, G] is
    ``gram_of_groups`` of these tokens.
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
    """The error of a clipped weight, relative to the exact product's size; over the sampled tokens and outputs."""
    sampled, sampled_rows = _sampled(product)
    exact = sampled.x @ sampled.weight.t()
    groups = (sampled.weight * factors).unflatten(-1, (-1, product.code_format.group_size))
    weight = rounded(groups, range_of(groups, product.code_format), share_of(choices[sampled_rows])).flatten(-2)
    off = _rounded_activation(sampled.x / factors, product.activation_group) @ weight.t() - exact
    return float((off / _size_of_outputs(exact, sampled.parts)).square().sum()) / len(product.parts)


def _sampled(product: Product) -> tuple[Product, torch.Tensor]:
    """Picks fewer outputs, as many of each part in proportion; and which these are."""
    rows, parts, start = [], [], 0
    for size in product.parts:
        most = max(1, MOST_OUTPUTS * size // len(product.weight))
        rows.append(start + spread_rows(size, most))
        parts.append(len(rows[-1]))
        start += size
    sampled_rows = torch.cat(rows)
    return replace(product, weight=product.weight[sampled_rows], parts=tuple(parts)), sampled_rows


def _size_of_outputs(y: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    """[M, N] -> [N]: the root of the sum of squares of the part that an output belongs to."""
    norms = [torch.full((p.shape[1],), max(float(p.square().sum()), 1e-30) ** 0.5) for p in y.split(parts, dim=-1)]
    return torch.cat(norms)


def _bounded(magnitude: torch.Tensor) -> torch.Tensor:
    return magnitude.clamp(min=float(magnitude.max()) * _LEAST)


def _as_awq(scale: torch.Tensor) -> torch.Tensor:
    """Normalizes scales as AWQ's authors do: the largest is as far above 1 as the least is below."""
    return scale / (scale.max() * scale.min()).sqrt()


def _normalised(scale: torch.Tensor) -> torch.Tensor:
    """Normalises to a geometric mean of 1: a weight of small numbers keeps scales that are normal in float16."""
    return scale / scale.log().mean().exp()


def _rounded_product(product: Product, factors: torch.Tensor) -> torch.Tensor:
    """[M, N]: of rounded activations with the rounded weight."""
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
    """Recorded inputs of a linear.

    Attributes:
        products: one for each expert, or one.
        rows: all tokens of each, [M, K].
        magnitude: mean |x| of each channel, [1 or E, K].
    """

    products: list[Product]
    rows: list[torch.Tensor]
    magnitude: torch.Tensor


@dataclass
class ScaledValue:
    """The scales of one value: s for its readers, [1 or E, K], and for its producer's folds; None: unscaled."""

    channels: Channels
    factors: torch.Tensor | None
    folded: torch.Tensor | None


@dataclass
class ScaleSweep:
    """One evaluation of the program, searching as it goes: a layer's inputs and weights are there when it is called.

    Attributes:
        linears: the linears whose products are measured.
        by_weights: True if scales by the magnitudes of weights are tried too.
        found_one: a function called with each value's scales, what its linears were given, and of each scale (one, or
            one for each expert) the exponent and the error without it.
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
    """Evenly spread sequences, of no more than MOST_CALIBRATION_TOKENS together, or one."""
    total = sum(len(s) for s in sequences)
    most = max(1, len(sequences) * MOST_CALIBRATION_TOKENS // max(total, 1))
    return [sequences[i] for i in spread_rows(len(sequences), most).tolist()]


def _look(program: Program, node: Node, args: Sequence[Any], producer: Producer | None) -> Seen:
    """Records the input and weight that a linear's search needs."""
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
    """Outputs of each linear that was fused into one."""
    sizes = tuple(p.size for p in expr.parts(0) if p.size)
    return sizes if sum(sizes) == rows else (rows,)


def _shared(seen: Mapping[Node, Seen]) -> list[Product]:
    """The products of a common input; of many experts, some that tokens went to."""
    products = []
    for one in seen.values():
        used = [p for p in one.products if len(p.x)]
        products += [used[i] for i in spread_rows(len(used), _MOST_EXPERTS).tolist()]
    return products


def _weights_of(products: Sequence[Product]) -> torch.Tensor:
    """[K]: the magnitude of the weights that a channel is multiplied with, each product's counting alike."""
    squares = [p.weight.square().mean(0) for p in products]
    return torch.stack([s / s.mean().clamp(min=1e-30) for s in squares]).mean(0).sqrt()


def _tied(magnitude: torch.Tensor, producer: Producer) -> torch.Tensor:
    """[K] -> [K]: equal for channels that have their scale from one row, the value head of several query heads."""
    if producer.heads is None:
        return magnitude
    heads, shared, size = producer.heads
    mean = magnitude.view(heads, shared, size).mean(1, keepdim=True)
    return mean.expand(heads, shared, size).reshape(-1)


def _untied(factors: torch.Tensor, producer: Producer) -> torch.Tensor:
    """s of what is read, [1 or E, K], to s of what is folded into."""
    if producer.heads is None:
        return factors
    heads, shared, size = producer.heads
    return factors.view(-1, heads, shared, size)[:, :, 0].flatten(1)
