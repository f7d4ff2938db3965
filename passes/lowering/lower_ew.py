"""Lowers each ``ew`` op to a step. docs/inside/lowered-ops.md lists the steps' operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import Node

from enginewright.runtime.shared.lowered_program import Operand
from enginewright.runtime.shared.op_schema import OPS, OPTIONAL, Kind
from enginewright.runtime.shared.step_schema import ATTENTION_PORTS

from .builder import Builder, CacheRef, StoredRef, Value, WeightRef
from .views import View, elements, reshape

Handler = Callable[[Builder, Node, Mapping[str, Any]], Value]
"""A function that lowers a node. Its arguments are those of the op by name, nodes as Values; it returns the node's
Value.
"""


def flat_output(view: View, like: View) -> View:
    """Returns an output in the flattened shape of its input. Outputs are dense, or of rank 2 or 3 unchanged."""
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
    """Returns the bias and the residual of a linear of ``x`` [M, K], and the attributes of its epilogue."""
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
    """Returns the inputs of a norm, first x as rows of at most rank ``rank``, and its attributes."""
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


def declared(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Lowers an op whose arguments have the names of the operands and attributes that ``OPS`` declares for its step.

    Operands have unit inner strides. An operand that is None is left out, and the attribute about it is false.
    """
    name = str(node.target.name()).removeprefix("ew::")  # type: ignore[union-attr]
    op = OPS[name]
    inputs = [b.unit(b.view(a[i.name])) for i in op.inputs if a[i.name] is not None]
    attrs: dict[str, int | float | bool | str] = {
        i.when: a[i.name] is not None for i in op.inputs if i.when not in ("", OPTIONAL)
    }
    attrs |= {t.name: _NUMBERS[t.kind](a[t.name]) for t in op.attributes if t.name in a}
    outs = [b.result(node)] if len(op.outputs) == 1 else b.results(node)
    b.step(name, inputs, outs, attrs)
    return outs[0] if len(outs) == 1 else tuple(outs)


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


def cache_operand(b: Builder, k: Any, v: Any) -> Operand:
    """Returns the cache of a layer as an operand, by its two halves k and v."""
    if not (
        isinstance(k, CacheRef) and isinstance(v, CacheRef) and k.name == v.name and (k.half, v.half) == ("k", "v")
    ):
        raise b.unsupported("its caches are not the key and value cache of one layer")
    return Operand(kind="cache", name=k.name, dtype="f32", shape=(), strides=())


def _kv_write(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    cache = cache_operand(b, a["k_cache"], a["v_cache"])
    b.step("kv_write", [b.unit(b.view(a["k"])), b.unit(b.view(a["v"])), b.view(a["slots"]), cache], [])
    return a["k_cache"], a["v_cache"]


def _stored(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    """Lowers a recurrence whose states are in a cache, by its declaration in ``OPS``."""
    name = str(node.target.name()).removeprefix("ew::")  # type: ignore[union-attr]
    op, state = OPS[name], a["state"]
    if not isinstance(state, CacheRef):
        raise b.unsupported("its states are not the cache of a layer")
    inputs: list[View | Operand] = []
    for declared_input in op.inputs:
        if declared_input.name == "cache":
            inputs.append(Operand(kind="cache", name=state.name, dtype="f32", shape=(), strides=()))
        elif (value := a[declared_input.name]) is not None:
            inputs.append(b.unit(b.view(value)) if declared_input.name not in ATTENTION_PORTS else b.view(value))
    attrs: dict[str, int | float | bool | str] = {i.when: a[i.name] is not None for i in op.inputs if i.when}
    attrs |= {t.name: _NUMBERS[t.kind](a[t.name]) for t in op.attributes if t.name in a}
    out = b.buffer(b.shape(node, 0))
    b.step(name, inputs, [out], attrs)
    return out, state


def _paged_attention(b: Builder, node: Node, a: Mapping[str, Any]) -> Value:
    cache = cache_operand(b, a["k_cache"], a["v_cache"])
    inputs: list[View | Operand] = [b.unit(b.view(a["q"])), cache]
    inputs += [b.view(a[name]) for name in ATTENTION_PORTS]
    if a["sinks"] is not None:
        inputs.append(b.unit(b.view(a["sinks"])))
    if a["slopes"] is not None:
        inputs.append(b.unit(b.view(a["slopes"])))
    out = b.result(node)
    attrs = {"scale": float(a["scale"]), "window": int(a["window"]), "softcap": float(a["softcap"])}
    attrs |= {"has_sinks": a["sinks"] is not None}
    if a["slopes"] is not None:
        attrs["has_slopes"] = True
    if a["choice"] is not None:
        names = ("first_blocks", "last_blocks", "best_blocks", "all_below")
        attrs |= dict(zip(names, map(int, a["choice"]), strict=True))
    b.step("paged_attention", inputs, [out], attrs)
    return out


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
    ew.kv_write.default: _kv_write,
    ew.paged_attention.default: _paged_attention,
    ew.stored_convolution.default: _stored,
    ew.stored_scan.default: _stored,
    ew.stored_delta_rule.default: _stored,
    ew.take_rows.default: _take_rows,
}
