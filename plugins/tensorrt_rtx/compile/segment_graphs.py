"""Converts the segments of a program to ONNX graphs, one for all equal segments, and to the steps that run them.

Names in a graph describe a value's role, not its position in the model, and weights are inputs. So equal segments give
equal bytes. Tokens are packed, [T, ...]; integer inputs have 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import get_args

import onnx
import sympy
import torch
from onnx import TensorProto, helper
from torch.fx.node import Node

from enginewright.passes.framework.base import describe_node
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import UnsupportedModelError

from ...engines.segments import (
    LOGITS,
    STEP_INPUTS,
    AttentionStep,
    SegmentStep,
    SegmentTensor,
    Size,
    Step,
    TensorDtype,
)
from ...graphs.emit_model import emit_call, model_of, summed_products
from ...graphs.float_types import ELEMENTS, FloatType
from ...graphs.graph import TYPES, GraphBuilder
from ...graphs.weights import ExternalWeights
from .segment_buffers import share_buffers
from .segments import AttentionCut, SegmentCut, cut

ew = torch.ops.ew

_ELEMENTS: Mapping[TensorDtype, int] = {name: DTYPES[name].onnx for name in get_args(TensorDtype)}
_DTYPES: Mapping[int, TensorDtype] = {kind: dtype for dtype, kind in _ELEMENTS.items()}


@dataclass(frozen=True)
class SegmentGraph:
    """A serialized graph of segments, with its inputs, weights and outputs as in
    ``plugins.engines.segments.Segment``.
    """

    name: str
    model: bytes
    inputs: dict[str, SegmentTensor]
    weights: dict[str, SegmentTensor]
    outputs: dict[str, SegmentTensor]


@dataclass(frozen=True)
class SegmentedModel:
    """A model as segments.

    Attributes:
        graphs: the distinct graphs, in the order in which steps first run them.
        steps: the steps.
        buffers: the buffers that steps name.
        summed_products: the number of terms in an element of a product with a weight, summed over all these products.
    """

    graphs: tuple[SegmentGraph, ...]
    steps: tuple[Step, ...]
    buffers: dict[str, SegmentTensor]
    summed_products: int


class SegmentBuilder(GraphBuilder):
    """Builds the graph of one segment, in which weights are inputs.

    Attributes:
        given: the name of each weight in the graph -> its name in the bundle, in the order in which they are first
            read.
    """

    def __init__(self, program: Program, weights: ExternalWeights, floats: FloatType) -> None:
        super().__init__(program, weights, floats)
        self.given: dict[str, str] = {}
        self._given_as: dict[str, str] = {}

    def take(self, tensor: TensorProto) -> str:
        """Makes a weight an input of the graph, and returns the input's name. The bundle stores the weight once for all
        segments.
        """
        label = str(tensor.name)
        if label not in self._given_as:
            name = f"weight_{len(self.given)}"
            self._given_as[label], self.given[name] = name, label
            self.inputs[name] = helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
        return self._given_as[label]

    def tokens(self) -> str:
        """Returns a tensor i64 [1] with T, taken from any input with that size."""
        return self.once("N", lambda: self._leading("T"))

    def sampled(self) -> str:
        """Returns a tensor i64 [1] with R, taken from any input with that size."""
        return self.once("R", lambda: self._leading("R"))

    def _leading(self, letter: str) -> str:
        for name, value in self.inputs.items():
            dims = value.type.tensor_type.shape.dim
            if dims and dims[0].dim_param == letter:
                return self.op("Shape", name, start=0, end=1)
        raise self.unsupported(f"no input of its segment says the size {letter}")

    def declare_input(self, name: str, tensor: SegmentTensor) -> None:
        """Declares an input that isn't a weight."""
        self.inputs[name] = helper.make_tensor_value_info(name, _ELEMENTS[tensor.dtype], list(tensor.shape))

    def declare_output(self, name: str, node: Node, floats: FloatType | None) -> SegmentTensor:
        """Declares a call's value as an output, cast to the type ``floats``; None keeps the graph's type."""
        value = self.value(node)
        if floats is not None:
            value = self._in_type(value, ELEMENTS[floats])
        kind = self._float_type(value) or TYPES[node.meta["val"].dtype]
        tensor = SegmentTensor(dtype=_DTYPES[kind], shape=tuple(_size(node, expr) for expr in self.expressions(node)))
        self.op("Identity", value, name=name)
        self.outputs[name] = helper.make_tensor_value_info(name, kind, list(tensor.shape))
        return tensor


def segment_model(program: Program, weights: ExternalWeights, floats: FloatType) -> SegmentedModel:
    """Cuts a program into segments, converts them to graphs and writes their weights.

    Args:
        program: a program with attention in its paged form.
        weights: the writer of the bundle's weights.
        floats: the type of the graphs' floats, and of attention's inputs and outputs.

    Raises:
        UnsupportedModelError: standard operators can't express a call, or ``cut`` rejects it; names the module.
        SourceError, BundleError, CapacityError: a weight can't be read or written.
    """
    graphs: dict[bytes, SegmentGraph] = {}
    steps: list[Step] = []
    values: dict[Node, str] = {}
    tensors = {program.inputs[name]: _step_input(name) for name in STEP_INPUTS if name in program.inputs}
    for piece in cut(program):
        b = SegmentBuilder(program, weights, floats)
        inputs = _add_inputs(b, piece, tensors)
        for node in piece.nodes:
            b.node = node
            b.names[node] = emit_call(b, node)
        outputs = _add_outputs(b, piece)
        new = _graph(b, f"segment_{len(graphs)}")
        graph = graphs.setdefault(new.model, new)
        for name, node in outputs.items():
            values[node] = LOGITS if name == LOGITS else f"value {node.name}"
            tensors[node] = graph.outputs[name]
        steps.append(
            SegmentStep(
                segment=graph.name,
                inputs={name: values.get(inputs[name], name) for name in graph.inputs},
                weights={name: b.given[name] for name in graph.weights},
                outputs={name: values[node] for name, node in outputs.items()},
            )
        )
        for attention in piece.attentions:
            shape = tuple(_size(attention.node, expr) for expr in b.expressions(attention.node))
            values[attention.node] = f"value {attention.node.name}"
            tensors[attention.node] = SegmentTensor(dtype=floats, shape=shape)
            steps.append(_attend(b, attention, values))
    shared, buffers = share_buffers(steps, {name: tensors[node] for node, name in values.items()}, LOGITS)
    return SegmentedModel(tuple(graphs.values()), shared, buffers, summed_products(program))


def _step_input(name: str) -> SegmentTensor:
    return SegmentTensor(dtype="i32", shape=("R",) if name == "rows" else ("T",))


def _add_inputs(b: SegmentBuilder, piece: SegmentCut, tensors: Mapping[Node, SegmentTensor]) -> dict[str, Node]:
    """Declares a segment's inputs and returns their nodes by name: step inputs, attention results, and numbered other
    values.
    """
    attended = [node for node in piece.inputs if node.target is ew.paged_attention.default]
    numbers = count()
    nodes: dict[str, Node] = {}
    for node in piece.inputs:
        if node.op == "placeholder":
            name = str(node.target)
        elif node in attended:
            name = "attention" if len(attended) == 1 else f"attention_{attended.index(node)}"
        else:
            name = f"x_{next(numbers)}"
        b.declare_input(name, tensors[node])
        b.names[node] = b.op("Cast", name, to=TensorProto.INT64) if node.op == "placeholder" else name
        nodes[name] = node
    return nodes


def _add_outputs(b: SegmentBuilder, piece: SegmentCut) -> dict[str, Node]:
    """Declares a segment's outputs and returns their nodes by name: queries, keys and values, logits, and numbered
    other values.
    """
    roles: dict[Node, str] = {b.program.logits: LOGITS}
    for i, attention in enumerate(piece.attentions):
        for letter in "vkq":  # one value may be several of them
            roles[getattr(attention, letter)] = letter if len(piece.attentions) == 1 else f"{letter}_{i}"
    numbers = count()
    nodes: dict[str, Node] = {}
    for node in piece.outputs:
        b.node = node
        if node in b.spread:
            raise b.unsupported("what is made for each expert can't go from one segment to another")
        role = roles.get(node)
        name = role or f"y_{next(numbers)}"
        b.declare_output(name, node, None if role is None else "f32" if role == LOGITS else b.floats)
        nodes[name] = node
    b.node = None
    return nodes


def _graph(b: SegmentBuilder, name: str) -> SegmentGraph:
    """Returns a builder's nodes as a graph, without the inputs that no node reads.

    ``name`` is the graph's name in the schedule; it isn't part of the bytes, so that equal segments have equal bytes.
    """
    model = model_of(b, "segment", list(b.inputs))
    read = {input_name for node in model.graph.node for input_name in node.input}
    inputs_read = [value for value in model.graph.input if value.name in read]
    del model.graph.input[:]
    model.graph.input.extend(inputs_read)
    for node in model.graph.node:
        node.name = node.output[0]  # in place of the path of a module
    tensors = {value.name: _tensor(value) for value in inputs_read}
    return SegmentGraph(
        name,
        model.SerializeToString(deterministic=True),
        inputs={input_name: tensor for input_name, tensor in tensors.items() if input_name not in b.given},
        weights={input_name: tensor for input_name, tensor in tensors.items() if input_name in b.given},
        outputs={value.name: _tensor(value) for value in model.graph.output},
    )


def _attend(b: SegmentBuilder, attention: AttentionCut, values: Mapping[Node, str]) -> AttentionStep:
    group = next(g for g in b.program.cache_groups if attention.layer in g.layers)
    return AttentionStep(
        layer=attention.layer,
        group=group.name,
        q=values[attention.q],
        k=values[attention.k],
        v=values[attention.v],
        out=values[attention.node],
        scale=attention.scale,
        window=attention.window,
        softcap=attention.softcap,
        sinks=_of_heads(b, attention.sinks),
        slopes=_of_heads(b, attention.slopes),
    )


def _of_heads(b: SegmentBuilder, node: Node | None) -> str | None:
    """Returns the name of sinks or slopes, f32 [Nq], in the bundle."""
    if node is None:
        return None
    name = str(node.target)
    return str(b.weights.add(name, b.program.weights[name], "rows", "f32").name)


def _size(node: Node, expr: sympy.Expr) -> Size:
    if expr.is_Integer:
        return int(expr)
    match str(expr):
        case "T":
            return "T"
        case "R":
            return "R"
    raise UnsupportedModelError(
        f"{describe_node(node)}: its size {expr} can't go from one segment to another",
        hint="The cpu target may take this model.",
    )


def _tensor(value: onnx.ValueInfoProto) -> SegmentTensor:
    of = value.type.tensor_type
    sizes = [dim.dim_param or dim.dim_value for dim in of.shape.dim]
    return SegmentTensor.model_validate({"dtype": _DTYPES[of.elem_type], "shape": sizes})
