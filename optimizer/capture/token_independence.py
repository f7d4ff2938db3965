"""Proves that no op but attention lets one token of a step look at another.

Tokens of a step belong to different requests, and how many there are is chance. So every tensor of a program has the
token axis T at most once, whole and in order, and no op works along it. An op that no rule here knows is tried out: on
two sequences packed together, and on each by itself. What can't be shown to keep tokens apart is refused: convolutions
and recurrences over tokens, shifts, norms over the sequence, positions counted instead of given.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program, named_symbol
from enginewright.passes.recurrence.lower_recurrence import FORMS
from enginewright.runtime.shared.errors import UnsupportedModelError

from .packed_and_apart import same_packed_and_apart

aten, ew = torch.ops.aten, torch.ops.ew

_T = named_symbol("T")

_ATTENTION = (ew.attention.default, ew.take_rows.default, ew.pool.default, *FORMS)

# Defined for each token by itself: a row of the result is made from the same row of the first three arguments.
_TOKEN_BY_TOKEN = (ew.moe.default,)

# Results don't depend on which token is where.
_FACTORIES = (
    *(aten.full, aten.ones, aten.zeros, aten.empty, aten.full_like, aten.ones_like, aten.zeros_like),
    *(aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros, aten.empty_like),
)

# Only move axes about: whatever they do to T shows in the shape.
_AXIS_MOVES = (aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.expand, aten.t, aten.numpy_T)

# Copies, and products that contract the last axis of the first argument with a weight or with an axis that isn't T: had
# it been T, the result would lack T, or have it twice.
_COPIES = (aten.clone, aten.alias, aten._to_copy, aten.detach, aten.dropout)
_ROW_BY_ROW = (*_COPIES, aten.embedding, aten.linear, aten.mm, aten.addmm, aten.bmm, aten.matmul)

_VIEWS = (aten.view, aten._unsafe_view, aten.reshape)
_NORMS = (aten.layer_norm, aten.native_layer_norm, aten.rms_norm)


def check_token_independence(program: Program) -> None:
    """Raises UnsupportedModelError, naming op and module, if an op other than attention may look at other tokens."""
    problems: list[tuple[Node, str]] = []
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target in _ATTENTION or not _shapes(program, node):
            continue
        if problem := _problem(program, node):
            problems.append((node, problem))
    if problems:
        # What is done to masks and positions of a layer says less than what the layer does to hidden states.
        node, problem = next((p for p in problems if _is_float(p[0])), problems[0])
        where = ", ".join(w for w in node.meta["where"] if w) or "the model"
        raise UnsupportedModelError(
            f"{where}: {node.target} {problem}, so one token could change another's result outside of attention",
            hint="Only attention, and recurrences that transformers has kernels for, may look at other tokens.",
        )


def _problem(program: Program, node: Node) -> str | None:
    inputs = [a for a in node.all_input_nodes if _shapes(program, a)]
    before = [axis for a in inputs for shape in _shapes(program, a) if (axis := _token_axis(shape)) is not None]
    after = [_token_axis(shape) for shape in _shapes(program, node)]
    if not before and all(axis is None for axis in after):
        return None
    if any(axis is not None and axis < 0 for axis in after):
        return "mixes the token axis with another"
    if _has_rows(program, node) and not _keeps_rows(node):
        return "works on several rows of each token"
    if not isinstance(node.target, torch._ops.OpOverload):
        return None if node.target.__module__ == "_operator" else "is unknown"
    if _computes_with_sizes(node):
        return "computes with the number of tokens"
    if node.target.overloadpacket in _FACTORIES:
        return None
    if before and any(axis is None for axis in after):
        return "has lost the token axis"
    return _problem_of_op(program, node, inputs, before)


def _problem_of_op(program: Program, node: Node, inputs: list[Node], before: list[int]) -> str | None:
    """Returns a phrase about the way in which an op may mix tokens, for an error; None if it doesn't mix them.

    Args:
        program: the op's program.
        node: the op's call, whose results have one token axis each.
        inputs: the tensors among its arguments.
        before: the token axes of those inputs that have one.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    packet = node.target.overloadpacket
    if node.target in _TOKEN_BY_TOKEN:
        return None if before == [0, 0, 0] else "gets tokens in another place"
    if torch.Tag.pointwise in node.target.tags:
        return None if _aligned(program, node, inputs) else "lays tokens beside others"
    if packet in _AXIS_MOVES or packet in _ROW_BY_ROW:
        return None
    if packet in _VIEWS:
        return None if _same_order(program, node, inputs[0]) else "takes tokens apart"
    if packet in _NORMS:
        axes = len(_shapes(program, inputs[0])[0]) - len(node.args[1])  # type: ignore[arg-type]
        return None if before[0] < axes else "normalises over tokens"
    if packet is aten.select_scatter:
        return None if _scatters_beside(program, node) else "lays tokens beside others"
    if packet is aten.index:
        return "picks tokens" if _picks_tokens(program, node) else None
    if packet is aten.slice and not before:
        return "has a row for each token, whichever these are"
    if packet is aten.arange:
        return "counts tokens, whose positions are given"
    return _along_dim(program, node, inputs)


def _picks_tokens(program: Program, node: Node) -> bool:
    """Returns True if x[indices] may mix tokens: an index is along x's token axis, or is itself a tensor over
    tokens.
    """
    x, indices = node.args
    assert isinstance(x, Node) and isinstance(indices, list | tuple)
    axis = _token_axis(_shapes(program, x)[0])
    if axis is None:
        return False
    of_tokens = any(_token_axis(s) is not None for i in indices if isinstance(i, Node) for s in _shapes(program, i))
    return of_tokens or (axis < len(indices) and indices[axis] is not None)


def _computes_with_sizes(node: Node) -> bool:
    """Returns True if an op computes with a size, not only its result's shape."""
    assert isinstance(node.target, torch._ops.OpOverload)
    filled = (aten.full, aten.full_like, aten.new_full)
    if torch.Tag.pointwise not in node.target.tags and node.target.overloadpacket not in filled:
        return False
    return any(isinstance(a, Node) and not isinstance(a.meta["val"], torch.Tensor) for a in node.args)


def _is_float(node: Node) -> bool:
    value = node.meta["val"]
    return any(v.is_floating_point() for v in (value if isinstance(value, list | tuple) else [value]))


def _along_dim(program: Program, node: Node, inputs: list[Node]) -> str | None:
    """Returns a phrase if an op with an argument ``dim`` may work along the token axis; None if it doesn't."""
    arguments = bound_arguments(node)
    dim = arguments.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, list | tuple) else []
    if not dims or not inputs:
        apart = bool(inputs) and same_packed_and_apart(program, node)
        return None if apart else "can't be shown to keep tokens apart"
    shape = _shapes(program, inputs[0])[0]
    axis = _token_axis(shape)
    if axis not in [d % len(shape) for d in dims]:
        axes = {_token_axis(s) for a in inputs for s in _shapes(program, a)} - {None}
        return None if len(axes) <= 1 else "lays tokens beside others"
    # A slice of as many tokens as there are, such as x[-T:], is all of them.
    whole = axis is not None and _shapes(program, node)[0][axis] == shape[axis]
    if node.target is aten.slice.Tensor and whole and arguments.get("step") == 1:
        return None
    return "works along the token axis"


def _aligned(program: Program, node: Node, inputs: list[Node]) -> bool:
    """Returns True if the token axes of all arguments align, counted from the right as in broadcasting."""
    axes = set()
    for one in (*inputs, node):
        for shape in _shapes(program, one):
            axis = _token_axis(shape)
            if axis is not None:
                axes.add(len(shape) - axis)
    return len(axes) == 1


def _same_order(program: Program, node: Node, source: Node) -> bool:
    """Returns True if a view keeps tokens in order: it changes no number of elements before or after the token axis."""
    shapes = (_shapes(program, source)[0], _shapes(program, node)[0])
    outside = [sympy.prod(shape[: _token_axis(shape)]) for shape in shapes]
    return bool(outside[0] == outside[1])


def _token_axis(shape: tuple[sympy.Expr, ...]) -> int | None:
    """Returns the axis of size T, or of a multiple of T (consecutive rows for each token).

    None if no size depends on T, -1 if several do or one isn't a multiple.
    """
    axes = [i for i, size in enumerate(shape) if _T in size.free_symbols]
    if not axes:
        return None
    return axes[0] if len(axes) == 1 and (shape[axes[0]] / _T).is_Integer else -1


def _has_rows(program: Program, node: Node) -> bool:
    """Returns True if an input or output of a node has several rows for each token."""
    shapes = [shape for one in (*node.all_input_nodes, node) for shape in _shapes(program, one)]
    return any(_T in size.free_symbols and size != _T for shape in shapes for size in shape)


def _keeps_rows(node: Node) -> bool:
    """Returns True if a node treats all rows alike, in any order of a token's rows, or only moves whole axes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target.__module__ == "_operator"
    known = (*_AXIS_MOVES, *_ROW_BY_ROW, *_VIEWS, *_NORMS, *_FACTORIES, aten.mean, aten.sum, aten.amax)
    return torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in known


def _scatters_beside(program: Program, node: Node) -> bool:
    """Returns True if ``select_scatter`` writes each token's values to the same token, at one index of another axis."""
    arguments = bound_arguments(node)
    whole, part = (_shapes(program, arguments[name])[0] for name in ("self", "src"))
    axes = _token_axis(whole), _token_axis(part)
    dim = arguments["dim"] % len(whole)
    return None not in axes and dim != axes[0] and axes[1] == axes[0] - (dim < axes[0])


def _shapes(program: Program, node: Node) -> list[tuple[sympy.Expr, ...]]:
    """Returns the shapes of a node's tensors; empty if the node is a size."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [tuple(program.expression(s) for s in v.shape) for v in values if isinstance(v, torch.Tensor)]
