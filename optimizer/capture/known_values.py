"""Evaluates values of a captured program that depend only on constants and a sequence's length and positions.

Capture runs one whole sequence at a time. A model may therefore count its tokens instead of reading their positions,
and it knows the types of all tokens. Such values are equal for all sequences of one length.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx.node import Node, map_arg

from enginewright.passes.ir.program import Program, named_symbol
from enginewright.passes.ir.provenance import WHERE
from enginewright.passes.ir.weights import COMPUTED, Source

aten = torch.ops.aten

_T = named_symbol("T")

_SIZES: tuple[object, ...] = (
    aten.sym_size.int,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.new_full.default,
    aten.new_zeros.default,
    aten.new_ones.default,
)
"""Ops that read only the shape of their argument."""

_FILLINGS: tuple[object, ...] = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_MASKINGS: tuple[Any, ...] = (aten.mul.Tensor, *_FILLINGS)

_LENGTHS = (2, 5, 17)


class UnknownError(Exception):
    """Says why a value can't be evaluated."""


def known_nodes(program: Program) -> set[Node]:
    """Returns the nodes that depend on neither tokens nor parameters, only on constants and a sequence's length and
    positions.
    """
    known: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            fine = node.target == "positions"
        elif node.op == "get_attr":
            weight = program.weights[str(node.target)]
            fine = isinstance(weight, Source) and weight.name.startswith(COMPUTED)
        elif node.op == "call_function":
            ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten"
            fine = node.target in _SIZES or (not ours and all(a in known for a in node.all_input_nodes))
        else:
            fine = False
        if fine:
            known.add(node)
    return known


class Sequence:
    """Known values for one sequence of some length, each computed once."""

    def __init__(self, program: Program, known: set[Node], length: int) -> None:
        self.known, self.length = known, length
        self._program = program
        self._values: dict[Node, Any] = {}

    def shape(self, node: Node) -> list[int]:
        """Evaluates the shape of a node with one tensor. Raises UnknownError if it depends on more than the length."""
        return [self._size(s) for s in node.meta["val"].shape]

    def value(self, node: Node) -> Any:
        """Returns the value of a known node.

        For a node of which only the shape is used, it is an empty tensor of that shape.
        """
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def call(self, node: Node, values: dict[Node, torch.Tensor]) -> Any:
        """Returns the value of a call, with arguments from ``values`` or else evaluated. Raises UnknownError if torch
        raises.
        """
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: values[n] if n in values else self.value(n))
        assert callable(node.target)
        with torch.no_grad():
            try:
                return node.target(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError) as e:
                raise UnknownError(f"{node.target} can't be evaluated: {e}") from e

    def _compute(self, node: Node) -> Any:
        value = node.meta["val"]
        if node not in self.known:
            if not isinstance(value, torch.Tensor):
                return self._size(value)
            return torch.zeros(self.shape(node), dtype=value.dtype)
        if node.op == "placeholder":
            return torch.arange(self.length, dtype=value.dtype)
        if node.op == "get_attr":
            return self._program.weights[str(node.target)].evaluate()
        return self.call(node, {})

    def _size(self, size: Any) -> int:
        expression = self._program.expression(size)
        if expression.free_symbols - {_T}:
            raise UnknownError("sizes depend on more than the number of tokens")
        return int(expression.xreplace({_T: sympy.Integer(self.length)}))


def read_given_positions(program: Program, longest: int) -> None:
    """Replaces values that the model computes by counting tokens by the given positions, in place.

    It also replaces a lookup in a table by the table's row if all tokens have the same index, such as their type. The
    results for one whole sequence stay the same. In a step, whose tokens belong to several sequences, only the given
    positions are right.

    ``longest``: the model's maximum sequence length.
    """
    known = known_nodes(program)
    lengths = sorted({n for n in _LENGTHS if n < longest} | {longest})
    sequences = [Sequence(program, known, n) for n in lengths]
    for node in [n for n in program.graph.nodes if n in known and _is_of_tokens(program, n)]:
        users = [u for u in node.users if u not in known]
        if not users:
            continue
        try:
            values = [s.value(node).flatten() for s in sequences]
        except UnknownError:
            continue
        first = int(values[0][0])
        if all(bool((v == first).all()) for v in values):
            for user in users:
                _take_row(program, user, node, first)
        elif all(torch.equal(v, torch.arange(first, first + len(v), dtype=v.dtype)) for v in values):
            _read(program, node, first)
    program.remove_dead_code()


def drop_masks_of_all(program: Program, longest: int) -> None:
    """Removes multiplications by masks of ones, and fills where no mask is set, in place.

    A model of whole texts may multiply by the mask that distinguishes tokens from padding. A packed step has no
    padding. ``longest``: the model's maximum sequence length.
    """
    known = known_nodes(program)
    sequences = [Sequence(program, known, n) for n in sorted({n for n in _LENGTHS if n < longest} | {longest})]
    for node in program.nodes_of(*_MASKINGS):
        mask, others = (node.args[1], node.args[:1]) if node.target in _FILLINGS else (None, node.args[:2])
        if mask is None:
            mask = next((a for a in others if a in known), None)
        tensor = next((a for a in others if a is not mask), None)
        if mask not in known or not isinstance(tensor, Node) or not isinstance(mask, Node) or tensor in known:
            continue
        same = program.shape(tensor) == program.shape(node) and program.value(tensor).dtype == program.value(node).dtype
        neutral = 0 if node.target in _FILLINGS else 1
        try:
            if same and all(bool((s.value(mask) == neutral).all()) for s in sequences):
                program.replace(node, tensor)
        except UnknownError:
            continue
    program.remove_dead_code()


def drop_whole_selections(program: Program) -> None:
    """Replaces selections of all rows in order, x[arange(len(x))], by x, in place. Classification heads have them
    where they pick each text's last token.
    """
    for node in program.nodes_of(aten.index.Tensor):
        x, indices = node.args
        assert isinstance(x, Node) and isinstance(indices, list | tuple)
        rows = indices[0] if len(indices) == 1 else None
        counts = isinstance(rows, Node) and rows.target is aten.arange.default and len(rows.args) == 1
        if counts and program.shape(rows) == program.shape(x)[:1]:  # type: ignore[arg-type]  # a Node
            program.replace(node, x)
    program.remove_dead_code()


def _is_of_tokens(program: Program, node: Node) -> bool:
    """Returns True if a value has one integer for each token: [T] or [1, T]."""
    value = node.meta["val"]
    if (
        node.op != "call_function"
        or not isinstance(value, torch.Tensor)
        or value.dtype not in (torch.int32, torch.int64)
    ):
        return False
    shape = program.shape(node)
    return bool(shape) and shape[-1] == _T and all(size == 1 for size in shape[:-1])


def _take_row(program: Program, user: Node, ids: Node, row: int) -> None:
    """Replaces an embedding lookup by the row ``row`` of its table, if the result is only added to a value of each
    token.

    Args:
        program: the program.
        user: the lookup; other nodes are left unchanged.
        ids: the ids, which are all ``row``.
        row: the row.
    """
    if user.target is not aten.embedding.default or user.args[1] is not ids:
        return
    table = user.args[0]
    assert isinstance(table, Node)
    shape = program.shape(user)
    others = [a for u in user.users for a in u.all_input_nodes if a is not user]
    if any(u.target is not aten.add.Tensor for u in user.users) or any(program.shape(o) != shape for o in others):
        return
    where = user.meta[WHERE]
    with program.inserting_before(user):
        new = program.call(aten.slice.Tensor, table, 0, row, row + 1, where=where)  # [1, H]
        for _ in shape[2:]:
            new = program.call(aten.unsqueeze.default, new, 0, where=where)
    program.replace(user, new)


def _read(program: Program, node: Node, first: int) -> None:
    positions, where = program.inputs["positions"], node.meta[WHERE]
    if _comes_of(node, positions):
        return
    with program.inserting_before(node):
        new = program.call(aten._to_copy.default, positions, where=where, dtype=program.value(node).dtype)
        if first:
            new = program.call(aten.add.Tensor, new, first, where=where)
        for _ in program.shape(node)[1:]:
            new = program.call(aten.unsqueeze.default, new, 0, where=where)
    program.replace(node, new)


def _comes_of(node: Node, source: Node) -> bool:
    waiting, seen = [node], {node}
    while waiting:
        for argument in waiting.pop().all_input_nodes:
            if argument is source:
                return True
            if argument not in seen:
                seen.add(argument)
                waiting.append(argument)
    return False
