"""Lowers each ``ew`` op to a step. docs/inside/lowered-ops.md lists the steps' operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.runtime.shared.contracts import STATE
from enginewright.runtime.shared.lowered_program import Operand
from enginewright.runtime.shared.op_schema import OPS, OPTIONAL, Kind
from enginewright.runtime.shared.step_schema import ATTENTION_PORTS, SLOTS

from .builder import Builder, CacheRef, StoredRef, Value, WeightRef
from .views import View, elements, reshape

Handler = Callable[[Builder, Node, Mapping[str, Any]], Value]
"""A function that lowers a node. Its arguments are those of the op by name, nodes as Values; it returns the node's
Value.
"""


def flat_output(view: View, like: View) -> View:
    """Returns the output ``view`` with the leading dimensions of ``like``, a flattened input."""
    flat = reshape(view, (*like.shape[:-1], view.shape[-1]))
    assert flat is not None, f"an output of shape {view.shape} can't be written as {like.shape}"
    return flat


def _embedding(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    table = a["table"]
    attrs: dict[str, int] = {}
    if isinstance(table, (WeightRef, StoredRef)):
        weight, attrs = b.product_weight(table, "group_size")
    else:
        weight = [b.rows(b.view(table))]
    out = b.result(node)
    ids = b.unit(b.view(a["ids"]))
    if ids.rank != 1:
        raise b.unsupported(f"ids have rank {ids.rank}, not 1")
    b.step("embedding", [ids, *weight], [out], attrs)
    return out


def _linear(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x, out = b.rows(b.view(a["x"]), rank=2), b.result(node)
    weight, group = b.product_weight(a["weight"], "weight_group")
    store, attrs = store_of_linear(b, a, x)
    b.step("linear", [x, *weight, *store], [flat_output(out, x)], {**group, **attrs})
    return out


def store_of_linear(b: Builder, a: Mapping[str, Any], x: View) -> tuple[list[View], dict[str, bool | str]]:
    """Returns the operands of a linear's epilogue, bias and residual, and its attributes. ``x`` [M, K] is the linear's
    input.
    """
    inputs: list[View] = []
    attrs: dict[str, bool | str] = {}
    if a["bias"] is not None:
        inputs.append(b.unit(b.view(a["bias"])))
    if a.get("residual") is not None:
        residual = b.view(a["residual"])
        inputs.append(b.unit(b.reshaped(residual, (*x.shape[:-1], residual.shape[-1]))))
        attrs["has_residual"] = True
    if a["activation"]:
        attrs["activation"] = a["activation"]
    return inputs, attrs


def norm_inputs(b: Builder, a: Mapping[str, Any], rank: int) -> tuple[list[View], dict[str, int | float | bool | str]]:
    """Returns the operands of a norm, first x as rows with at most ``rank`` dimensions, and the step's attributes."""
    x = b.rows(b.view(a["x"]), rank)
    inputs = [x]
    if "residual" in a:
        residual = b.view(a["residual"])
        if residual.shape != b.view(a["x"]).shape:
            raise b.unsupported("x and residual differ in shape")
        inputs.append(b.reshaped(b.unit(residual), x.shape))
    attrs: dict[str, int | float | bool | str] = {"eps": float(a["eps"])}
    for name in ("weight", "bias"):
        if name in a:
            attrs[f"has_{name}"] = a[name] is not None
            if a[name] is not None:
                inputs.append(b.unit(b.view(a[name])))
    return inputs, attrs


def _norm(op: str) -> Handler:
    def lower(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
        inputs, attrs = norm_inputs(b, a, rank=3)
        x = inputs[0]
        if "residual" in a:
            outs = [b.buffer(b.shape(node, i)) for i in (0, 1)]
            b.step(op, inputs, [flat_output(o, x) for o in outs], attrs)
            return tuple(outs)
        out = b.result(node)
        b.step(op, inputs, [flat_output(out, x)], attrs)
        return out

    return lower


_NUMBERS: Mapping[Kind, Callable[[Any], int | float | bool | str]] = {
    "number": float,
    "flag": bool,
    "integer": int,
    "string": str,
}


_STEP_INPUTS = (*ATTENTION_PORTS, "ends_table", SLOTS, "ends_slots")
"""Operands that ops of caches read as the step has them."""


def declared(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Lowers an op whose arguments have the names of the operands and attributes that ``OPS`` declares for its step.

    Operands other than ``_STEP_INPUTS`` have unit inner strides. An operand that is None is left out, and the flag
    about it is false, or left out if ``OPS`` allows that. The operand ``cache`` is that of the argument ``state``, or
    of ``k_cache`` and ``v_cache``; the operand ``ends`` is that of ``ends_k_cache`` and ``ends_v_cache``. Results that
    ``OPS`` doesn't declare are these caches after the step. ``ew.NAME_with_ends`` is a step of NAME.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema
    name = schema.name.removeprefix("ew::").removesuffix("_with_ends")
    op = OPS[name]
    caches = [a[argument] for argument in ("state", "k_cache", "v_cache") if argument in a]
    ends = [a[argument] for argument in ("ends_k_cache", "ends_v_cache") if a.get(argument) is not None]
    a = {"ends_slots": None, **a, "ends": _cache_operand(b, ends) if ends else None}
    inputs: list[View | Operand] = []
    for declared_input in op.inputs:
        if declared_input.name == "cache":
            inputs.append(_cache_operand(b, caches))
        elif (value := a[declared_input.name]) is None:
            continue
        elif isinstance(value, Operand):
            inputs.append(value)
        else:
            inputs.append(b.view(value) if declared_input.name in _STEP_INPUTS else b.unit(b.view(value)))
    there = {i.when: a[i.name] is not None for i in op.inputs if i.when not in ("", OPTIONAL)}
    attrs: dict[str, int | float | bool | str] = {}
    for attribute in op.attributes:
        if attribute.name in a:
            attrs[attribute.name] = _NUMBERS[attribute.kind](a[attribute.name])
        elif (flag := there.get(attribute.name)) is not None and (flag or attribute.needed):
            attrs[attribute.name] = flag
    results = len(op.outputs)
    if len(schema.returns) == 1:
        outs = [b.result(node)]
    else:
        outs = [b.buffer(b.shape(node, i), b.dtype(node.meta["val"][i])) for i in range(results)]
    b.step(name, inputs, outs, attrs)
    return outs[0] if len(schema.returns) == 1 else (*outs, *[*caches, *ends][: len(schema.returns) - results])


def _gated_activation(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x, out = b.rows(b.view(a["gate_up"])), b.result(node)
    b.step("gated_activation", [x], [flat_output(out, x)], {"kind": a["kind"]})
    return out


def _take_rows(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    x, rows = b.view(a["x"]), b.unit(b.view(a["rows"]))
    flat = b.unit(b.reshaped(x, (x.shape[0], elements(x.shape[1:]))))
    out = b.result(node)
    target = b.reshaped(out, (out.shape[0], flat.shape[1]))
    if b.form.panels and flat.kind == "buffer" and flat.dtype == "i32":  # 4 bytes are copied, whatever they mean
        flat, target = replace(flat, dtype="f32"), replace(target, dtype="f32")
    b.step("take_rows", [flat, rows], [target])
    return out


def _cache_operand(b: Builder, caches: Sequence[Any]) -> Operand:
    """Returns a layer's cache as one operand. ``caches`` are its parts: keys and values, or the state.

    Raises UnsupportedModelError if they aren't the parts of one layer's cache.
    """
    refs = [cache for cache in caches if isinstance(cache, CacheRef)]
    if [ref.half for ref in refs] not in (["k", "v"], [STATE]) or len({ref.name for ref in refs}) != 1:
        raise b.unsupported("its caches are not those of one layer")
    return Operand(kind="cache", name=refs[0].name, dtype="f32", shape=(), strides=())


def _paged_attention(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    names = ("first_blocks", "last_blocks", "best_blocks", "all_below")
    return declared(b, node, {**a, **(dict(zip(names, a["choice"], strict=True)) if a["choice"] else {})})


def _attention(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Lowers attention without a cache. The type of keys is an attribute only if it isn't f32, as in programs of older
    versions.
    """
    return declared(b, node, a if a["dtype"] != "f32" else {k: v for k, v in a.items() if k != "dtype"})


ew = torch.ops.ew

HANDLERS: Mapping[Any, Handler] = {
    ew.embedding.default: _embedding,
    ew.linear.default: _linear,
    ew.rms_norm.default: _norm("rms_norm"),
    ew.layer_norm.default: _norm("layer_norm"),
    ew.add_rms_norm.default: _norm("add_rms_norm"),
    ew.add_layer_norm.default: _norm("add_layer_norm"),
    ew.rope_table.default: declared,
    ew.rope.default: declared,
    ew.gated_activation.default: _gated_activation,
    ew.attention.default: _attention,
    ew.paged_attention.default: _paged_attention,
    ew.rope_kv_write_with_ends.default: declared,
    ew.take_rows.default: _take_rows,
}
