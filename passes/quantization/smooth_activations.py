"""Scales channels so that rounding a product's input to 8 bits causes the least error.

Channels with large values are divided, and the weights that read them are multiplied. The division is part of the
weights that compute the input. SmoothQuant, Xiao et al. 2023, https://arxiv.org/abs/2211.10438. The exponent is
searched for as in AWQ, with weights and activations rounded as in the final program. The scaled program computes the
same as before, up to rounding of floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx.node import Node

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.weight_formats import chooses

from ..ir.program import Program
from ..ir.provenance import join_where, where_of
from ..ir.recovered import before_training
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS, WEIGHT_ARGUMENT
from .scalable_channels import Scaling, channels_read_by, divide_inputs, divide_result, put_weights, scaled_weights
from .search_scales import ScaledValue, Scales, ScaleSweep, Seen

ALPHAS = (0.0, 0.3, 0.4, 0.5, 0.6)
"""The exponents to try; 0 leaves the channels unchanged."""


class SmoothActivations(Pass):
    """Scales values that are rounded to 8 bits before products with weights of integers, if the recipe has ``smooth``.

    The factor 1/s is applied as follows:

    1. For a norm's result: to the norm's weight and bias.
    2. For a gated activation, or a relu: to the rows of the linear before it. For a gated one, to the rows of the half
    without the function.
    3. For an attention's result: to the rows that compute its values. Query heads that share values share s.
    4. For the head's input, if an embedding's table is the head's weight: the table is stored scaled, and the result of
    a look-up is divided.
    5. For a norm's result that is also added to a sum: by a multiplication before the linears.

    A value with other readers, or that no weight before it can scale, is left unchanged, which is recorded. Weights of
    4 bits are left to AWQ if that is the method. Weights whose integers GPTQ chooses are left to GPTQ: it gains more by
    itself, and scales that suit the nearest integers were measured to hinder it.
    """

    name = "smooth_activations"
    requires = (HAS_FORMATS,)

    def wanted(self, context: PassContext) -> bool:
        return context.recipe.weights.smooth

    def needs_tokens(self, context: PassContext) -> bool:
        return True

    def call(self, program: Program, context: PassContext) -> PassResult:
        linears = [n for n in program.nodes_of(*LINEARS) if _rounded(program, n, context)]
        if not linears or not context.recipe.weights.smooth:
            return PassResult()
        channels = channels_read_by(program, linears, again=True)
        rejected = [
            Rejection(c.origin.name, join_where(where_of(c.readers)), c.reason) for c in channels if c.producer is None
        ]
        scalable = [c for c in channels if c.producer is not None]
        metrics: list[Metric] = []

        def keep(found: ScaledValue, seen: Mapping[Node, Seen], scales: Sequence[Scales]) -> None:
            where = join_where(where_of(seen))
            for name, values in (
                ("alpha", [s.alpha for s in scales]),
                ("error before", [s.before for s in scales]),
                ("error after", [s.after for s in scales]),
            ):
                metrics.append(Metric(where, name, sum(values) / max(len(values), 1)))

        sweep = ScaleSweep(program, scalable, linears, context, ALPHAS, True, keep)
        trained = program.weights
        program.weights = before_training(
            trained
        )  # weights that training moves keep the scales that they were trained with
        try:
            sweep.run()
        finally:
            program.weights = trained
        scalings = [
            Scaling(one.channels, one.factors, one.folded)
            for one in sweep.scaled
            if one.factors is not None and one.folded is not None
        ]
        put_weights(program, scaled_weights(program, scalings))
        for scaling in scalings:
            for table in scaling.channels.tables:
                divide_result(program, table, scaling.factors[0])
            if scaling.channels.producer is not None and not scaling.channels.producer.folds:
                divide_inputs(program, scaling.channels.readers, scaling.factors[0])
        return PassResult(len(scalings), rejected, metrics)


def _rounded(program: Program, linear: Node, context: PassContext) -> bool:
    """Returns True if a linear multiplies integers with a rounded input, and no other pass scales its channels."""
    weight_format = linear.meta[FORMAT]
    if not weight_format.stored.integers:
        return False
    if chooses(context.recipe.weights.method, weight_format):
        return False
    expr = program.weight_of(linear.args[WEIGHT_ARGUMENT[linear.target]])
    return expr is not None and expr.dtype.is_floating_point
