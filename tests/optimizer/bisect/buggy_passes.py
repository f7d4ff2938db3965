"""Passes with a bug, to be put into the pipeline: each does to one layer what it shouldn't."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Pass, PassContext, PassResult
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE
from enginewright.passes.ir.weights import Apply, Concat
from enginewright.passes.quantization.quantize_linears import QuantizeLinears

aten, ew = torch.ops.aten, torch.ops.ew

LINEARS = (ew.linear.default, ew.quantized_linear.default)


class BuggyPass(Pass):
    """Changes what is at a module's path; ``bug`` is one of the functions below."""

    name = "polish"
    bug: ClassVar[Callable[[Program, str], None]]
    path: ClassVar[str]

    def call(self, program: Program, context: PassContext) -> PassResult:
        type(self).bug(program, self.path)
        return PassResult(1)


def buggy(bug: Callable[[Program, str], None], path: str) -> Pass:
    """A pass "polish" that says it is exact."""
    return type("Polish", (BuggyPass,), {"bug": staticmethod(bug), "path": path})()


def buggy_quantization(bug: Callable[[Program, str], None], path: str) -> Pass:
    """``quantize_linears``, with a bug on top."""

    class Buggy(QuantizeLinears):
        def call(self, program: Program, context: PassContext) -> PassResult:
            result = super().call(program, context)
            bug(program, path)
            return result

    return Buggy()


def scale_weight(program: Program, path: str) -> None:
    """A linear's weight, or that of the product it is fused into, times 1.01: of a quantized one the scales."""
    node = _linear(program, path)
    arguments = bound_arguments(node)
    argument = "weight" if arguments.get("weight_scales") is None else "weight_scales"
    weight = arguments[argument]
    expr = program.weight_of(weight)
    assert expr is not None
    scaled = Apply(aten.mul.Tensor, (expr, 1.01), (), expr.shape, expr.dtype)
    node.replace_input_with(weight, program.weight(f"{weight.target}.polished", scaled, where=weight.meta[WHERE]))


def swap_gate_up(program: Program, path: str) -> None:
    """The two halves of a fused gate and up come in the other order."""
    node = _linear(program, f"{path}.gate_proj")
    weight = bound_arguments(node)["weight"]
    expr = program.weight_of(weight)
    if isinstance(expr, Concat):
        other = replace(expr, bases=expr.bases[::-1])
    else:  # integers
        other = replace(expr, base=replace(expr.base, bases=expr.base.bases[::-1]))  # type: ignore[union-attr]
    node.replace_input_with(weight, program.weight(f"{weight.target}.polished", other, where=weight.meta[WHERE]))


def shift_rope(program: Program, path: str) -> None:
    """The key of an attention is turned by the position after its own."""
    key = [n for n in program.nodes_of(ew.rope.default) if n.meta[WHERE] == (path,)][1]
    table = key.args[1]
    assert isinstance(table, Node)
    with program.inserting_before(key):
        positions = program.call(aten.add.Tensor, table.args[0], 1, where=(path,))
        shifted = program.call(ew.rope_table.default, positions, *table.args[1:], where=table.meta[WHERE])
    key.update_arg(1, shifted)


def drop_bias(program: Program, path: str) -> None:
    """A linear, or the product that it is fused into, goes without its bias."""
    node = _linear(program, path)
    bias = bound_arguments(node)["bias"]
    node.args = tuple(None if a is bias else a for a in node.args)


def _linear(program: Program, path: str) -> Node:
    (node,) = [n for n in program.nodes_of(*LINEARS) if path in n.meta[WHERE]]
    return node
