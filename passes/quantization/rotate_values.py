"""Rotates the values of attention, so that rounding them and the weights that read them causes less error.

QuaRot, Ashkboos et al. 2024, https://arxiv.org/abs/2404.00456, and SpinQuant's R2, Liu et al. 2024,
https://arxiv.org/abs/2405.16406. The result of attention is linear in its values. So the values of each head can be
multiplied by a Hadamard matrix, and the columns of the output projection by its inverse. Both are multiplied into the
weights. The program then computes the same as before, up to rounding of floats, in the same time.
"""

from __future__ import annotations

from torch.fx.node import Node

from enginewright.passes.framework.base import Pass, PassContext, PassResult, Rejection

from ..ir.program import Program
from ..ir.provenance import join_where, where_of
from ..ir.scaled import Rotated
from ..ir.two_of_four import is_two_of_four
from ..ir.weights import WeightExpr
from .choose_formats import FORMAT, HAS_FORMATS, LINEARS, WEIGHT_ARGUMENT
from .scalable_channels import ATTENTIONS, Channels, channels_read_by, put_weights


class RotateValues(Pass):
    """Rotates the values of each head if the recipe has ``rotate`` and the linear after the attention has a weight of
    integers.

    A head of D values is rotated in blocks of the largest power of two that divides D. An attention is left unchanged,
    and
    that is recorded, in these cases: its values aren't the result of a linear, its result has other readers, or its
    weights
    have the sparsity 2:4.
    """

    name = "rotate_values"
    requires = (HAS_FORMATS,)

    def wanted(self, context: PassContext) -> bool:
        return context.recipe.weights.rotate

    def call(self, program: Program, context: PassContext) -> PassResult:
        if not context.recipe.weights.rotate:
            return PassResult()
        linears = [n for n in program.nodes_of(*LINEARS) if n.meta[FORMAT].stored.integers]
        result = PassResult()
        exprs: dict[tuple[Node, int], WeightExpr] = {}
        for channels in channels_read_by(program, linears):
            if channels.origin.target not in ATTENTIONS:
                continue
            reason = channels.reason if channels.producer is None else _rotate(program, channels, exprs)
            if reason:
                where = join_where(where_of(channels.readers))
                result.rejected.append(Rejection(channels.origin.name, where, reason))
            else:
                result.matched += 1
        put_weights(program, exprs)
        return result


def _rotate(program: Program, channels: Channels, exprs: dict[tuple[Node, int], WeightExpr]) -> str:
    """Adds the rotated weights of an attention to ``exprs``: those that compute its values, and those that read its
    result.

    Returns "", or the reason why they can't be rotated.
    """
    producer = channels.producer
    assert producer is not None and producer.heads is not None
    size = producer.heads[2] & -producer.heads[2]
    if size == 1:
        return f"heads of {producer.heads[2]} values have no block of a power of two"
    changed: dict[tuple[Node, int], WeightExpr] = {}
    for fold in producer.folds:
        changed[fold.node, fold.argument] = _weight(program, fold.node, fold.argument)
    for reader in channels.readers:
        changed[reader, WEIGHT_ARGUMENT[reader.target]] = _weight(program, reader, WEIGHT_ARGUMENT[reader.target])
    for (node, argument), expr in changed.items():
        if is_two_of_four(expr):
            return f"{node.args[argument]} is of sparsity 2:4"
    for fold in producer.folds:
        key = fold.node, fold.argument
        exprs[key] = Rotated(changed[key], fold.axis, fold.start, fold.stop, size)
    for reader in channels.readers:
        key = reader, WEIGHT_ARGUMENT[reader.target]
        exprs[key] = Rotated(changed[key], -1, 0, changed[key].shape[-1], size)
    return ""


def _weight(program: Program, node: Node, argument: int) -> WeightExpr:
    expr = program.weight_of(node.args[argument])
    assert expr is not None
    return expr
