"""AWQ: channels are scaled, and groups clipped, so that rounding to 4 bits costs least where activations are large.

Lin et al. 2023, https://arxiv.org/abs/2306.00978. The program computes the same as before, up to rounding, until its
weights are rounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.plugins.shared.errors import PassError
from enginewright.plugins.shared.weight_format import WeightFormat

from ..ir.clipped import Choices, Clipped
from ..ir.prequantized import CodeFormat
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where, where_of
from ..ir.scaled import Factors, Scaled
from ..ir.weights import WeightExpr
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS, WEIGHT_ARGUMENT
from .scalable_channels import Channels, Producer, channels_read_by, keeps_integers
from .search_scales import (
    MOST_TOKENS,
    Product,
    gram_of_groups,
    output_error,
    search_clipping,
    search_scales,
    spread_rows,
)

ew = torch.ops.ew

MOST_CALIBRATION_TOKENS = 2048
"""More make no difference to a mean magnitude."""

_ROWS = 256
"""Tokens that go through the end of the program, where only sampled rows do: what is sampled here."""

_MOST_EXPERTS = 8
"""Of a layer, that the search for the scale of their common input looks at."""


class ApplyAwq(Pass):
    """Linears of 4 bits whose recipe says ``awq``: weights ``W * s`` and clipped, with 1/s in the weights before.

    Needs calibration tokens, of which it takes at most 2048; a layer's weights are in memory at a time. A value that
    something else reads as well, or that nothing before it can scale, keeps its channels: its linears are clipped only.
    """

    name = "apply_awq"
    exact = False
    requires = (HAS_FORMATS,)

    def call(self, program: Program, context: PassContext) -> PassResult:
        if context.formats.method != "awq":
            return PassResult()
        linears = [n for n in program.nodes_of(*LINEARS) if n.meta[FORMAT].storage == "int4" and _free(program, n)]
        if not linears:
            return PassResult()
        if not context.calibration:
            raise PassError(
                "the pass apply_awq has no calibration tokens",
                hint='Calibrate the export, or take method = "nearest" in [weights] of the recipe.',
            )
        channels = channels_read_by(program, linears)
        sweep = _Sweep(program, channels, linears, context)
        sweep.run()
        _rewrite(program, sweep.found)
        rejected = [
            Rejection(c.origin.name, join_where(where_of(c.readers)), c.reason) for c in channels if c.producer is None
        ]
        return PassResult(len(linears), rejected, sweep.metrics)


def _free(program: Program, linear: Node) -> bool:
    """Whether a linear's weight is its own, and has yet to be rounded."""
    weight = linear.args[WEIGHT_ARGUMENT[linear.target]]
    expr = program.weight_of(weight)
    own = isinstance(weight, Node) and len(weight.users) == 1
    return expr is not None and own and not keeps_integers(program, linear)


@dataclass
class _Found:
    """For one value: s for its readers, [1 or E, K], and for its producer's folds; None: as it was."""

    channels: Channels
    factors: torch.Tensor | None
    folded: torch.Tensor | None
    choices: dict[Node, Choices]


@dataclass
class _Seen:
    """What a linear was given: a product for each expert, or one; and mean |x|, [1 or E, K]."""

    products: list[Product]
    magnitude: torch.Tensor


@dataclass
class _Sweep:
    """One evaluation of the program, searching as it goes: a layer's inputs and weights are there when it is called."""

    program: Program
    channels: Sequence[Channels]
    linears: Sequence[Node]
    context: PassContext
    found: list[_Found] = field(default_factory=list)
    metrics: list[Metric] = field(default_factory=list)

    def run(self) -> None:
        self._of = {n: c for c in self.channels for n in c.readers if n in set(self.linears)}
        self._seen: dict[Node, dict[Node, _Seen]] = defaultdict(dict)
        self._fast = FastEvaluation(self.program, WeightCache(0))
        sequences = _some(self.context.calibration)
        inputs = packed_inputs(self.program, sequences)
        inputs["rows"] = inputs["rows"][spread_rows(len(inputs["rows"]), _ROWS)]
        self.program.evaluate(inputs, compute=self._compute, read=self._fast.read)

    def _compute(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        channels = self._of.get(node)
        if channels is not None:
            seen = self._seen[channels.origin]
            seen[node] = _look(self.program, node, args, channels.producer)
            if len(seen) == sum(1 for n in channels.readers if n in self._of):
                self._search(channels, self._seen.pop(channels.origin))
        return self._fast.compute(node, args, kwargs)

    def _search(self, channels: Channels, seen: dict[Node, _Seen]) -> None:
        where = join_where(where_of(seen))
        self.context.progress(len(self.found), len(self.channels), where)
        producer, first = channels.producer, next(iter(seen.values()))
        count, size = first.magnitude.shape  # [1 or E, K]
        factors, alphas, before = torch.ones(count, size), [0.0], [0.0]
        if producer is not None:
            magnitude = torch.stack([_tied(m, producer) for m in first.magnitude])
            each = [_shared(seen)] if count == 1 else [[s.products[e] for s in seen.values()] for e in range(count)]
            scales = [search_scales(p, m) for p, m in zip(each, magnitude, strict=True) if any(len(q.x) for q in p)]
            used = [e for e, p in enumerate(each) if any(len(q.x) for q in p)]
            for e, one in zip(used, scales, strict=True):
                factors[e] = one.factors
            alphas, before = [s.alpha for s in scales] or [0.0], [s.before for s in scales] or [0.0]
        choices, after = {}, []
        for node, one_seen in seen.items():
            pairs = [(p, factors[e if count > 1 else 0]) for e, p in enumerate(one_seen.products)]
            picked = [search_clipping(p, f) for p, f in pairs]
            choices[node] = Choices.of(picked[0] if node.target is ew.linear.default else torch.stack(picked))
            after += [output_error(p, f, c) for (p, f), c in zip(pairs, picked, strict=True) if len(p.x)]
        changed = bool((factors != 1).any())
        folded = _untied(factors, producer) if changed and producer is not None else None
        self.found.append(_Found(channels, factors if changed else None, folded, choices))
        names = ("alpha", alphas), ("error before", before), ("error after", after or [0.0])
        self.metrics += [Metric(where, name, sum(values) / len(values)) for name, values in names]


def _some(sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Evenly spread sequences, of no more than MOST_CALIBRATION_TOKENS together, or one."""
    total = sum(len(s) for s in sequences)
    most = max(1, len(sequences) * MOST_CALIBRATION_TOKENS // max(total, 1))
    return [sequences[i] for i in spread_rows(len(sequences), most).tolist()]


def _look(program: Program, node: Node, args: Sequence[Any], producer: Producer | None) -> _Seen:
    """What a linear's search needs of its input and weight."""
    wanted, weight = node.meta[FORMAT], args[WEIGHT_ARGUMENT[node.target]].float()
    x = args[0].float().flatten(0, -2)  # [M, K]
    expr = program.weight_of(node.args[WEIGHT_ARGUMENT[node.target]])
    assert expr is not None
    inputs, weights, parts = [x], [weight], _fused_sizes(expr, weight.shape[-2])
    if node.target is ew.grouped_linear.default:
        inputs = [x[a:b] for a, b in pairwise(args[1].tolist())]
        weights, parts = list(weight), (weight.shape[-2],)
    code_format = _code_format(wanted)
    products = [
        Product(
            rows[spread_rows(len(rows), max(1, MOST_TOKENS // len(inputs) * 2) if len(inputs) > 1 else MOST_TOKENS)],
            gram_of_groups(rows, wanted.group_size),
            w,
            parts,
            code_format,
            wanted.activation_group_size,
        )
        for rows, w in zip(inputs, weights, strict=True)
    ]
    if producer is None or not producer.experts:
        inputs = [x]
    magnitude = torch.stack([rows.abs().sum(0) / max(len(rows), 1) for rows in inputs])
    return _Seen(products, magnitude)


def _fused_sizes(expr: WeightExpr, rows: int) -> tuple[int, ...]:
    """Outputs of each linear that was fused into one."""
    sizes = tuple(p.size for p in expr.parts(0) if p.size)
    return sizes if sum(sizes) == rows else (rows,)


def _shared(seen: Mapping[Node, _Seen]) -> list[Product]:
    """The products of a common input; of many experts, some that tokens went to."""
    products = []
    for one in seen.values():
        used = [p for p in one.products if len(p.x)]
        products += [used[i] for i in spread_rows(len(used), _MOST_EXPERTS).tolist()]
    return products


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


def _rewrite(program: Program, found: Sequence[_Found]) -> None:
    """Weights with their factors; a weight may be multiplied by one value's and divided by another's."""
    exprs: dict[tuple[Node, int], WeightExpr] = {}

    def put(node: Node, argument: int, factors: torch.Tensor, divide: bool) -> None:
        base = exprs.get((node, argument)) or program.weight_of(node.args[argument])
        assert base is not None
        exprs[node, argument] = Scaled(base, Factors("s", factors), divide)

    for one in found:
        if one.factors is None or one.folded is None or one.channels.producer is None:
            continue
        for reader in one.channels.readers:
            rank = len(program.value(_weight_node(reader)).shape)
            columns = one.factors if rank == 2 else one.factors[:, None]  # [1, K], or [1 or E, 1, K]
            put(reader, WEIGHT_ARGUMENT[reader.target], columns, divide=False)
        for fold in one.channels.producer.folds:
            weight = fold.node.args[fold.argument]
            assert isinstance(weight, Node)
            shape = program.value(weight).shape
            axis = len(shape) + fold.axis
            rows = torch.ones(len(one.folded), int(shape[axis]))  # [1 or E, N]
            rows[:, fold.start : fold.stop] = one.folded
            lead, after = (-1,) if axis else (), (1,) * (-1 - fold.axis)
            put(fold.node, fold.argument, rows.reshape(*lead, rows.shape[1], *after), divide=True)
    for one in found:
        for reader, choices in one.choices.items():
            argument, wanted = WEIGHT_ARGUMENT[reader.target], reader.meta[FORMAT]
            base = exprs.get((reader, argument)) or program.weight_of(reader.args[argument])
            assert base is not None
            exprs[reader, argument] = Clipped(base, choices, _code_format(wanted))
    for (node, argument), expr in exprs.items():
        old = node.args[argument]
        assert isinstance(old, Node)
        node.update_arg(argument, program.weight(f"{old.target}.awq", expr, where=old.meta[WHERE]))


def _code_format(wanted: WeightFormat) -> CodeFormat:
    return CodeFormat(4, wanted.group_size, wanted.zero_point)


def _weight_node(linear: Node) -> Node:
    weight = linear.args[WEIGHT_ARGUMENT[linear.target]]
    assert isinstance(weight, Node)
    return weight
