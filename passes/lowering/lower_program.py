"""Lowers a Program to a LoweredProgram: steps over strided operands, without torch. Memory is planned afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.runtime.shared.contracts import STATE
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram
from enginewright.runtime.shared.op_schema import OPS
from enginewright.runtime.shared.step_schema import port_names
from enginewright.runtime.shared.weight_formats import FORMATS

from ..formats.rounding import TORCH_DTYPES
from ..ir.program import Program, cache_input, has_tensors
from ..ir.quantized import QuantizedValues
from ..ir.two_of_four import is_two_of_four
from ..ir.weights import WeightExpr
from ..ops.quantization import groups_of, storage_of
from . import lower_elementwise, lower_ew, lower_experts, lower_fused, lower_quantized, lower_routing, lower_views
from .builder import CPU_FORM, Builder, CacheRef, Form, Packing, Value, WeightRef
from .lower_ew import Handler
from .views import View, contiguous_strides

ew = torch.ops.ew
aten = torch.ops.aten

HANDLERS: Mapping[Any, Handler] = {
    **lower_ew.HANDLERS,
    **lower_experts.HANDLERS,
    **lower_fused.HANDLERS,
    **lower_quantized.HANDLERS,
    **lower_routing.HANDLERS,
    **lower_views.HANDLERS,
    **lower_elementwise.ELEMENTWISE,
    **lower_elementwise.REDUCTIONS,
}

_NO_BUFFER = frozenset(
    {ew.add_rms_norm.default, ew.add_layer_norm.default, ew.quantize_activation.default}
    | {ew.route_experts.default, ew.dequantize.default}
)
_WRITES_ITS_RESULT = (
    frozenset({*lower_elementwise.ELEMENTWISE, *lower_ew.HANDLERS, *lower_experts.HANDLERS, *lower_quantized.HANDLERS})
    - _NO_BUFFER
)
"""Ops whose result can be written to a part of another op's buffer."""

_QUANTIZED = ("weight", "weight_scales", "weight_offsets")
_FACTORS = frozenset({"weight_scales", "weight_offsets", "scales", "offsets"})
_PACKED: Mapping[Any, tuple[str, ...]] = {
    ew.linear.default: ("weight",),
    ew.grouped_linear.default: ("weight",),
    ew.quantized_linear.default: _QUANTIZED,
    ew.quantized_grouped_linear.default: _QUANTIZED,
    ew.quantized_embedding.default: ("table", "scales", "offsets"),
    ew.dequantize.default: ("values", "scales", "offsets"),
}
"""Ops -> the arguments that kernels read in panels.

A float table of ``ew.embedding`` isn't among them: it has the layout that the head reads, or is row-major.
"""

_SPARSE = frozenset({ew.linear.default, ew.quantized_linear.default})
"""Ops with kernels for weights of sparsity 2:4."""

_PACKINGS: Mapping[torch.dtype, Packing] = {
    **{TORCH_DTYPES[of.dtype]: Packing(of.layout, of.dtype) for of in reversed(tuple(FORMATS.values())) if of.layout},
    torch.float16: Packing("panel32", "f16"),
}


@dataclass(frozen=True)
class Lowering:
    """A lowered program, and the expressions of its weights by their names in it."""

    program: LoweredProgram
    weights: Mapping[str, WeightExpr]


def lower_program(program: Program, form: Form = CPU_FORM) -> Lowering:
    """Lowers a program whose attention is paged.

    View-like ops become strides and offsets of operands. A weight that linears read is packed in panels, also if it is
    an embedding table. If another op needs it row-major too, it is stored a second time, as NAME.rows.

    Args:
        program: the program.
        form: the storage that the target uses.

    Raises:
        UnsupportedModelError: an op has no kernel; the message names its module.
        PassError: a shape isn't affine in T, B and R, or the program doesn't have a single output.
    """
    builder = Builder(program, weight_packings(program, form), form)
    values: dict[Node, Value] = {}
    for node in program.graph.nodes:
        builder.node = node
        if node.op == "placeholder" and node.users:
            values[node] = _input(builder, node)
        elif node.op == "get_attr":
            values[node] = WeightRef(str(node.target))
        elif node.op == "call_function" and has_tensors(node):
            values[node] = _call(builder, node, values)
    builder.node = program.logits
    logits = _result(builder, values[program.logits])
    usual = {*port_names(group.name for group in program.cache_groups)}
    lowered = LoweredProgram(
        cache_groups=program.cache_groups,
        weights=tuple(builder.weights.values()),
        buffers=tuple(builder.buffers),
        steps=tuple(builder.steps),
        outputs={program.output_name: logits.operand()},
        ports=tuple(sorted({o.name for s in builder.steps for o in s.inputs if o.kind == "input"} - usual)),
    )
    return Lowering(lowered, builder.sources)


def weight_packings(program: Program, form: Form = CPU_FORM) -> dict[str, Packing]:
    """Returns the storage of each weight that products read, in panels or rows, by its name in the program."""
    packings: dict[str, Packing] = {}
    packed = _PACKED if form.panels else {**_PACKED, ew.embedding.default: ("table",)}
    for node in program.nodes_of(*packed):
        arguments = bound_arguments(node)
        for argument in packed[node.target]:
            expr = program.weight_of(arguments[argument])
            if expr is not None and expr.dtype in _PACKINGS and not form.panels:
                packings[str(arguments[argument].target)] = _in_rows(expr.dtype, arguments, form)
            elif expr is not None and expr.dtype in _PACKINGS:
                packing = _PACKINGS[expr.dtype]
                if packing.dtype == "i8":
                    packing = (
                        _of_scales(arguments, expr.shape[-1]) if argument in _FACTORS else _of_integers(arguments, expr)
                    )
                if expr.dtype != torch.float16 and is_two_of_four(expr) and _only_products(arguments[argument]):
                    packing = Packing("sparse32", packing.dtype)
                packings[str(arguments[argument].target)] = packing
    return packings


def _in_rows(dtype: torch.dtype, given: Mapping[str, Any], form: Form) -> Packing:
    """Returns the row-major storage of a weight, or of scales, of type ``dtype``.

    ``given`` has the arguments of the call that reads it.
    """
    if dtype in (torch.float32, torch.bfloat16):
        return Packing("rows", form.floats)
    packing = _of_integers(given) if dtype == torch.int8 else _PACKINGS[dtype]
    return Packing("nibbles" if DTYPES[packing.dtype].bits == 4 else "rows", packing.dtype)


def _only_products(weight: Node) -> bool:
    """Returns True if only linears read the weight, as their weight."""
    return all(user.target in _SPARSE and bound_arguments(user)["weight"] is weight for user in weight.users)


def _of_integers(given: Mapping[str, Any], expr: WeightExpr | None = None) -> Packing:
    """Returns the storage of a weight of integers, from the bits and offsets among the arguments of its call.

    ``expr`` is the weight if kernels may read its integers as indices of levels; None otherwise.
    """
    of = FORMATS[storage_of(given.get("weight_bits", given.get("bits")))]
    if isinstance(expr, QuantizedValues) and FORMATS[expr.format.storage].levels:
        of = FORMATS[expr.format.storage]
    assert of.layout is not None
    shifted = given.get("weight_offsets", given.get("offsets")) is not None
    return Packing(of.layout, of.shifted if of.shifted and shifted else of.dtype)


def _of_scales(given: Mapping[str, Any], size: int) -> Packing:
    """Returns the storage of scales or offsets that are int8 tensors with ``size`` bytes per row, in blocks of groups.

    ``given`` has the arguments of the call that reads them.
    """
    weight = given["weight" if "weight" in given else "table"]
    groups = groups_of(weight.meta["val"].shape[-1], int(given["weight_group" if "weight" in given else "group_size"]))
    return Packing("blocks16" if groups // ((size - groups) // 2) == 16 else "blocks8", "i8")


def _input(builder: Builder, node: Node) -> Value:
    name = str(node.target)
    layer = name.rpartition(":")[2]
    for half in ("k", "v"):
        for ends in (False, True):
            if name == cache_input(half, layer, ends=ends):
                return CacheRef(_cache_name(builder.program, int(layer), kind="", ends=ends), half)
    if name.startswith(f"{STATE}:"):
        return CacheRef(_cache_name(builder.program, int(layer), kind=STATE), STATE)
    value = builder.program.value(node)
    if name.startswith("block_table:"):
        # Its width isn't a function of T, B and R: 0 says that it is known at run time alone.
        requests = builder.program.affine(value.shape[0])
        return View("input", name, "i32", (requests, Affine()), (Affine(), Affine(1)))
    shape = tuple(builder.program.affine(s) for s in value.shape)
    builder.inputs[name] = View("input", name, builder.dtype(value), shape, contiguous_strides(shape))
    return builder.inputs[name]


def _cache_name(program: Program, layer: int, kind: str, *, ends: bool = False) -> str:
    """Returns the name of a layer's cache in lowered programs, GROUP/LAYER.

    Args:
        program: the program.
        layer: the layer's number.
        kind: the kind of the cache group: "" for keys and values, ``STATE`` for states.
        ends: True for the second cache, of the ends of requests.

    Raises:
        PassError: no such group has the layer.
    """
    for group in program.cache_groups:
        if layer in group.layers and group.kind == kind and group.holds_ends == ends:
            return f"{group.name}/{layer}"
    raise PassError(f"layer {layer} is in no cache group")


def _call(builder: Builder, node: Node, values: Mapping[Node, Value]) -> Value:
    handler = HANDLERS.get(node.target)
    name = str(node.target).removesuffix(".default")
    if handler is None and name.startswith("ew.") and name.removeprefix("ew.") in OPS:
        handler = lower_ew.declared
    if handler is None:
        raise builder.unsupported(f"{builder.form.target} has no kernel for it")

    def value(argument: Node) -> Any:
        if argument in values:
            return values[argument]
        return builder.program.affine(argument.meta["val"])

    arguments = bound_arguments(node)
    if (cat := _only_cat(node)) is not None:
        _promise(builder, node, cat)
    try:
        return handler(builder, node, {k: _resolve(v, value) for k, v in arguments.items()})
    except ValueError as e:
        raise builder.unsupported("a size or an offset is not affine in T, B and R") from e


def _resolve(argument: Any, value: Callable[[Node], Any]) -> Any:
    if isinstance(argument, Node):
        return value(argument)
    return [_resolve(a, value) for a in argument] if isinstance(argument, (list, tuple)) else argument


def _only_cat(node: Node) -> Node | None:
    """Returns the cat that is a node's only reader, if the node can write its result to the cat's buffer; otherwise
    None.
    """
    if node.target not in _WRITES_ITS_RESULT or len(node.users) != 1:
        return None
    (user,) = node.users
    if user.target is not aten.cat.default or not isinstance(user.args[0], (list, tuple)):
        return None
    same_type = node.meta["val"].dtype == user.meta["val"].dtype
    once = sum(1 for a in user.args[0] if a is node) == 1
    return user if once and same_type and node.meta["val"].dim() == 2 else None


def _promise(builder: Builder, node: Node, cat: Node) -> None:
    """Assigns to a node its part of a cat's buffer, which is added first if no other part has been assigned."""
    if cat not in builder.destinations:
        builder.destinations[cat] = builder.buffer(builder.shape(cat), builder.dtype(cat.meta["val"]))
    places = lower_views.cat_places(builder, cat, builder.destinations[cat])
    arguments = cat.args[0]
    assert isinstance(arguments, (list, tuple))
    builder.destinations[node] = places[list(arguments).index(node)]


def _result(builder: Builder, value: Value) -> View:
    """Returns the program's result as a dense f32 buffer, copied if necessary."""
    view = builder.view(value)
    if view.kind == "buffer" and view.is_contiguous and view.dtype == "f32":
        return view
    return builder.copy(builder.cast(view))
