"""Graphs in which values can have the layout [B, S, X], by request, instead of the program's [T, X].

GroupQueryAttention reads and writes values by request. Products, norms and other ops along the last dimension work in
both layouts, so nothing needs a reshape between attentions. Other ops get [N, X], as in a standard file.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch.fx.node import Node

from enginewright.passes.framework.views import RESHAPES
from enginewright.passes.ir.program import Program, has_tensors

from ..steps.linear_io import INPUT_IDS
from . import ops_elementwise, ops_ew, ops_quantized, ops_views
from .graph import GraphBuilder, Handler, Value
from .weights import ExternalWeights

aten, ew = torch.ops.aten, torch.ops.ew

_HANDLERS: Mapping[Any, Handler] = {
    **ops_elementwise.ELEMENTWISE,
    **ops_ew.HANDLERS,
    **ops_quantized.HANDLERS,
    **ops_views.HANDLERS,
}
_TABLES = (ew.embedding.default, ew.quantized_embedding.default)
_ALONG_LAST = (
    ew.linear.default,
    ew.quantize_activation.default,
    ew.quantized_linear.default,
    ew.rms_norm.default,
    ew.layer_norm.default,
    ew.add_rms_norm.default,
    ew.add_layer_norm.default,
    ew.gated_activation.default,
    aten.slice.Tensor,
)


class LayoutBuilder(GraphBuilder):
    """A builder of graphs in which values may have the layout [B, S, X].

    Args:
        program, weights: as for a standard file.

    Attributes:
        by_request: the calls whose results have the layout [B, S, X].
    """

    def __init__(self, program: Program, weights: ExternalWeights) -> None:
        super().__init__(program, weights)
        self.by_request: set[Node] = set()
        self._as_it_lies = False
        self._reshapes: dict[str, onnx.NodeProto] = {}
        self.overrides = {
            **dict.fromkeys(_TABLES, self.row_of_table),
            **{target: self.along_last(_HANDLERS[target]) for target in (*ops_elementwise.ELEMENTWISE, *_ALONG_LAST)},
            **dict.fromkeys(RESHAPES, self.view),
            operator.getitem: self._getitem,
        }

    # ---- values

    def value(self, node: object) -> str:
        """Returns a value's tensor as [N, X]; in the context ``taken_as_it_lies`` in the layout that it has."""
        name = super().value(node)
        if not isinstance(node, Node) or node not in self.by_request or self._as_it_lies:
            return name
        width = int(self.expressions(node)[-1])
        return self.once(("rows", name), lambda: self.reshape(name, -1, width))

    def lie_by_request(self, node: Node, name: str) -> str:
        """Records that the tensor ``name`` [B, S, X] is the result of a call, [T, X] in the program; returns the
        name.
        """
        self.by_request.add(node)
        return name

    def in_requests(self, x: str, width: int) -> str:
        """Reshapes a tensor of N rows to [B, S, width], and returns it."""
        sizes = self.once("B, S", lambda: self.op("Shape", INPUT_IDS))
        shape = self.once(("by request", width), lambda: self.op("Concat", sizes, self.integers(width), axis=0))
        return self.op("Reshape", x, shape)

    @contextmanager
    def taken_as_it_lies(self) -> Iterator[None]:
        """A context in which ``value`` returns tensors in the layout that they have."""
        self._as_it_lies = True
        try:
            yield
        finally:
            self._as_it_lies = False

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Adds an operator and returns its result. A reshape of a reshape reads the original tensor."""
        if kind == "Reshape" and name is None:
            source = self._reshapes.get(inputs[0])
            if source is not None and self._says_all(inputs[1]):
                inputs = (source.input[0], inputs[1])
        result = super().op(kind, *inputs, name=name, **attributes)
        if kind == "Reshape":
            self._reshapes[result] = self.nodes[-1]
        return result

    def _says_all(self, shape: str) -> bool:
        """Returns True if no size of a constant shape is 0, which would copy a size of the input. ``shape`` is the
        tensor's name.
        """
        tensor = self.initializers.get(shape)
        return tensor is None or bool(np.all(numpy_helper.to_array(tensor)))

    # ---- calls

    def along_last(self, handler: Handler) -> Handler:
        """Returns a handler that keeps the layout by request if all inputs other than weights have it."""

        def emit(b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
            if not self._can_keep(node, a):
                return handler(b, node, a)
            with self.taken_as_it_lies():
                result = handler(b, node, a)
            self.by_request.add(node)
            return result

        return emit

    def _can_keep(self, node: Node, a: Mapping[str, Any]) -> bool:
        inputs = [n for n in node.all_input_nodes if has_tensors(n)]
        if not any(n in self.by_request for n in inputs):
            return False
        weights = [n for n in inputs if n.op == "get_attr"]
        if any(n not in self.by_request for n in inputs if n.op != "get_attr"):
            return False
        if node.target is ew.linear.default:  # a table that rows are taken of is multiplied by an operator of matrices
            return all(user.target is ew.linear.default for user in a["weight"].users)
        if node.target is ew.quantized_linear.default:
            return a["weight_offsets"] is None
        if node.target is aten.slice.Tensor:
            return a["dim"] in (-1, 1) and all(isinstance(a[name], int) for name in ("start", "end"))
        return node.target in _ALONG_LAST or all(n.meta["val"].dim() <= 1 for n in weights)

    def row_of_table(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        """Emits a lookup of rows in a table; the result has the layout by request."""
        row = _HANDLERS[node.target](b, node, a)
        assert isinstance(row, str)
        return self.lie_by_request(node, self.in_requests(row, int(self.expressions(node)[-1])))

    def view(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        """Emits a reshape, whose input may have either layout."""
        with self.taken_as_it_lies():
            return _HANDLERS[node.target](b, node, a)

    def _getitem(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        if a["0"] in self.by_request:
            self.by_request.add(node)
        return _HANDLERS[operator.getitem](b, node, a)
