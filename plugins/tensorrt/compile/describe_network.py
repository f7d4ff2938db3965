"""Converts a Program to a ``Network``: the onnx target's operators, with attention in the paged form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program, has_tensors
from enginewright.passes.ir.provenance import WHERE, join_where
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.step_schema import (
    ATTENTION_PORTS,
    IDS,
    KV_LEN,
    POSITIONS,
    Q_START,
    ROWS,
    port_names,
    port_of,
)

from ...graphs.emit_model import emit_call, model_of
from ...graphs.graph import GraphBuilder, Value
from ...graphs.weights import ExternalWeights
from ...steps.paged_section import (
    LOGITS,
    cache_tensors,
)
from .network import (
    KV_WRITE,
    PAGED_ATTENTION,
    QUANTIZED_KV_WRITE,
    QUANTIZED_PAGED_ATTENTION,
    Attribute,
    Call,
    Constant,
    Dtype,
    FloatDtype,
    Network,
    NetworkInput,
    Weight,
)

ew = torch.ops.ew

_DTYPES: Mapping[int, Dtype] = {DTYPES[name].onnx: name for name in get_args(Dtype)}


class PagedBuilder(GraphBuilder):
    """Builds the graph of a step in the paged form. Its inputs are the program's, under the same names."""

    def __init__(self, program: Program, weights: ExternalWeights, floats: FloatDtype) -> None:
        super().__init__(program, weights, floats)
        self.fixed: dict[str, dict[str, Attribute]] = {}  # of our own calls: ONNX's floats have 32 bits
        self.caches: dict[str, tuple[str, ...]] = {}  # by what a write gives for keys, or for values: all it gives
        groups = [group.stored_as(floats) for group in program.cache_groups]
        self.groups = {layer: group for group in groups for layer in group.layers}
        self.ports = port_names(group.name for group in groups)
        self.own: Mapping[Any, Callable[[Node, Mapping[str, Any]], Value]] = {
            ew.kv_write.default: self._kv_write,
            ew.paged_attention.default: self._paged_attention,
        }

    def unsupported(self, reason: str) -> UnsupportedModelError:
        """Returns the error of the onnx target, whose operators are used, with this target's name."""
        error = super().unsupported(reason.replace("the onnx target", "the tensorrt target"))
        return UnsupportedModelError(
            error.message, hint="This model can't run on the tensorrt target; the cpu target may take it."
        )

    def build(self) -> onnx.ModelProto:
        """Returns the whole graph, with weights as external data."""
        vocabulary = int(self.expressions(self.program.logits)[-1])
        self.outputs[LOGITS] = helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["R", vocabulary])
        for name in (IDS, POSITIONS, ROWS, Q_START, KV_LEN):  # in the order that networks have always had
            self._add_input(name, TensorProto.INT32, _shape_of(name))
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._add_placeholder(node)
            elif node.op == "call_function" and has_tensors(node):
                self.node = node
                handler = self.own.get(node.target)
                self.names[node] = handler(node, bound_arguments(node)) if handler else emit_call(self, node)
        self.node = None
        self.op("Identity", self.wide(self.cast(self.program.logits, torch.float32)), name=LOGITS)
        return model_of(self, "step", list(self.inputs))

    def _add_input(self, name: str, element: int, shape: Sequence[int | str | None]) -> None:
        self.inputs[name] = helper.make_tensor_value_info(name, element, shape)

    def _add_placeholder(self, node: Node) -> None:
        """Adds a step input. Integers are cast from 32 bits to the graph's 64, unless only plugins read them."""
        name = str(node.target)
        if name not in self.ports:
            return
        if port_of(name).check in ("index", "row"):
            self.names[node] = self.op("Cast", name, to=TensorProto.INT64)
            return
        if name not in self.inputs:
            self._add_input(name, TensorProto.INT32, _shape_of(name))
        self.names[node] = name

    def _narrow(self, value: object) -> str:
        return self._in_type(self.cast(value, torch.float32), self.element)

    def _plugin(self, kind: str, inputs: list[str], outputs: tuple[str, ...], **attributes: Any) -> None:
        """Adds a node that calls the plugin ``kind``."""
        assert self.node is not None
        label = f"{join_where(self.node.meta[WHERE])}/{kind}_{len(self.nodes)}".lstrip("/")
        self.nodes.append(helper.make_node(kind, inputs, list(outputs), name=label))
        self.fixed[label] = attributes

    def _kv_write(self, node: Node, a: Mapping[str, Any]) -> Value:
        layer = int(str(a["k_cache"].target).partition(":")[2])
        tensors = cache_tensors(self.groups[layer], layer)
        for tensor in tensors:
            element = DTYPES[tensor.dtype].onnx
            shape: list[int | str | None] = ["P", self.groups[layer].block_size, *tensor.of_slot]
            self._add_input(tensor.name, element, shape)
            self.outputs[tensor.written] = helper.make_tensor_value_info(tensor.written, element, shape)
        inputs = [self._narrow(a["k"]), self._narrow(a["v"]), self.value(a["slots"]), *(t.name for t in tensors)]
        outputs = tuple(tensor.written for tensor in tensors)
        self._plugin(QUANTIZED_KV_WRITE if len(tensors) > 2 else KV_WRITE, inputs, outputs)
        self.caches |= dict.fromkeys(outputs[:2], outputs)
        return outputs

    def _paged_attention(self, node: Node, a: Mapping[str, Any]) -> Value:
        caches = self.caches[str(self.value(a["k_cache"]))]
        inputs = [self._narrow(a["q"]), *caches, *(self.value(a[name]) for name in ATTENTION_PORTS)]
        for name in ("sinks", "slopes"):
            inputs.append("" if a[name] is None else self.wide(self.cast(a[name], torch.float32)))
        out = f"{PAGED_ATTENTION}_{len(self.nodes)}"
        fixed = {"scale": float(a["scale"]), "window": int(a["window"]), "softcap": float(a["softcap"])}
        self._plugin(QUANTIZED_PAGED_ATTENTION if len(caches) > 2 else PAGED_ATTENTION, inputs, (out,), **fixed)
        self._types[out] = self.element
        return out


def _shape_of(name: str) -> list[int | str | None]:
    return ["B + 1" if size == "B+1" else size for size in port_of(name).shape]


def describe_network(program: Program, weights: ExternalWeights, floats: FloatDtype) -> Network:
    """Returns the network of a program whose attention is paged, and writes its weights.

    Args:
        program: the program, after the target's passes.
        weights: the writer of the bundle's weights.
        floats: the type of computation and caches.

    Raises:
        UnsupportedModelError: no operator expresses an op, named with its module; or f16 can't represent a weight.
        SourceError, BundleError, CapacityError: a weight can't be read or written.
    """
    builder = PagedBuilder(program, weights, floats)
    graph = builder.build().graph
    constants: dict[str, Constant] = {}
    stored: dict[str, Weight] = {}
    for tensor in graph.initializer:
        dtype, shape = _DTYPES[tensor.data_type], tuple(tensor.dims)
        if tensor.data_location == TensorProto.EXTERNAL:
            stored[tensor.name] = Weight(tensor=tensor.name, dtype=dtype, shape=shape)
        else:
            values = numpy_helper.to_array(tensor)
            constants[tensor.name] = Constant(dtype=dtype, shape=shape, values=tuple(_plain(v) for v in values.flat))
    return Network(
        dtype=floats,
        inputs={value.name: _input(value) for value in graph.input},
        outputs=tuple(value.name for value in graph.output),
        constants=constants,
        weights=stored,
        calls=tuple(_call(node, builder.fixed.get(node.name, {})) for node in graph.node),
    )


def _plain(value: Any) -> int | float:
    return value.item() if value.dtype.kind in "iuf" else (int(value) if value.dtype.kind == "b" else float(value))


def _input(value: onnx.ValueInfoProto) -> NetworkInput:
    of = value.type.tensor_type
    shape = tuple(dim.dim_param or dim.dim_value for dim in of.shape.dim)
    return NetworkInput.model_validate({"dtype": _DTYPES[of.elem_type], "shape": shape})


def _call(node: onnx.NodeProto, fixed: Mapping[str, Attribute]) -> Call:
    attributes = dict(fixed)
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if attribute.name == "to":
            attributes["to"] = _DTYPES[value]
        elif isinstance(value, bytes):
            attributes[attribute.name] = value.decode()
        else:
            attributes[attribute.name] = tuple(value) if isinstance(value, (list, tuple)) else value
    return Call(
        op=node.op_type,
        name=node.name,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        attributes=attributes,
    )
