"""The calls of a Program, and the channels that a pass has scaled on purpose (AWQ), as the weights around them say."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE
from enginewright.passes.ir.scaled import Rotated, Scaled
from enginewright.passes.ir.weights import WeightExpr
from enginewright.runtime.shared.contracts import FloatArray

from .probes import ADDED_NORMS, LINEARS, NORMS, Call, Epilogue, Piece, epilogue_of, owner_of, pieces_of
from .values import ValueName

Found = TypeVar("Found", bound=WeightExpr)


@dataclass(frozen=True)
class Scaling:
    """The transformations of a program's values that its weights undo.

    Attributes:
        scales: the factors [N] of each scaled value [T, N].
        unknown: scaled values whose factors are unknown.
        rotations: the block size of each value that was rotated before it was scaled.
    """

    scales: dict[ValueName, FloatArray] = field(default_factory=dict)
    unknown: set[ValueName] = field(default_factory=set)
    rotations: dict[ValueName, int] = field(default_factory=dict)


def scaling_of(program: Program, calls: Sequence[Call]) -> Scaling:
    """Reads the scaling of each value from a program's weights.

    ``Scaled`` columns of a product undo the scale of its input. ``Scaled`` rows, or a norm's weight, scale the output.
    """
    scaling = Scaling()
    attending = {call.where[0] for call in calls if "attention" in call.op and call.where}
    for call in calls:
        assert isinstance(call.key, Node)
        if call.op not in LINEARS | NORMS | ADDED_NORMS:
            continue
        expr = program.weight_of(bound_arguments(call.key).get("weight"))
        for rotated in _of_type(Rotated, expr):
            for piece in call.pieces:
                if rotated.axis == -1 or rotated.start <= piece.start < rotated.stop:
                    scaling.rotations[ValueName(piece.path, "input" if rotated.axis == -1 else "output")] = rotated.size
        for scaled in _of_type(Scaled, expr):
            factors: FloatArray = scaled.factors.values.numpy()
            if scaled.divide:
                factors = np.reciprocal(factors)
            if call.op in LINEARS and factors.shape[0] == 1:  # columns
                for piece in call.pieces:
                    _put(scaling, ValueName(piece.path, "input"), np.reciprocal(factors[0]))
            elif call.op in LINEARS:
                for piece in call.pieces:
                    _put(scaling, ValueName(piece.path, "output"), factors[piece.start : piece.stop, 0])
            elif call.where:
                _put(scaling, ValueName(call.where[0], "output"), factors)
    for path in attending:  # its values are a linear's output and another's input, of which the scales are known
        if any(name.path.startswith(f"{path}.") for name in (*scaling.scales, *scaling.rotations)):
            scaling.unknown.update((ValueName(path, "value"), ValueName(path, "context")))
    scaling.unknown.update(scaling.rotations)
    return scaling


def _put(found: Scaling, name: ValueName, scale: FloatArray) -> None:
    if (scale != 1).any():
        before = found.scales.get(name)
        found.scales[name] = (scale if before is None else before * scale).astype(np.float32)


def _of_type(wanted: type[Found], expr: WeightExpr | None) -> Iterator[Found]:
    while expr is not None:
        if isinstance(expr, wanted):
            yield expr
        expr = getattr(expr, "base", None)


def calls_of(program: Program) -> list[Call]:
    """The calls of a program, but those that only pick one of several results."""
    return [
        _call(program, node)
        for node in program.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]


def _call(program: Program, node: Node) -> Call:
    value = node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else (value,)
    several = isinstance(value, (tuple, list))
    writes = tuple((i, (node, i) if several else node) for i, v in enumerate(results) if _is_float(v))
    reads: list[tuple[int, Hashable]] = []
    for slot, argument in enumerate(node.args):
        if isinstance(argument, Node):
            reads += [(slot, value_key(argument))] if _is_computed(argument) else []
        elif isinstance(argument, (list, tuple)):
            reads += [(-1, value_key(a)) for a in argument if isinstance(a, Node) and _is_computed(a)]
    reads += [(-1, value_key(a)) for a in node.kwargs.values() if isinstance(a, Node) and _is_computed(a)]
    op, where = op_name(node), tuple(node.meta.get(WHERE, ()))
    pieces: tuple[Piece, ...] = ()
    epilogue: Epilogue = ""
    if op in LINEARS:
        arguments = bound_arguments(node)
        expr = program.weight_of(arguments["weight"])
        if expr is not None:
            parts = [(part.source, part.size) for part in expr.parts(0)]
            pieces = pieces_of(where, str(arguments["weight"].target), parts)
        epilogue = epilogue_of(bool(arguments.get("activation")), arguments.get("residual") is not None)
    weight = bound_arguments(node).get("weight") if "norm" in op else None
    owner = owner_of(where, str(weight.target)) if isinstance(weight, Node) else None
    return Call(node, op, where, tuple(reads), writes, pieces, epilogue, owner or "")


def op_name(node: Node) -> str:
    """ "linear" of ew.linear, "aten.linear" of another library's."""
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        if name in ("_to_copy", "to") and node.meta["val"].dtype == torch.bfloat16:
            return "cast_bf16"
        return name if namespace == "ew" else f"{namespace}.{name}"
    return getattr(node.target, "__name__", str(node.target))


def value_key(node: Node) -> Hashable:
    """The key of a node's value: the node, or the call and the result's number if the call has several results."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, Node)
        return source, index
    return node


def _is_computed(node: Node) -> bool:
    return node.op == "call_function" and _is_float(node.meta.get("val"))


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32
