"""Channels scaled so that rounding a product's input to 8 bits costs least: loud channels are divided, their weights
multiplied, and the inverse goes into what makes the input.

SmoothQuant, Xiao et al. 2023, https://arxiv.org/abs/2211.10438. The exponent is searched for with weights and
activations rounded as they will be, as AWQ's is. The program computes the same as before, up to rounding of floats.
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
from .scalable_channels import Scaling, channels_read_by, divide_result, put_weights, scaled_weights
from .search_scales import ScaledValue, Scales, ScaleSweep, Seen

ALPHAS = (0.0, 0.3, 0.4, 0.5, 0.6)
"""Exponents tried; 0 leaves the channels as they are."""


class SmoothActivations(Pass):
    """Scales values that are rounded to 8 bits before products with weights of integers, if the recipe has ``smooth``.

    1. A norm's result: its weight, and bias, take 1/s.
    2. A gated activation, or a relu: the rows of the linear before take it, of a gated one those of the other half.
    3. An attention's result: the rows that make its values take it; query heads that share values share s.
    4. The head's input, where a table of embeddings is the head's weight: the table is stored scaled, and what it gives
       is divided.

    A value that something else reads too, or that nothing before it can scale, stays as it is, which is recorded.
    Weights of 4 bits that AWQ will scale are left to it. So are those whose integers GPTQ chooses: it gains more by
    itself, and scales that suit the nearest integers were measured to be in its way.
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
        return PassResult(len(scalings), rejected, metrics)


def _rounded(program: Program, linear: Node, context: PassContext) -> bool:
    """Returns True if this linear multiplies integers with a rounded input, and no other pass scales its channels."""
    weight_format = linear.meta[FORMAT]
    if not weight_format.stored.integers:
        return False
    if chooses(context.recipe.weights.method, weight_format):
        return False
    expr = program.weight_of(linear.args[WEIGHT_ARGUMENT[linear.target]])
    return expr is not None and expr.dtype.is_floating_point
