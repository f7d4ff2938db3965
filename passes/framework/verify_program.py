"""The verifier of the IR, which runs after every pass.

It checks that the graph is ordered and closed, that every op is functional and known, that each node's recorded shape
and dtype are those of its op's result, that weights exist with the recorded shape, and that provenance is complete.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Node

from enginewright.passes.ir.program import Program, depends_on
from enginewright.passes.ir.provenance import WHERE
from enginewright.runtime.shared.errors import PassError


def verify_program(program: Program, *, after: str = "capture") -> None:
    """Checks a program. Raises PassError naming the pass ``after`` that ran last, the invalid node, and the problem."""
    known: set[Node] = set()
    verified: dict[Node, tuple[object, ...]] = {}
    for node in program.graph.nodes:
        if reason := _problem(program, node, known):
            raise PassError(f"after {after}: node {node.name} ({node.target}): {reason}")
        known.add(node)
        if node.op == "call_function":
            verified[node] = depends_on(node)
    program.verified = verified
    if not any(node.op == "output" for node in known):
        raise PassError(f"after {after}: the program has no output")
    logits = program.value(program.logits)
    if logits.dim() != 2:
        raise PassError(f"after {after}: the logits have rank {logits.dim()}, not 2")


def _problem(program: Program, node: Node, known: set[Node]) -> str | None:
    if any(arg not in known for arg in node.all_input_nodes):
        return "uses a node that comes later or isn't in the graph"
    if node.op == "output":
        return None
    if "val" not in node.meta:
        return "has no value"
    if node.op == "placeholder":
        return None if isinstance(node.meta["val"], FakeTensor) else "isn't a tensor"
    where = node.meta.get(WHERE)
    if not isinstance(where, tuple) or not where or not all(isinstance(w, str) for w in where):
        return "has no provenance"
    if node.op == "get_attr":
        return _weight_problem(program, node)
    if node.op != "call_function":
        return f"is a {node.op}"
    return _call_problem(program, node)


def _weight_problem(program: Program, node: Node) -> str | None:
    name = str(node.target)
    if name not in program.weights:
        return f"the weight {name} isn't in the store"
    expr, val = program.weights[name], program.value(node)
    if tuple(val.shape) != expr.shape or val.dtype != expr.dtype:
        return f"the store has {expr.dtype} {expr.shape}, the graph {val.dtype} {tuple(val.shape)}"
    for axis in range(len(expr.shape)):
        parts = expr.parts(axis)
        if not parts:
            return f"no source is known for axis {axis}"
    return None


def _call_problem(program: Program, node: Node) -> str | None:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in ("aten", "ew"):
            return f"ops of {target.namespace} have no meaning here"
        if target._schema.is_mutable:
            return "is not functional"
    elif getattr(target, "__module__", "") not in ("_operator", "operator", "torch", "math"):
        return "isn't an op"
    if target is operator.getitem or not isinstance(target, torch._ops.OpOverload):
        return None
    if _same(program.verified.get(node), depends_on(node)):
        return None  # inferring is most of a verification's time, and would give the same again
    return _compare(program, program.infer(node), node.meta["val"])


def _same(old: tuple[object, ...] | None, new: tuple[object, ...]) -> bool:
    """Returns True if an op's recorded inputs, as ``depends_on`` returns them, haven't changed since the last
    verification.

    Values (the last entries) never change in place, so they are compared by identity.
    """
    if old is None or old[:3] != new[:3]:
        return False
    before, after = old[3], new[3]
    assert isinstance(before, tuple)
    assert isinstance(after, tuple)
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _compare(program: Program, new: Any, old: Any) -> str | None:
    if new is old:
        return None
    if isinstance(new, (tuple, list)):
        if not isinstance(old, (tuple, list)) or len(new) != len(old):
            return "gives another number of results than recorded"
        return next((r for n, o in zip(new, old, strict=True) if (r := _compare(program, n, o))), None)
    if not isinstance(new, torch.Tensor):
        return None
    if not isinstance(old, torch.Tensor) or new.dtype != old.dtype:
        return f"gives {new.dtype}, recorded is {getattr(old, 'dtype', old)}"
    shapes = [tuple(program.expression(s) for s in t.shape) for t in (new, old)]
    if shapes[0] != shapes[1]:
        return f"gives shape {shapes[0]}, recorded is {shapes[1]}"
    return None
