"""Emits the ops of routers: softmax, top-k, gather and scatter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.aten_ops import of_each

from .graph import GraphBuilder, Handler, Value


def _softmax(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    rank = node.meta["val"].dim()
    if not b.expressions(node)[a["dim"]].is_Integer:
        raise b.unsupported("the onnx target has no softmax over tokens")
    return b.op("Softmax", b.cast(a["self"], torch.float32), axis=a["dim"] % rank - rank)


def _top_k(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    """Emits the k largest values in descending order. Among equal values the lower index comes first."""
    source = a["self"]
    axis = a["dim"] % source.meta["val"].dim()
    inputs = (b.value(source), b.integers(a["k"]))
    return b.ops("TopK", inputs, 2, axis=axis, largest=int(a["largest"]), sorted=1)


def _max(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
    """Emits the largest value along a dimension, and its first index."""
    source = a["self"]
    axis = a["dim"] % source.meta["val"].dim()
    results = b.ops("TopK", (b.value(source), b.integers(1)), 2, axis=axis)
    return results if a["keepdim"] else tuple(b.op("Squeeze", name, b.integers(axis)) for name in results)


def _gather(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    return b.op("GatherElements", b.value(a["self"]), b.value(a["index"]), axis=a["dim"])


def _scatter(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> str:
    index = b.value(a["index"])
    updates = b.op("Expand", b.number(a["value"], node.meta["val"].dtype), b.op("Shape", index))
    return b.op("ScatterElements", b.value(a["self"]), index, updates, axis=a["dim"])


HANDLERS: Mapping[Any, Handler] = of_each(
    {"softmax": _softmax, "topk": _top_k, "max": _max, "gather": _gather, "scatter": _scatter}
)
