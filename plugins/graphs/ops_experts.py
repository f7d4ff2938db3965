"""Emits experts. All of them are computed for every token, because standard operators have no product of groups of
rows.

In the program, the (token, expert) pairs are sorted by expert, [N*k, ..]. Here each token goes through all E experts,
and the results of experts that it didn't choose get the weight zero. Between ``ew.take_rows`` and
``ew.combine_experts`` a value is *spread*: [E, N, ..] (the rows of the tokens themselves are [1, N, ..]). That is E/k
times the computation, and reads no more weights than a large batch does.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import ops_of
from enginewright.passes.framework.match import bound_arguments

from .graph import GraphBuilder, Handler, Value
from .ops_dequantize import stored_weight
from .ops_elementwise import ELEMENTWISE
from .ops_ew import finish

aten, ew = torch.ops.aten, torch.ops.ew

_F32 = torch.float32
_SAME = frozenset({*ELEMENTWISE, ew.gated_activation.default, operator.getitem, aten.alias.default, aten.clone.default})
_ALONG_LAST = frozenset(ops_of("slice", "split"))
"""Ops that can be emitted for a spread value if they work along the last dimension, counted from the end."""


def check_spread(b: GraphBuilder, node: Node, arguments: Mapping[str, Any]) -> None:
    """Marks a call as spread if its inputs are. Raises UnsupportedModelError if its op can't be emitted for spread
    values.
    """
    values = [n for n in node.all_input_nodes if n in b.spread]
    if not values or node.target in _TAKES_SPREAD:
        return
    others = [n for n in node.all_input_nodes if n not in b.spread and isinstance(n.meta.get("val"), torch.Tensor)]
    beside = all(n.op == "get_attr" and n.meta["val"].dim() <= 1 for n in others)
    last = node.target in _ALONG_LAST and arguments.get("dim", 0) in (-1, 1) and values[0].meta["val"].dim() == 2
    if not beside or not (last or node.target in _SAME):
        raise b.unsupported("the onnx target doesn't know it between the products of experts")
    b.spread.add(node)


def _routed(node: object, index: int) -> Node | None:
    """Returns the ``ew.route_experts`` call of which ``node`` is the result with this index; None if it isn't one."""
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != index:
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and source.target is ew.route_experts.default else None


def _route_experts(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    """Emits nothing: nothing is sorted, and readers of the results use the call's arguments."""
    return ("", "", "")


def _take_rows(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    if _routed(a["rows"], 1) is None:
        return b.op("Gather", b.value(a["x"]), b.value(a["rows"]), axis=0)
    b.spread.add(node)
    return b.op("Unsqueeze", b.cast(a["x"], _F32), b.integers(0))  # [1, N, H]


def grouped_product(
    b: GraphBuilder, node: Node, x: Any, weight: str, a: Mapping[str, Any], offset: str | None = None
) -> str:
    """Emits a spread x [.., N, K] times the weights [E, K, N'] of all experts, with bias and activation; returns [E, N,
    N'].

    ``offset``, a tensor of the result's shape, is added to the product; None adds nothing.
    """
    if x not in b.spread:
        raise b.unsupported("its rows are not those of tokens' choices")
    b.spread.add(node)
    y = b.op("MatMul", b.cast(x, _F32), weight)
    if offset is not None:
        y = b.op("Add", y, offset)
    if a["bias"] is not None:
        y = b.op("Add", y, b.op("Unsqueeze", b.cast(a["bias"], _F32), b.integers(1)))
    return finish(b, y, {**a, "bias": None})


def _grouped_linear(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return grouped_product(b, node, a["x"], stored_weight(b, a["weight"], "columns"), a)


def _combine_experts(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    """Emits the sum of [E, N, H] over experts, each multiplied by the token's weight of the expert.

    If a token has chosen an expert several times, the weights are added.
    """
    routed = _routed(a["order"], 0)
    if routed is None or a["y"] not in b.spread:
        raise b.unsupported("its rows are not those of tokens' choices")
    routing = bound_arguments(routed)
    chosen = b.op(
        "OneHot",
        b.value(routing["expert_ids"]),
        b.constant(np.asarray(routing["experts"], np.int64)),
        b.constant(np.asarray([0, 1], np.float32)),
        axis=-1,
    )  # [N, k, E]
    weights = b.op("Mul", chosen, b.op("Unsqueeze", b.cast(a["expert_weights"], _F32), b.integers(-1)))
    by_expert = b.op("Transpose", b.op("ReduceSum", weights, b.integers(1), keepdims=0), perm=[1, 0])  # [E, N]
    weighted = b.op("Mul", b.value(a["y"]), b.op("Unsqueeze", by_expert, b.integers(-1)))
    return b.op("ReduceSum", weighted, b.integers(0), keepdims=0)


PRODUCTS = (ew.grouped_linear.default,)

_TAKES_SPREAD = frozenset(
    {ew.grouped_linear.default, ew.quantized_grouped_linear.default, ew.combine_experts.default}
    | {ew.quantize_activation.default}
)

HANDLERS: Mapping[Any, Handler] = {
    ew.route_experts.default: _route_experts,
    ew.take_rows.default: _take_rows,
    ew.grouped_linear.default: _grouped_linear,
    ew.combine_experts.default: _combine_experts,
}
