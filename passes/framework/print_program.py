"""Prints a program as stable text, for people and golden tests. Names are numbered, and symbolic sizes are T, B, R, M
and P.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx.node import Node

from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE, join_where

from ..formats.rounding import TORCH_DTYPES

_NAMES = {TORCH_DTYPES[name]: name for name in reversed(tuple(TORCH_DTYPES))}  # of one type's names, the first


def print_program(program: Program, *, node_names: bool = False) -> str:
    """Returns a text with the program's inputs, calls, results and weights, one per line.

    Args:
        program: the program.
        node_names: True names results by their nodes, whose names don't change from pass to pass; False numbers them.
    """
    names: dict[Node, str] = {}
    lines: list[str] = []
    calls: list[str] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            names[node] = f"%{node.target}"
            lines.append(f"input  {names[node]}: {_type(program, node.meta['val'])}")
        elif node.op == "get_attr":
            names[node] = f"@{node.target}"
        elif node.op == "call_function":
            names[node] = f"%{node.name if node_names else len(calls)}"
            text = f"{names[node]} = {_target(node)}({_arguments(node, names)})"
            calls.append(f"{text} : {_type(program, node.meta['val'])}{_where(node)}")
        elif node.op == "output":
            calls.append(f"return {_argument(node.args[0], names)}")
    for group in program.cache_groups:
        layers = ",".join(str(i) for i in group.layers)
        lines.append(
            f"cache  {group.name}: layers {layers} kv_heads {group.kv_heads} head {group.key_head_size}/"
            f"{group.value_head_size} window {group.window} {group.dtype} block {group.block_size}"
            + (" values in keys" if group.values_in_keys else "")
        )
    for name in sorted(str(n.target) for n in program.graph.nodes if n.op == "get_attr"):
        expr = program.weights[name]
        shape = ", ".join(str(s) for s in expr.shape)
        lines.append(f"weight @{name}: {_dtype(expr.dtype)}[{shape}] = {expr.describe()}")
    return "\n".join(lines + calls) + "\n"


def _target(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}.{target._schema.name.split('::')[1]}"
        overload = target._overloadname
        return name if overload == "default" else f"{name}.{overload}"
    return getattr(target, "__name__", str(target))


def _arguments(node: Node, names: dict[Node, str]) -> str:
    texts = [_argument(a, names) for a in node.args]
    return ", ".join(texts + [f"{k}={_argument(v, names)}" for k, v in sorted(node.kwargs.items())])


def _argument(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(v, names) for v in value) + "]"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def _type(program: Program, val: Any) -> str:
    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(_type(program, v) for v in val) + ")"
    if isinstance(val, torch.Tensor):
        return f"{_dtype(val.dtype)}[{', '.join(_size(program.expression(s)) for s in val.shape)}]"
    if isinstance(val, torch.SymInt):
        return f"int = {program.expression(val)}"
    return type(val).__name__


@lru_cache(maxsize=4096)  # sympy's printing is slow, and sizes repeat
def _size(size: sympy.Expr) -> str:
    return str(size)


def _dtype(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _where(node: Node) -> str:
    where = join_where(node.meta.get(WHERE, ()))
    return f"  # {where}" if where else ""
