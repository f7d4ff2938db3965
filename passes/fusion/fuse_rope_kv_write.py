"""Fuses the rotation of queries and keys with the write to the cache, so that a step's tokens are read once."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Pass, PassContext, PassResult, Rejection
from enginewright.passes.framework.match import bound_arguments

from ..ir.program import Program
from ..ir.provenance import WHERE, join_where, where_of

ew = torch.ops.ew

LONGEST_HEAD = 1024
"""The key head size up to which kernels keep a rotated key on their stack."""


class FuseRopeKvWrite(Pass):
    """Fuses the ropes of q and of k of each attention, and the ``ew.kv_write`` of the latter, into
    ``ew.rope_kv_write``.
    """

    name = "fuse_rope_kv_write"

    def __init__(self, ends: bool = False) -> None:
        """Makes a pass. With ``ends``, it also fuses the ``ew.kv_write`` of the same keys to a second cache, into
        ``ew.rope_kv_write_with_ends``.
        """
        self._ends = ends

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        for attention in program.nodes_of(ew.paged_attention.default):
            arguments = bound_arguments(attention)
            q, write = arguments["q"], _write_of(arguments["k_cache"])
            if write is None:
                continue  # the op is another attention's, which comes before
            if ew.rope.default not in (q.target, bound_arguments(write)["k"].target):
                continue  # nothing is rotated
            ends = _write_of(arguments["ends_k_cache"]) if self._ends else None
            writes = [write] if ends is None else [write, ends]
            if (reason := _why_not(program, attention, q, writes)) is not None:
                result.rejected.append(Rejection(write.name, join_where(write.meta[WHERE]), reason))
                continue
            _fuse(program, attention, q, writes)
            result.matched += 1
        return result


def _write_of(cache: Node | None) -> Node | None:
    """Returns the ``ew.kv_write`` whose result a cache is; None if another op wrote it last."""
    write = cache.args[0] if cache is not None and cache.target is operator.getitem else None
    return write if isinstance(write, Node) and write.target is ew.kv_write.default else None


def _why_not(program: Program, attention: Node, q: Node, writes: Sequence[Node]) -> str | None:
    of_each = [bound_arguments(write) for write in writes]
    k, v = of_each[0]["k"], of_each[0]["v"]
    if k.target is not ew.rope.default:
        return "the keys are not rotated right before they are written"
    if q.target is not ew.rope.default:
        return "the queries are not rotated right before attention"
    if q.args[1:] != k.args[1:]:
        return "queries and keys are rotated by different tables"
    if len(q.users) > 1 or not k.users.keys() <= {*writes}:
        return "a rotated query or key is read elsewhere"
    if any((arguments["k"], arguments["v"]) != (k, v) for arguments in of_each):
        return "the second cache has other keys or values"
    if any(arguments["values_in_keys"] for arguments in of_each):
        return "values are a part of the rotated keys"
    if any(reader < attention for write in writes for half in write.users for reader in half.users):
        return "the cache is read before this attention"
    size = program.shape(k)[2]
    return f"heads of {size} are longer than {LONGEST_HEAD}" if size > LONGEST_HEAD else None


def _fuse(program: Program, attention: Node, q: Node, writes: Sequence[Node]) -> None:
    of_each = [bound_arguments(write) for write in writes]
    k, v = of_each[0]["k"], of_each[0]["v"]
    (query, table, interleaved), key = q.args, k.args[0]
    caches = [arguments[name] for arguments in of_each for name in ("k_cache", "v_cache")]
    slots = [arguments["slots"] for arguments in of_each]
    dtypes = [arguments["dtype"] for arguments in of_each]
    stored = () if dtypes == ["f32"] else dtypes
    op = ew.rope_kv_write.default if len(writes) == 1 else ew.rope_kv_write_with_ends.default
    # Before attention, where all of it is there.
    with program.inserting_before(attention):
        fused = program.call(
            op, *caches, query, key, v, table, *slots, interleaved, *stored, where=where_of([q, k, *writes])
        )
        rotated, *written = (
            program.call(operator.getitem, fused, i, where=fused.meta[WHERE]) for i in range(1 + len(caches))
        )
    program.replace(q, rotated)
    for first, write in zip((0, 2), writes, strict=False):
        for user in list(write.users):
            assert user.target is operator.getitem
            program.replace(user, written[first + user.args[1]])  # type: ignore[index, operator]
