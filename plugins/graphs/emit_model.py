"""Converts a Program to an ONNX model: inputs, outputs, and each call by its handler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx.shape_inference
import sympy
import torch
from onnx import TensorProto, helper
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program, has_tensors
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ..emit.bundle_writer import BundleWriter
from ..steps.linear_io import (
    CONTRIB_FILE,
    INPUT_IDS,
    KERNELS_FILE,
    LOGITS,
    MODEL_FILE,
    NARROW_FILE,
    POSITION_IDS,
    ROWS,
    WRITE_INDEX,
    LinearCacheGroup,
    LinearIo,
    NarrowFile,
    NarrowFloats,
    VariantFile,
)
from . import ops_attention, ops_dequantize, ops_elementwise, ops_ew, ops_experts, ops_quantized, ops_routing, ops_views
from .contrib import ContribBuilder, accuracy_level
from .float_types import FloatType
from .graph import FLAT_IDS, GraphBuilder, Handler
from .kernels import KernelsBuilder
from .weights import ExternalWeights

OPSET = 24
IR_VERSION = 12
ONNXRUNTIME = "1.25"
"""The smallest version of onnxruntime that has a CPU kernel for this opset's TensorScatter."""

_TOKENS = sympy.Symbol("N")
"""The symbol for the number of tokens: T of the program, B*S of the graph's inputs."""

HANDLERS: Mapping[Any, Handler] = {
    **ops_attention.HANDLERS,
    **ops_dequantize.HANDLERS,
    **ops_elementwise.ELEMENTWISE,
    **ops_elementwise.REDUCTIONS,
    **ops_ew.HANDLERS,
    **ops_experts.HANDLERS,
    **ops_quantized.HANDLERS,
    **ops_routing.HANDLERS,
    **ops_views.HANDLERS,
}


def emit_model(
    program: Program,
    writer: BundleWriter,
    progress: Progress,
    floats: FloatType = "f32",
    capacity: int | None = None,
    contrib: int | None = None,
    kernels: int | None = None,
    narrow: NarrowFloats | None = None,
) -> LinearIo:
    """Writes model.onnx at the bundle's root, its weights, and its variants. Returns the section for the manifest.

    Args:
        program: a program with attention in its paged form.
        writer: the bundle's writer.
        progress: called with the stage "emit", for each weight.
        floats: the type in which the graph computes, and of its caches.
        capacity: the number of positions of a slot; None doesn't fix it.
        contrib, kernels: the most tokens of a request, for a contrib or a kernels variant; None writes no such variant.
        narrow: the type of an additional variant with 16-bit floats; None writes none.

    Raises:
        UnsupportedModelError: standard operators can't express an op; the message names its module.
        SourceError, BundleError, CapacityError: a weight can't be read, or a file not written.
    """
    progress(ProgressEvent("emit", 0, len(program.weights)))
    weights = ExternalWeights(writer, progress, len(program.weights))
    model = graph_model(GraphBuilder(program, weights, floats, capacity))
    writer.write_bytes(MODEL_FILE, model.SerializeToString(deterministic=True))
    beside = None if narrow is None else _emit_narrow(program, writer, progress, narrow)
    variant = None if contrib is None else _emit_contrib(ContribBuilder(program, weights, contrib), writer)
    return LinearIo(
        opset=OPSET,
        onnxruntime=ONNXRUNTIME,
        contrib=variant,
        narrow=beside,
        kernels=None if kernels is None else _emit_kernels(KernelsBuilder(program, weights, kernels), writer),
        cache_groups=tuple(LinearCacheGroup.from_group(group, floats) for group in program.cache_groups),
        summed_products=summed_products(program),
    )


def _emit_narrow(program: Program, writer: BundleWriter, progress: Progress, floats: NarrowFloats) -> NarrowFile:
    """Writes the variant with 16-bit floats. It has its own float weights, and shares the others."""
    weights = ExternalWeights(writer, progress, len(program.weights), suffix=f"onnx.{floats}")
    path = NARROW_FILE.format(floats)
    writer.write_bytes(path, graph_model(GraphBuilder(program, weights, floats)).SerializeToString(deterministic=True))
    return NarrowFile(file=path, dtype=floats)


def _emit_contrib(b: ContribBuilder, writer: BundleWriter) -> VariantFile:
    """Writes the contrib variant, unless no attention would use GroupQueryAttention."""
    if len(b.standard) == len(b.attentions):
        return VariantFile(file="", standard=b.standard)
    writer.write_bytes(CONTRIB_FILE, graph_model(b).SerializeToString(deterministic=True))
    return VariantFile(file=CONTRIB_FILE, standard=b.standard, accuracy_level=accuracy_level(b.program))


def _emit_kernels(b: KernelsBuilder, writer: BundleWriter) -> VariantFile:
    writer.write_bytes(KERNELS_FILE, graph_model(b).SerializeToString(deterministic=True))
    return VariantFile(file=KERNELS_FILE, standard=b.standard)


def graph_model(b: GraphBuilder) -> onnx.ModelProto:
    for name, kind, shape in (
        (INPUT_IDS, TensorProto.INT64, ["B", "S"]),
        (POSITION_IDS, TensorProto.INT64, ["B", "S"]),
        (WRITE_INDEX, TensorProto.INT64, ["B"]),
        (ROWS, TensorProto.INT64, ["R"]),
    ):
        b.inputs[name] = helper.make_tensor_value_info(name, kind, shape)
    vocabulary = int(b.expressions(b.program.logits)[-1])
    b.outputs[LOGITS] = helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["R", vocabulary])
    placeholders = {
        "ids": lambda: b.op("Reshape", INPUT_IDS, b.integers(-1), name=FLAT_IDS),
        "positions": lambda: b.op("Reshape", POSITION_IDS, b.integers(-1)),
        "rows": lambda: ROWS,
    }
    for node in b.program.graph.nodes:
        if node.op == "placeholder" and str(node.target) in placeholders:
            b.names[node] = placeholders[str(node.target)]()
        elif node.op == "call_function" and has_tensors(node):
            b.node = node
            b.names[node] = emit_call(b, node)
    b.node = None
    b.op("Identity", b.wide(b.cast(b.program.logits, torch.float32)), name=LOGITS)
    # First the inputs of every model, then masks, then caches by layer.
    inputs = sorted(b.inputs, key=lambda name: (name.startswith("past_"), name.startswith("mask")))
    model = model_of(b, "step", inputs)
    add_shapes(model, b)
    return model


def model_of(b: GraphBuilder, name: str, inputs: Sequence[str]) -> onnx.ModelProto:
    """Returns the builder's graph as a model called ``name`` with ``inputs`` in this order."""
    nodes = _live(b)  # first: it drops constants, too
    values = [b.inputs[input_name] for input_name in inputs]
    domains = sorted({"", *(node.domain for node in nodes)})
    graph = helper.make_graph(nodes, name, values, list(b.outputs.values()), list(b.initializers.values()))
    return helper.make_model(
        graph,
        producer_name="enginewright",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid(name, OPSET if not name else 1) for name in domains],
    )


def add_shapes(model: onnx.ModelProto, b: GraphBuilder) -> None:
    """Adds the shapes of intermediate tensors to a model (``value_info``), as far as onnx infers them.

    A size that onnx can't infer becomes the program's expression in N tokens and R rows, if the tensor is the result of
    a call; otherwise it isn't set. Tensors after operators of other domains get no shape, because onnx doesn't know
    these.
    """
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    known = {name: node for node, name in b.names.items() if isinstance(name, str) and node.op == "call_function"}
    for value in inferred.graph.value_info:
        dims = value.type.tensor_type.shape.dim
        node = known.get(value.name)
        sizes = () if node is None else b.expressions(node)
        fits = len(sizes) == len(dims) and all(
            not d.HasField("dim_value") or (e.is_Integer and int(e) == d.dim_value)
            for d, e in zip(dims, sizes, strict=True)
        )
        for at, dim in enumerate(dims):
            if dim.HasField("dim_value"):
                continue
            if fits and sizes[at].is_Integer:
                dim.dim_value = int(sizes[at])
            elif fits:
                dim.dim_param = str(sizes[at].xreplace({s: _TOKENS for s in sizes[at].free_symbols if str(s) == "T"}))
            elif dim.dim_param.startswith("unk__"):
                dim.Clear()
    model.graph.value_info.extend(sorted(inferred.graph.value_info, key=lambda v: v.name))


def emit_call(b: GraphBuilder, node: Node) -> Any:
    """Emits a call by its handler, and returns the names of its results. Raises UnsupportedModelError if there is no
    handler.
    """
    handler = b.overrides.get(node.target) or HANDLERS.get(node.target)
    if handler is None:
        raise b.unsupported("standard ONNX operators don't express it here")
    arguments = bound_arguments(node)
    ops_experts.check_spread(b, node, arguments)
    return handler(b, node, arguments)


def _live(b: GraphBuilder) -> list[onnx.NodeProto]:
    """Returns the nodes on which the outputs depend, and removes the constants that no such node reads from the
    builder.
    """
    needed = set(b.outputs)
    live = []
    for node in reversed(b.nodes):
        if needed.intersection(node.output):
            live.append(node)
            needed.update(filter(None, node.input))  # of one that may be missing the name is empty
    b.initializers = {name: tensor for name, tensor in b.initializers.items() if name in needed}
    return live[::-1]


def summed_products(program: Program) -> int:
    """Returns the number of terms in an element of a product with a weight, summed over all these products."""
    total = 0
    for node in program.nodes_of(*ops_ew.PRODUCTS, *ops_experts.PRODUCTS, *ops_quantized.PRODUCTS):
        total += int(program.shape(bound_arguments(node)["weight"])[-1])
    return total
