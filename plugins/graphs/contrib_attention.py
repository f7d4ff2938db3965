"""Finds the attentions that onnxruntime's GroupQueryAttention can compute, and the calls around them that it replaces.

The operator writes the step's keys and values into a request's slot, and attends to the used part of the slot. It
replaces TensorScatter, Attention and the mask. It may also rotate q and k, and may take q, k and v as one matrix. The
requirements on its inputs are checked here, because onnxruntime checks them only when a step runs
(``onnxruntime/contrib_ops/cpu/bert/group_query_attention_helper.h``).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.views import RESHAPES
from enginewright.passes.ir.program import Program

aten, ew = torch.ops.aten, torch.ops.ew

_HEADS_BY, _ROTATED_BY, _TABLE_BY = 8, 16, 8
"""The numbers of which sizes must be a multiple: of a head, of a head that is rotated, and of the columns of
cosines.
"""


@dataclass(frozen=True)
class GroupQuery:
    """An attention that GroupQueryAttention can compute.

    Attributes:
        node: the ``ew.paged_attention`` call.
        write: the ``ew.kv_write`` call before it, which the operator includes.
        layer: the layer of the cache.
        counts: the numbers of heads of q, k and v: (Nq, Nkv, Nkv).
        size: D, the size of a head.
        q, k, v: [T, heads, D], before the rotation by ``table``.
        packed: the matrix [T, (Nq + 2 Nkv) D] whose columns are q, k and v; None if there is none.
        table: the ``ew.rope_table`` call for the rotation inside the operator; None if it doesn't rotate.
        interleaved: True if adjacent elements are rotated together; False if elements of the two halves are.
    """

    node: Node
    write: Node
    layer: int
    counts: tuple[int, int, int]
    size: int
    q: Node
    k: Node
    v: Node
    packed: Node | None
    table: Node | None
    interleaved: bool


def group_queries(program: Program) -> dict[Node, GroupQuery | str]:
    """Returns for each ``ew.paged_attention`` its GroupQueryAttention, or the reason why that can't compute it."""
    return {node: _group_query(program, node) for node in program.nodes_of(ew.paged_attention.default)}


def _group_query(program: Program, node: Node) -> GroupQuery | str:
    a = bound_arguments(node)
    write = a["k_cache"].args[0]
    if not _is_own(write):
        return "others attend to its cache, too"
    if a["slopes"] is not None:
        return "its scores have slopes (ALiBi)"
    w = bound_arguments(write)
    _, heads, size = (int(n) if n.is_Integer else 0 for n in program.shape(a["q"]))
    _, kv_heads, value_size = (int(n) if n.is_Integer else 0 for n in program.shape(w["v"]))
    if value_size != size:
        return f"heads of values have {value_size} numbers, and those of keys {size}"
    if size % _HEADS_BY:
        return f"heads of {size} numbers, which isn't a multiple of {_HEADS_BY}"
    if heads % kv_heads:
        return f"{heads} heads share {kv_heads} key/value heads"
    q, k, v = a["q"], w["k"], w["v"]
    table, interleaved = _rotation(program, q, k, size)
    if table is not None:
        q, k = q.args[0], k.args[0]
    layer = int(str(w["k_cache"].target).partition(":")[2])
    packed = _packed(program, (q, k, v))
    return GroupQuery(node, write, layer, (heads, kv_heads, kv_heads), size, q, k, v, packed, table, interleaved)


def _is_own(write: object) -> bool:
    """Returns True if ``write`` is an ``ew.kv_write`` whose two results only one attention reads."""
    if not isinstance(write, Node) or write.target is not ew.kv_write.default:
        return False
    readers = {reader for cache in write.users for reader in cache.users}
    return len(readers) == 1 and all(cache.target is operator.getitem for cache in write.users)


def _rotation(program: Program, q: Node, k: Node, size: int) -> tuple[Node | None, bool]:
    """Returns the table with which the operator can rotate both q and k, and True if the rotation is interleaved.

    The table is None if q and k aren't rotated alike, by the requests' own positions, and with a supported size.
    """
    if q.target is not ew.rope.default or k.target is not ew.rope.default:
        return None, False
    first, second = bound_arguments(q), bound_arguments(k)
    table = first["table"]
    alike = all(first[name] == second[name] for name in ("table", "interleaved"))
    if not alike or table.target is not ew.rope_table.default:
        return None, False
    a = bound_arguments(table)
    columns = int(program.shape(table)[-1]) // 2
    fits = size % _ROTATED_BY == 0 and columns % _TABLE_BY == 0
    if not fits or str(a["positions"].target) != "positions" or program.weight_of(a["inv_freq"]) is None:
        return None, False
    return table, bool(first["interleaved"])


def _packed(program: Program, parts: tuple[Node, ...]) -> Node | None:
    """Returns the matrix whose columns are exactly q, k and v in this order; None if there is none."""
    sources, end = set(), 0
    for part in parts:
        if part.target not in RESHAPES:
            return None
        columns = part.args[0]
        if not isinstance(columns, Node) or columns.target is not aten.slice.Tensor:
            return None
        a = bound_arguments(columns)
        _, heads, size = program.shape(part)
        width = int(heads * size)
        if a["dim"] not in (-1, 1) or a["step"] != 1 or (a["start"], a["end"]) != (end, end + width):
            return None
        end += width
        sources.add(a["self"])
    source = sources.pop()
    shape = program.shape(source)
    return source if not sources and len(shape) == 2 and shape[-1] == end else None
