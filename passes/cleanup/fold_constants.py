"""Turns calls whose arguments are only weights and numbers into weight expressions, which are evaluated when a target
is emitted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import dimension_order, ops_of
from enginewright.passes.framework.base import Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.views import RESHAPES, slice_bounds

from ..ir.chosen_rows import Chosen
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where
from ..ir.stacked_weights import SwapAxes
from ..ir.weights import COMPUTED, Apply, Cast, Concat, Slice, Source, Transpose, WeightExpr

aten = torch.ops.aten

_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


class FoldConstants(Pass):
    """Turns calls of ATen ops on weights and numbers, such as a norm's ``1 + weight``, into weights.

    Nothing is evaluated: an expression over the same sources replaces the call. Calls without any weight stay, because
    a weight must name a source. Ranges of numbers are an exception, since some models compute rotary frequencies from
    one in every step. Results that are larger than their arguments, such as an expanded mask, stay too.
    """

    name = "fold_constants"

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        for node in program.graph.nodes:
            if node.target in _RANGES and _is_fixed(program, node):
                program.replace(node, program.weight(node.name, _range(program, node), where=node.meta[WHERE]))
                result.matched += 1
                continue
            if not _is_constant(node):
                continue
            if reason := _why_not(program, node):
                result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), reason))
                continue
            expr = _expression(program, node)
            first = next(n for n in node.all_input_nodes)
            weight = program.weight(f"{first.target}_{_short(node)}", expr, where=node.meta[WHERE])
            program.replace(node, weight)
            result.matched += 1
        return result


def transposed(expr: WeightExpr) -> WeightExpr:
    """Returns the transpose of a matrix ``expr``. The transpose of a transpose is the original expression."""
    return expr.base if isinstance(expr, Transpose) else Transpose(expr)


def _is_constant(node: Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
        and bool(node.all_input_nodes)
        and all(n.op == "get_attr" for n in node.all_input_nodes)
        and bool(node.users)
    )


def _is_fixed(program: Program, node: Node) -> bool:
    return bool(node.users) and not node.all_input_nodes and all(s.is_Integer for s in program.shape(node))


def _range(program: Program, node: Node) -> Source:
    value, call = program.value(node), node.target
    assert isinstance(call, torch._ops.OpOverload)
    args, kwargs = node.args, {k: v for k, v in node.kwargs.items() if k == "dtype"}

    def read() -> torch.Tensor:
        value: torch.Tensor = call(*args, **kwargs)
        return value

    return Source(f"{COMPUTED}{node.name}", tuple(value.shape), value.dtype, read)


def _why_not(program: Program, node: Node) -> str | None:
    if not isinstance(node.meta["val"], torch.Tensor):
        return "has several results, or none that is a tensor"
    if any(isinstance(value, Node) for value in node.kwargs.values()):
        return "a weight is given by keyword"
    if any(not s.is_Integer for s in program.shape(node)):
        return "its size is symbolic"
    if program.value(node).numel() > sum(program.value(n).numel() for n in node.all_input_nodes):
        return "its result is larger than the weights it is made from"
    return None


def _short(node: Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return str(node.target._schema.name).removeprefix("aten::").strip("_")


def _expression(program: Program, node: Node) -> WeightExpr:
    if node.target in _SPECIAL and (special := _SPECIAL[node.target](program, node)) is not None:
        return special
    assert isinstance(node.target, torch._ops.OpOverload)
    val = program.value(node)
    kwargs = tuple(sorted(node.kwargs.items()))
    return Apply(node.target, tuple(_argument(program, a) for a in node.args), kwargs, tuple(val.shape), val.dtype)


def _argument(program: Program, value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(_argument(program, v) for v in value)
    return program.weight_of(value) or value


def _base(program: Program, node: Node) -> WeightExpr:
    expr = program.weight_of(node.args[0])
    assert expr is not None
    return expr


def _transpose(program: Program, node: Node) -> WeightExpr | None:
    base = _base(program, node)
    order = dimension_order(bound_arguments(node), len(base.shape))
    if order == [1, 0]:
        return transposed(base)
    first, *_, last = [i for i, axis in enumerate(order) if axis != i] or [0]
    if first == last or order != _exchanged(len(order), first, last):
        return None
    if isinstance(base, SwapAxes) and (base.first, base.second) == (first, last):
        return base.base  # a stack of experts that is read as [E, K, N], and multiplied as [E, N, K]
    return SwapAxes(base, first, last)


def _exchanged(rank: int, first: int, second: int) -> list[int]:
    order = list(range(rank))
    order[first], order[second] = second, first
    return order


def _slice(program: Program, node: Node) -> WeightExpr | None:
    bounds = slice_bounds(program, node)
    if bounds is None or bounds[2] == bounds[3]:
        return None
    return _sliced(_base(program, node), *bounds[1:])


def _sliced(base: WeightExpr, dim: int, start: int, stop: int, step: int) -> WeightExpr | None:
    if isinstance(base, SwapAxes):
        inner = _sliced(base.base, base.axis_of_base(dim), start, stop, step)
        return None if inner is None else SwapAxes(inner, base.first, base.second)
    if step == 1:
        return Slice(base, dim, start, stop)
    # Rows of stacked experts that alternate, as gates and ups do. Of a matrix each row would be a part of its own.
    return Chosen(base, dim, tuple(range(start, stop, step))) if len(base.shape) == 3 and dim == 1 else None


def _concat(program: Program, node: Node) -> WeightExpr | None:
    parts = [program.weight_of(n) for n in node.args[0]]  # type: ignore[union-attr]
    exprs = tuple(p for p in parts if p is not None)
    if len(exprs) != len(parts) or len({e.dtype for e in exprs}) != 1:
        return None
    dim = bound_arguments(node)["dim"] % len(exprs[0].shape)
    swapped = [e for e in exprs if isinstance(e, SwapAxes)]
    if len(swapped) == len(exprs) and len({(e.first, e.second) for e in swapped}) == 1:
        inner = Concat(tuple(e.base for e in swapped), swapped[0].axis_of_base(dim))
        return SwapAxes(inner, swapped[0].first, swapped[0].second)
    return Concat(exprs, dim)


def _cast(program: Program, node: Node) -> WeightExpr | None:
    return Cast(_base(program, node), program.value(node).dtype)


def _same(program: Program, node: Node) -> WeightExpr | None:
    base = _base(program, node)
    return base if tuple(program.value(node).shape) == base.shape else None


_SPECIAL: dict[object, Callable[[Program, Node], WeightExpr | None]] = {
    **dict.fromkeys(ops_of("permute"), _transpose),
    aten.slice.Tensor: _slice,
    aten.cat.default: _concat,
    aten._to_copy.default: _cast,
    **dict.fromkeys((*RESHAPES, aten.clone.default, aten.alias.default), _same),
}
