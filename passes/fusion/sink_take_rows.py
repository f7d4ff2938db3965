"""Moves ``ew.take_rows``, which selects the sampled rows, up to just after the last op that mixes tokens.

The ops after that compute nothing but logits, so they then compute only the sampled rows.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import sympy
import torch
from torch.fx.node import Argument, Node, map_arg

from enginewright.passes.framework.aten_ops import dimension_order, dims_of, ops_of
from enginewright.passes.framework.base import Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.views import RESHAPES, size_arguments

from ..ir.program import Program
from ..ir.provenance import WHERE, join_where

aten, ew = torch.ops.aten, torch.ops.ew

_EW = frozenset(
    {ew.linear.default, ew.rms_norm.default, ew.layer_norm.default, ew.gated_activation.default, ew.moe.default}
)
_ELEMENTWISE = frozenset(
    {
        *ops_of("add", "sub", "mul", "div", "pow", "maximum", "minimum", "where", "gt", "ge", "lt", "le"),
        *ops_of("neg", "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "erf", "logical_not", "zeros_like"),
        *ops_of("masked_fill", "silu", "gelu", "relu", "sigmoid", "tanh"),
        *(aten.clamp.default, aten._to_copy.default, aten.clone.default),
    }
)
_SEVERAL_RESULTS = (aten.topk.default, aten.max.dim)
"""Ops with several results, of which ``operator.getitem`` selects one."""
_OF_OTHER_DIMENSIONS = frozenset(
    {
        *(aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.squeeze.dims, aten.cat.default),
        *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.softmax.int, aten._softmax.default),
        *(aten.gather.default, aten.scatter.value, *_SEVERAL_RESULTS),
    }
)
"""Ops that don't mix tokens if their ``dim`` isn't dimension 0."""
_ROW_BY_ROW = (aten.cat.default, aten.gather.default, aten.scatter.value)
"""Ops in which a row of the result depends on the same row of every tensor argument. So every argument must have a row
for each token.
"""


class SinkTakeRows(Pass):
    """Moves ``ew.take_rows`` before ops that don't mix tokens, unless another call needs the op's result for all
    tokens.
    """

    name = "sink_take_rows"

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        while moved := sum(_sink(program, node) for node in program.nodes_of(ew.take_rows.default)):
            result.matched += moved
        for node in program.nodes_of(ew.take_rows.default):
            reason = _why_not(program, node)
            assert reason is not None
            result.rejected.append(Rejection(node.name, join_where(node.meta[WHERE]), reason))
        return result


def _why_not(program: Program, take: Node) -> str | None:
    """Returns the reason why a take_rows can't move before the op that computes its argument; None if it can."""
    value, rows = _arguments(take)
    if value.op != "call_function" or not isinstance(value.meta["val"], torch.Tensor):
        return f"it takes rows of {value.name}"
    if not _is_token_local(program, value):
        return f"{value.target} mixes tokens, or makes them"
    users = [user for one in (_results(value) or [value]) for user in one.users]
    if any(user.target is not ew.take_rows.default or _arguments(user)[1] is not rows for user in users):
        return f"{value.name} is needed for all tokens"
    return None


def _results(value: Node) -> list[Node]:
    """Returns the getitem calls of an op with several results if ``value`` is one of them; otherwise []."""
    made_by = value.args[0] if value.target is operator.getitem else None
    return list(made_by.users) if isinstance(made_by, Node) and made_by.target in _SEVERAL_RESULTS else []


def _sink(program: Program, take: Node) -> bool:
    if not take.users or _why_not(program, take) is not None:
        return False
    value, rows = _arguments(take)
    tokens = program.shape(value)[0]
    source = value.args[0] if _results(value) else value
    assert isinstance(source, Node)
    rows_of = {a: _take(program, a, rows, take) for a in _token_arguments(program, source, tokens)}
    with program.inserting_before(take):
        new = _rebuild(program, source, rows_of)
        if source is not value:  # an equal call for each result; merging common subexpressions leaves one
            new = program.call(operator.getitem, new, value.args[1], where=value.meta[WHERE])
    for user in list(value.users):
        program.replace(user, new)
    program.graph.erase_node(value)
    if source is not value and not source.users:
        program.graph.erase_node(source)
    return True


def _take(program: Program, value: Node, rows: Node, like: Node) -> Node:
    """Returns the take_rows of ``value`` by ``rows`` if there is one; otherwise adds it directly after ``value``.

    A new one has the module paths of ``like``.
    """
    for user in value.users:
        if user.target is ew.take_rows.default and _arguments(user)[1] is rows:
            return user
    with program.inserting_before(value.next):
        return program.call(ew.take_rows.default, value, rows, where=like.meta[WHERE])


def _arguments(take: Node) -> tuple[Node, Node]:
    value, rows = take.args
    assert isinstance(value, Node) and isinstance(rows, Node)
    return value, rows


def _is_token_local(program: Program, node: Node) -> bool:
    """Returns True if a row of a node's result depends only on the same row of its arguments.

    The op must also be able to compute the result for some of the rows.
    """
    shape = program.shape(node)
    node = node.all_input_nodes[0] if _results(node) else node
    if not shape or not _token_arguments(program, node, shape[0]):
        return False
    arguments = bound_arguments(node)
    if node.target in _EW:
        return len(shape) > 1
    if node.target in _ELEMENTWISE:
        return all(len(program.shape(n)) == len(shape) for n in _token_arguments(program, node, shape[0]))
    if node.target in _ROW_BY_ROW and len(_token_arguments(program, node, shape[0])) < len(node.all_input_nodes):
        return False
    first = node.all_input_nodes[0]
    rank = len(program.shape(first))
    if node.target in _OF_OTHER_DIMENSIONS:
        dims = dims_of(arguments, rank)
        return bool(dims) and 0 not in dims
    if node.target in (aten.permute.default, aten.transpose.int):
        return dimension_order(arguments, rank)[0] == 0
    if node.target is aten.unsqueeze.default:
        return bool(arguments["dim"] % (rank + 1) != 0)
    if node.target in RESHAPES or node.target is aten.expand.default:
        return size_arguments(shape) is not None
    return False


def _token_arguments(program: Program, node: Node, tokens: sympy.Expr) -> list[Node]:
    """Returns the arguments of a call with one row for each token: those whose first dimension has the size
    ``tokens``.
    """
    if tokens.is_Integer:
        return []
    values = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
    return [n for n in values if (shape := program.shape(n)) and shape[0] == tokens]


def _rebuild(program: Program, node: Node, taken: Mapping[Node, Node]) -> Node:
    args: list[Argument] = [map_arg(a, lambda n: taken.get(n, n)) for a in node.args]
    kwargs = {k: map_arg(v, lambda n: taken.get(n, n)) for k, v in node.kwargs.items()}
    if node.target in RESHAPES or node.target is aten.expand.default:
        # The sizes may name T; -1 stands for the one that is symbolic (a view) or stays (an expand).
        args[1] = size_arguments(program.shape(node))
    assert callable(node.target)
    return program.call(node.target, *args, where=node.meta[WHERE], **kwargs)
