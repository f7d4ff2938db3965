"""Fuses the rotation of queries and keys with the write to the cache, so that a step's tokens are read once."""

from __future__ import annotations

import operator

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

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        for attention in program.nodes_of(ew.paged_attention.default):
            q, k_cache = (bound_arguments(attention)[name] for name in ("q", "k_cache"))
            write = k_cache.args[0] if k_cache.target is operator.getitem else None
            if not isinstance(write, Node) or write.target is not ew.kv_write.default:
                continue  # the op is another attention's, which comes before
            if ew.rope.default not in (q.target, bound_arguments(write)["k"].target):
                continue  # nothing is rotated
            if (reason := _why_not(program, attention, q, write)) is not None:
                result.rejected.append(Rejection(write.name, join_where(write.meta[WHERE]), reason))
                continue
            _fuse(program, attention, q, write)
            result.matched += 1
        return result


def _why_not(program: Program, attention: Node, q: Node, write: Node) -> str | None:
    k = bound_arguments(write)["k"]
    if k.target is not ew.rope.default:
        return "the keys are not rotated right before they are written"
    if q.target is not ew.rope.default:
        return "the queries are not rotated right before attention"
    if q.args[1:] != k.args[1:]:
        return "queries and keys are rotated by different tables"
    if len(q.users) > 1 or len(k.users) > 1:
        return "a rotated query or key is read elsewhere"
    if bound_arguments(write)["values_in_keys"]:
        return "values are a part of the rotated keys"
    if any(reader < attention for half in write.users for reader in half.users):
        return "the cache is read before this attention"
    size = program.shape(k)[2]
    return f"heads of {size} are longer than {LONGEST_HEAD}" if size > LONGEST_HEAD else None


def _fuse(program: Program, attention: Node, q: Node, write: Node) -> None:
    arguments = bound_arguments(write)
    k = arguments["k"]
    stored = () if arguments["dtype"] == "f32" else (arguments["dtype"],)
    (query, table, interleaved), key = q.args, k.args[0]
    # Before attention, where all of it is there.
    with program.inserting_before(attention):
        fused = program.call(
            ew.rope_kv_write.default,
            *(
                arguments["k_cache"],
                arguments["v_cache"],
                query,
                key,
                arguments["v"],
                table,
                arguments["slots"],
                interleaved,
                *stored,
            ),
            where=where_of([q, k, write]),
        )
        rotated, *caches = (program.call(operator.getitem, fused, i, where=fused.meta[WHERE]) for i in range(3))
    program.replace(q, rotated)
    for user in list(write.users):
        assert user.target is operator.getitem
        program.replace(user, caches[user.args[1]])  # type: ignore[index]
