"""AWQ: scales channels and clips groups, so that rounding to 4 bits causes the least error where activations are large.

Lin et al. 2023, https://arxiv.org/abs/2306.00978. The scaled program computes the same as before, up to rounding of
floats, until its weights are rounded to 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult, Rejection

from ..ir.clipped import Choices, Clipped
from ..ir.prequantized import CodeFormat
from ..ir.program import Program
from ..ir.provenance import join_where, where_of
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS, WEIGHT_ARGUMENT
from .scalable_channels import Scaling, channels_read_by, keeps_integers, put_weights, scaled_weights
from .search_scales import (
    ALPHAS,
    ScaledValue,
    Scales,
    ScaleSweep,
    Seen,
    gram_of_groups,
    output_error,
    search_clipping,
)

ew = torch.ops.ew


class ApplyAwq(Pass):
    """Scales and clips the weights of 4-bit linears if the recipe's method is ``awq``: ``W * s``, with 1/s in the
    weights before.

    The pass needs calibration tokens, of which it uses at most 2048. The weights of one layer are in memory at a time.
    If a value has other readers, or no weight before it can be scaled, its linears are only clipped.
    """

    name = "apply_awq"
    exact = False
    requires = (HAS_FORMATS,)

    def needs_tokens(self, context: PassContext) -> bool:
        return context.recipe.weights.method == "awq"

    def call(self, program: Program, context: PassContext) -> PassResult:
        if context.recipe.weights.method != "awq":
            return PassResult()
        linears = [n for n in program.nodes_of(*LINEARS) if n.meta[FORMAT].storage == "int4" and _free(program, n)]
        if not linears:
            return PassResult()
        channels = channels_read_by(program, linears)
        clipping = _Clipping()
        sweep = ScaleSweep(program, channels, linears, context, ALPHAS, False, clipping.choose)
        sweep.run()
        _rewrite(program, sweep.scaled, clipping.choices)
        rejected = [
            Rejection(c.origin.name, join_where(where_of(c.readers)), c.reason) for c in channels if c.producer is None
        ]
        return PassResult(len(linears), rejected, clipping.metrics)


def _free(program: Program, linear: Node) -> bool:
    """Returns True if a linear's weight may change: no other call reads it, and it has no known integers."""
    weight = linear.args[WEIGHT_ARGUMENT[linear.target]]
    expr = program.weight_of(weight)
    unshared = isinstance(weight, Node) and len(weight.users) == 1
    return expr is not None and unshared and not keeps_integers(program, linear)


class _Clipping:
    """Chooses the clipping of the groups of each linear's weight, once the scales of its input are known."""

    def __init__(self) -> None:
        self.choices: dict[Node, Choices] = {}
        self.metrics: list[Metric] = []

    def choose(self, found: ScaledValue, seen: Mapping[Node, Seen], scales: Sequence[Scales]) -> None:
        after = []
        for node, one in seen.items():
            common_factors = torch.ones(1, one.magnitude.shape[-1]) if found.factors is None else found.factors
            factors = common_factors.expand(len(one.products), -1)
            group = node.meta[FORMAT].group_size
            each = list(zip(one.products, one.rows, factors, strict=True))
            picked = [search_clipping(p, gram_of_groups(rows, group), f) for p, rows, f in each]
            self.choices[node] = Choices.from_indices(
                picked[0] if node.target is ew.linear.default else torch.stack(picked)
            )
            after += [output_error(p, f, c) for (p, _, f), c in zip(each, picked, strict=True) if len(p.x)]
        where = join_where(where_of(seen))
        names = (
            ("alpha", [s.alpha for s in scales] or [0.0]),
            ("error before", [s.before for s in scales] or [0.0]),
            ("error after", after or [0.0]),
        )
        self.metrics += [Metric(where, name, sum(values) / len(values)) for name, values in names]


def _rewrite(program: Program, found: Sequence[ScaledValue], choices: Mapping[Node, Choices]) -> None:
    exprs = scaled_weights(
        program,
        [
            Scaling(one.channels, one.factors, one.folded)
            for one in found
            if one.factors is not None and one.folded is not None
        ],
    )
    for reader, chosen in choices.items():
        argument = WEIGHT_ARGUMENT[reader.target]
        base = exprs.get((reader, argument)) or program.weight_of(reader.args[argument])
        code_format = CodeFormat.of(reader.meta[FORMAT])
        assert base is not None
        assert code_format is not None
        exprs[reader, argument] = Clipped(base, chosen, code_format)
    put_weights(program, exprs, "awq")
