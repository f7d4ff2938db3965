"""The calls of a Program as records: module paths, values that are read and written, and the linears of fused
products.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch
from torch.fx.node import Node

from .program import Program
from .provenance import WHERE

LINEARS = frozenset({"linear", "quantized_linear"})
"""Names of the products whose weight has the rows of one or several linears of the model."""
NORMS = frozenset({"rms_norm", "layer_norm"})
ADDED_NORMS = frozenset({"add_rms_norm", "add_layer_norm"})
"""Names of the ops that add two values and normalise the sum. Their results are the norm and the sum."""

Epilogue = Literal["", "activation", "residual", "both"]
"""The operations that a product applies to its sums before it writes them: an activation, the addition of a residual,
or both.
"""


@dataclass(frozen=True)
class Piece:
    """A linear's part of a product. Its rows ``start:stop`` of the weight, which are columns of the result, are from
    the linear at ``path``.
    """

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """A node of a Program, or a step of a lowered program.

    Attributes:
        key: the node, or the step's index.
        op: the op's name, such as "linear" or "add_rms_norm"; "aten.NAME" for an op of ATen.
        where: module paths.
        reads: (index of the argument, key of its value) for each float argument. The index is -1 if the argument is in
            a list or passed by name.
        writes: (index of the result, key of its value) for each float result.
        pieces: the linears of a product in ``LINEARS``; () for other ops.
        epilogue: the epilogue of such a product; "" for other ops.
        owner: the path of the module that a norm's weight belongs to; "" if there is no such weight.
        views: in lowered programs, ("read", index of the argument) or ("write", index of the result) -> the part of the
            value that is read or written.
    """

    key: Hashable
    op: str
    where: tuple[str, ...]
    reads: tuple[tuple[int, Hashable], ...]
    writes: tuple[tuple[int, Hashable], ...]
    pieces: tuple[Piece, ...] = ()
    epilogue: Epilogue = ""
    owner: str = ""
    views: Mapping[tuple[str, int], Hashable] = field(default_factory=dict)


def calls_of(program: Program) -> list[Call]:
    """Returns the calls of a program in order, without those that only select one of several results."""
    return [
        _call(program, node)
        for node in program.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]


def _call(program: Program, node: Node) -> Call:
    op, where = op_name(node), tuple(node.meta.get(WHERE, ()))
    pieces: tuple[Piece, ...] = ()
    epilogue: Epilogue = ""
    owner = None
    if op in LINEARS:
        arguments = bound_arguments(node)
        expr = program.weight_of(arguments["weight"])
        if expr is not None:
            parts = [(part.source, part.size) for part in expr.parts(0)]
            pieces = pieces_of(where, str(arguments["weight"].target), parts)
        epilogue = epilogue_of(bool(arguments.get("activation")), arguments.get("residual") is not None)
    elif "norm" in op and isinstance(weight := bound_arguments(node).get("weight"), Node):
        owner = owner_of(where, str(weight.target))
    return Call(node, op, where, tuple(_reads(node)), tuple(_writes(node)), pieces, epilogue, owner or "")


def _reads(node: Node) -> Iterator[tuple[int, Hashable]]:
    for slot, argument in enumerate(node.args):
        if isinstance(argument, (list, tuple)):
            yield from ((-1, value_key(a)) for a in argument if isinstance(a, Node) and _is_computed(a))
        elif isinstance(argument, Node) and _is_computed(argument):
            yield slot, value_key(argument)
    yield from ((-1, value_key(a)) for a in node.kwargs.values() if isinstance(a, Node) and _is_computed(a))


def _writes(node: Node) -> Iterator[tuple[int, Hashable]]:
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        yield from ((i, (node, i)) for i, result in enumerate(value) if _is_float(result))
    elif _is_float(value):
        yield 0, node


def bound_arguments(node: Node) -> dict[str, Any]:
    """Returns a call's arguments by name, in the order of the op's schema, with defaults filled in."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    result: dict[str, Any] = {}
    for i, argument in enumerate(target._schema.arguments):
        if i < len(node.args):
            result[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            result[argument.name] = node.kwargs[argument.name]
        else:
            result[argument.name] = argument.default_value
    return result


def op_name(node: Node) -> str:
    """Returns "linear" for ``ew.linear``, "aten.linear" for an op of another library, and "cast_bf16" for a cast to
    bfloat16.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        if name in ("_to_copy", "to") and node.meta["val"].dtype == torch.bfloat16:
            return "cast_bf16"
        return name if namespace == "ew" else f"{namespace}.{name}"
    return getattr(node.target, "__name__", str(node.target))


def value_key(node: Node) -> Hashable:
    """Returns the key of a node's value: the node, or (call, index of the result) if it selects one result of a
    call.
    """
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, Node)
        return source, index
    return node


def _is_computed(node: Node) -> bool:
    return node.op == "call_function" and _is_float(node.meta.get("val"))


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def epilogue_of(activation: bool, residual: bool) -> Epilogue:
    """Returns the epilogue of a product with an activation, a residual, both or neither."""
    if activation and residual:
        return "both"
    return "residual" if residual else "activation" if activation else ""


def pieces_of(where: Sequence[str], name: str, parts: Sequence[tuple[str, int]]) -> tuple[Piece, ...]:
    """Identifies the linears whose rows a product's weight contains.

    Args:
        where: the product's module paths, in any order; some may be of other calls that were fused with the linears.
        name: the weight's name in the program, such as "layers.0.q_proj+k_proj.weight".
        parts: (source tensor, number of rows) of each part of the weight, in order.

    Returns:
        a piece for each linear; () if the linears can't be identified.
    """
    total = sum(size for _, size in parts)
    # Rows of one tensor may come in several pieces, where pruning left some out.
    parts = [(source, sum(size for _, size in run)) for source, run in groupby(parts, key=lambda part: part[0])]
    if len(where) == 1:
        return (Piece(where[0], 0, total),)
    by_source = [owner_of(where, source) for source, _ in parts]
    by_name = [owner_of(where, one) for one in _unfused(name)]
    if None not in by_source:
        owners = by_source
    elif len(by_name) == len(parts):  # sources of other names, such as a GGUF file's
        owners = by_name
    else:
        owners = by_name * len(parts) if len(by_name) == 1 else [None]
    pieces: list[Piece] = []
    start = 0
    for owner, (_, size) in zip(owners, parts, strict=False):
        if owner is None:
            return ()
        if pieces and pieces[-1].path == owner:
            pieces[-1] = Piece(owner, pieces[-1].start, start + size)
        else:
            pieces.append(Piece(owner, start, start + size))
        start += size
    return tuple(pieces)


def owner_of(where: Sequence[str], tensor: str) -> str | None:
    """Returns the longest module path in ``where`` that is a prefix of a tensor's name; None if there is none."""
    return max((path for path in where if tensor.startswith(f"{path}.")), key=len, default=None)


def _unfused(name: str) -> list[str]:
    """Splits the name of a fused weight into those of its parts: "a.q+k.weight" into "a.q.weight" and "a.k.weight"."""
    words = name.split(".")
    joined = [i for i, word in enumerate(words) if "+" in word]
    if len(joined) != 1:
        return [name]
    (i,) = joined
    return [".".join([*words[:i], one, *words[i + 1 :]]) for one in words[i].split("+")]
