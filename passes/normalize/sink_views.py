"""Moves views that only add, remove or exchange dimensions down to the calls that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import Node, Target, map_arg

from enginewright.passes.framework.aten_ops import dimension_order, dims_of, ops_of
from enginewright.passes.framework.base import Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.views import RESHAPES, last_or, slice_bounds

from ..ir.program import Program, tensor_arguments
from ..ir.provenance import WHERE, join_where
from .layout import Laid, arrange, as_it_is, materialize, reshape

aten, ew = torch.ops.aten, torch.ops.ew

Handler = Callable[["_Sinking", Node], "Laid | None"]


class SinkViews(Pass):
    """Removes the batch dimension of 1 from values, and brings them to the order [T, N, D] where that needs only views.

    A captured graph computes on [1, T, H] and on [1, N, T, D]. This pass visits its calls in order. For each value it
    knows a *base* (a node) and the layout of the value's dimensions in it (``Laid``). unsqueeze, squeeze, select of a
    dimension of 1, transpose and permute only change the layout. An op that treats all dimensions alike is called with
    the bases. Before any other op, its inputs are brought back from their bases to their own layouts by views.

    ``matched`` counts the removed views.
    """

    name = "sink_views"

    def call(self, program: Program, context: PassContext) -> PassResult:
        return _Sinking(program).run()


class _Sinking:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.laid: dict[Node, Laid] = {}
        self.result = PassResult()

    def run(self) -> PassResult:
        for node in list(self.program.graph.nodes):
            if node.op == "call_function":
                self.visit(node)
        output = self.program.output
        with self.program.inserting_before(output):
            output.args = map_arg(output.args, self.remade)
        return self.result

    def visit(self, node: Node) -> None:
        with self.program.inserting_before(node):
            handler = _handler(node)
            laid = handler(self, node) if handler is not None else None
            if laid is not None:
                self.laid[node] = laid
                if node.target in _VIEWS and laid.base is self.laid_of(node.args[0]).base:
                    self.result.matched += 1
                return
            if handler is not None:
                where = join_where(node.meta[WHERE])
                self.result.rejected.append(Rejection(node.name, where, f"{node.target}: no rule for these dimensions"))
            with_views = tensor_arguments(node)
            # Kept in place, not copied: its results may be several values with getitem nodes behind.
            node.args = map_arg(node.args, lambda n: self.remade(n) if n in with_views else n)
            node.kwargs = map_arg(node.kwargs, lambda n: self.remade(n) if n in with_views else n)

    def laid_of(self, node: Any) -> Laid:
        """Returns the layout of a value in its base; the value is its own base if nothing is known."""
        return self.laid[node] if node in self.laid else as_it_is(self.program, node)

    def remade(self, node: Node) -> Node:
        """Returns the value itself, computed from its base by views."""
        return materialize(self.program, self.laid[node]) if node in self.laid else node

    def emit(self, node: Node, *args: Any, **kwargs: Any) -> Node:
        """Returns a call of the op of ``node`` with other arguments; ``node`` itself if they are the same."""
        if args == tuple(node.args) and kwargs == node.kwargs:
            return node
        return self.program.call(node.target, *args, where=node.meta[WHERE], **kwargs)  # type: ignore[arg-type]


def _handler(node: Node) -> Handler | None:
    if node.target in _HANDLERS:
        return _HANDLERS[node.target]
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return _pointwise
    return None


def _dim(value: int, rank: int) -> int:
    return value % rank if rank else 0


def _removed(dims: Sequence[int | None], at: int) -> tuple[int | None, ...]:
    """Returns ``dims`` without entry ``at``, renumbered for a base from which that dimension was removed."""
    gone = dims[at]
    assert gone is not None
    return tuple(d if d is None or d < gone else d - 1 for i, d in enumerate(dims) if i != at)


# ---- views


def _unsqueeze(s: _Sinking, node: Node) -> Laid | None:
    x, dim = s.laid_of(node.args[0]), node.args[1]
    at = _dim(dim, x.rank + 1)  # type: ignore[arg-type]
    return Laid(x.base, (*x.dims[:at], None, *x.dims[at:]))


def _squeeze(s: _Sinking, node: Node) -> Laid | None:
    x = s.laid_of(node.args[0])
    at = dims_of(bound_arguments(node), x.rank)
    if any(x.dims[i] is not None for i in at):
        return None
    return Laid(x.base, tuple(d for i, d in enumerate(x.dims) if i not in at))


def _select(s: _Sinking, node: Node) -> Laid | None:
    x, dim, index = s.laid_of(node.args[0]), node.args[1], node.args[2]
    at = _dim(dim, x.rank)  # type: ignore[arg-type]
    where = x.dims[at]
    if where is None:
        return Laid(x.base, (*x.dims[:at], *x.dims[at + 1 :]))
    return Laid(s.emit(node, x.base, where, index), _removed(x.dims, at))


def _permute(s: _Sinking, node: Node) -> Laid | None:
    x = s.laid_of(node.args[0])
    return Laid(x.base, tuple(x.dims[d] for d in dimension_order(bound_arguments(node), x.rank)))


def _reshape(s: _Sinking, node: Node) -> Laid | None:
    return reshape(s.program, s.laid_of(node.args[0]), s.program.shape(node), node.meta[WHERE])


def _expand(s: _Sinking, node: Node) -> Laid | None:
    """Handles an expand: one that changes nothing is dropped. Repeated dimensions must not exist in the base yet.

    They are added to the base before its last dimension. Returns None for any other expand.
    """
    x = s.laid_of(node.args[0])
    if s.program.shape(node) == s.program.shape(node.args[0]):  # type: ignore[arg-type]
        return x
    old, new = s.program.shape(node.args[0]), s.program.shape(node)  # type: ignore[arg-type]
    if len(old) != len(new) or not x.last_is_last():
        return None
    base, dims = x.base, list(x.dims)
    for at, (before, after) in enumerate(zip(old, new, strict=True)):
        if before == after:
            continue
        if dims[at] is not None or not after.is_Integer:
            return None
        place = s.program.value(base).dim() - 1
        base = s.program.call(aten.unsqueeze.default, base, place, where=node.meta[WHERE])
        sizes = [int(after) if i == place else -1 for i in range(place + 2)]
        base = s.program.call(aten.expand.default, base, sizes, where=node.meta[WHERE])
        dims = [d if d is None or d < place else d + 1 for d in dims]
        dims[at] = place
    return Laid(base, tuple(dims))


# ---- ops that treat dimensions alike


def _pointwise(s: _Sinking, node: Node) -> Laid | None:
    tensors = tensor_arguments(node)
    if not tensors or any(isinstance(a, (list, tuple)) for a in node.args):
        return None
    rank = s.program.value(node).dim()
    values = {n: s.laid_of(n) for n in tensors}
    target = _common_order(list(values.values()), rank)
    arranged = {n: arrange(s.program, v, target, rank, broadcast=True) for n, v in values.items()}
    base = s.emit(node, *map_arg(node.args, arranged.__getitem__), **map_arg(node.kwargs, arranged.__getitem__))
    return Laid(base, tuple(target.index(i) if i in target else None for i in range(rank)))


def _common_order(values: Sequence[Laid], rank: int) -> list[int]:
    """Returns the dimensions of a result of rank ``rank`` that exist in a base of its arguments.

    They have the order of a base with all of them, or ascending order if there is no such base.
    """
    orders = [[i + rank - v.rank for i in v.order] for v in values]
    every = {i for order in orders for i in order}
    return next((order for order in orders if set(order) == every), sorted(every))


def _reduce(s: _Sinking, node: Node) -> Laid | None:
    x, dims = s.laid_of(node.args[0]), node.args[1]
    keep = len(node.args) > 2 and bool(node.args[2])
    if not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    at = _dim(dims[0], x.rank)  # type: ignore[arg-type]
    where = x.dims[at]
    if where is None:
        return None
    base = s.emit(node, x.base, [last_or(where, len(x.real))], *node.args[2:], **node.kwargs)
    return Laid(base, x.dims if keep else _removed(x.dims, at))


def _slice(s: _Sinking, node: Node) -> Laid | None:
    bounds = slice_bounds(s.program, node)
    if bounds is None:
        return None
    source, dim, start, stop, step = bounds
    x = s.laid_of(source)
    where = x.dims[dim]
    if where is None:
        return x if (start, stop) == (0, 1) else None
    extra = (step,) if step != 1 else ()
    return Laid(s.emit(node, x.base, last_or(where, len(x.real)), start, stop, *extra), x.dims)


def _cat(s: _Sinking, node: Node) -> Laid | None:
    parts = [s.laid_of(n) for n in node.args[0]]  # type: ignore[union-attr]
    rank = parts[0].rank
    at = _dim(bound_arguments(node)["dim"], rank)
    if any(p.rank != rank or p.dims[at] is None for p in parts):
        return None
    target = _common_order(parts, rank)
    arranged = [arrange(s.program, p, target, rank, broadcast=False) for p in parts]
    base = s.emit(node, arranged, last_or(target.index(at), len(target)))
    return Laid(base, tuple(target.index(i) if i in target else None for i in range(rank)))


def _stack(s: _Sinking, node: Node) -> Laid | None:
    """Handles a stack along a new last dimension; returns None for another."""
    parts = [s.laid_of(n) for n in node.args[0]]  # type: ignore[union-attr]
    rank = parts[0].rank
    if _dim(bound_arguments(node)["dim"], rank + 1) != rank:
        return None
    target = _common_order(parts, rank)
    arranged = [arrange(s.program, p, target, rank, broadcast=False) for p in parts]
    dims = tuple(target.index(i) if i in target else None for i in range(rank))
    return Laid(s.emit(node, arranged, -1), (*dims, len(target)))


def _repeat_interleave(s: _Sinking, node: Node) -> Laid | None:
    x = s.laid_of(node.args[0])
    if len(node.args) < 3 or node.kwargs:
        return None
    where = x.dims[_dim(node.args[2], x.rank)]  # type: ignore[arg-type]
    if where is None:
        return None
    return Laid(s.emit(node, x.base, node.args[1], last_or(where, len(x.real))), x.dims)


def _over_last(s: _Sinking, node: Node) -> Laid | None:
    """Handles ops on the last dimension of their first argument: linear, norms, gated activations.

    Returns None if that isn't the last dimension of the base.
    """
    x = s.laid_of(node.args[0])
    if not x.last_is_last():
        return None
    others = [map_arg(a, s.remade) for a in node.args[1:]]
    return Laid(s.emit(node, x.base, *others, **node.kwargs), x.dims)


def _layer_norm(s: _Sinking, node: Node) -> Laid | None:
    return _over_last(s, node) if len(node.args[1]) == 1 else None  # type: ignore[arg-type]


def _matmul(s: _Sinking, node: Node) -> Laid | None:
    """Handles x [.., K] times a matrix [K, N]."""
    other = node.args[1]
    if not isinstance(other, Node) or other in s.laid or s.program.value(other).dim() != 2:
        return None
    return _over_last(s, node)


def _softmax(s: _Sinking, node: Node) -> Laid | None:
    rank = s.program.value(node).dim()
    return _over_last(s, node) if _dim(node.args[1], rank) == rank - 1 else None  # type: ignore[arg-type]


def _embedding(s: _Sinking, node: Node) -> Laid | None:
    ids = s.laid_of(node.args[1])
    base = s.emit(node, node.args[0], ids.base, *node.args[2:], **node.kwargs)
    return Laid(base, (*ids.dims, len(ids.real)))


def _index(s: _Sinking, node: Node) -> Laid | None:
    """Handles a table's rows, selected by one tensor of indices; returns None for other indexing."""
    table, indices = node.args[:2]
    if len(indices) != 1 or indices[0] is None or table in s.laid or s.program.value(table).dim() != 2:  # type: ignore[arg-type,index]
        return None
    if s.program.value(indices[0]).dtype not in (torch.int32, torch.int64):  # type: ignore[arg-type,index]
        return None
    ids = s.laid_of(indices[0])  # type: ignore[index]
    return Laid(s.emit(node, table, [ids.base]), (*ids.dims, len(ids.real)))


_VIEWS: dict[Target, Handler] = {
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.select.int: _select,
    **dict.fromkeys(ops_of("permute"), _permute),
    aten.expand.default: _expand,
    **dict.fromkeys(RESHAPES, _reshape),
}

_HANDLERS: dict[Target, Handler] = {
    **_VIEWS,
    **dict.fromkeys((aten._to_copy.default, aten.clone.default, aten.alias.default), _pointwise),
    **dict.fromkeys((aten.mean.dim, aten.sum.dim_IntList, aten.amax.default), _reduce),
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.linear.default: _over_last,
    aten.matmul.default: _matmul,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _layer_norm,
    aten.softmax.int: _softmax,
    ew.linear.default: _over_last,
    ew.rms_norm.default: _over_last,
    ew.layer_norm.default: _over_last,
    ew.gated_activation.default: _over_last,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
}
