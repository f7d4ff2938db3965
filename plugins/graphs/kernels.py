"""The kernels variant: the contrib variant, with products computed by the cpu target's kernels as onnxruntime
operators.

The library of ``plugins/onnx/kernels`` has one operator, ``Linear`` of the domain ``enginewright``, for weights of all
formats. Weights are in panels as in the cpu target, and activations are rounded as the recipe says. Products of
experts, and products with a computed weight, are as in the contrib variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import weight_packings
from enginewright.passes.quantization.round_weights import is_dequantized
from enginewright.runtime.shared.weight_formats import FORMAT_OF

from . import ops_ew
from .contrib import ContribBuilder
from .contrib_layout import LayoutBuilder
from .graph import GraphBuilder, Handler, Value
from .weights import ExternalWeights

ew = torch.ops.ew

DOMAIN = "enginewright"

_F32 = torch.float32


class PanelProducts:
    """Emits the products of a graph as calls of our operator. ``builder`` is the builder of the graph."""

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        self._packings = weight_packings(builder.program)
        self.handlers: Mapping[Any, Handler] = {
            ew.linear.default: self._linear,
            ew.quantized_linear.default: self._quantized_linear,
        }

    def _linear(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        weight, scales, group = a["weight"], None, 0
        if is_dequantized(weight):
            stored = bound_arguments(weight)
            weight, scales, group = stored["values"], stored["scales"], stored["group_size"]
        elif weight.op != "get_attr":
            return ops_ew.HANDLERS[ew.linear.default](b, node, a)
        return self._product(node, a["x"], (weight, scales, None), a, group, 0)

    def _quantized_linear(self, b: GraphBuilder, node: Node, a: Mapping[str, Any]) -> Value:
        stored = a["weight"], a["weight_scales"], a["weight_offsets"]
        return self._product(node, a["values"], stored, a, a["weight_group"], a["activation_group"])

    def _product(
        self,
        node: Node,
        x: Node,
        stored: tuple[Node, Node | None, Node | None],
        a: Mapping[str, Any],
        weight_group: int,
        activation_group: int,
    ) -> Value:
        """Emits a product of x with a weight. The operator itself rounds x in groups of ``activation_group``.

        ``stored`` has the weight, its scales and its offsets; ``a`` has the call's arguments by name.
        """
        b, residual = self._builder, a["residual"]
        by_request = b.by_request if isinstance(b, LayoutBuilder) else ()
        lies = x in by_request and (residual is None or residual in by_request)
        with b.taken_as_it_lies() if lies and isinstance(b, LayoutBuilder) else nullcontext():
            inputs = [b.value(x), *(self._panels(part) for part in stored)]
            inputs.append("" if a["bias"] is None else b.cast(a["bias"], _F32))
            added = None if residual is None else b.cast(residual, _F32)
        while not inputs[-1]:
            inputs.pop()
        packing = self._packings[str(stored[0].target)]
        n, k = (int(size) for size in b.expressions(stored[0]))
        y = b.op(
            "Linear",
            *inputs,
            domain=DOMAIN,
            n=n,
            k=k,
            storage=FORMAT_OF[packing.dtype],
            sparse=int(packing.layout == "sparse32"),
            weight_group=weight_group,
            activation_group=activation_group,
            activation=a["activation"],
        )
        y = y if added is None else b.op("Add", y, added)
        return b.lie_by_request(node, y) if lies and isinstance(b, LayoutBuilder) else y

    def _panels(self, weight: Node | None) -> str:
        """Adds a weight in the layout of the kernels, and returns its name; "" for None."""
        if weight is None:
            return ""
        b, name = self._builder, str(weight.target)
        tensor = b.weights.add_panels(name, b.program.weights[name], self._packings[name])
        b.initializers[tensor.name] = tensor
        return str(tensor.name)


class KernelsBuilder(ContribBuilder):
    """Builds the kernels variant. The arguments are those of ``ContribBuilder``."""

    def __init__(self, program: Program, weights: ExternalWeights, context: int) -> None:
        super().__init__(program, weights, context)
        self.overrides = {**self.overrides, **PanelProducts(self).handlers}
