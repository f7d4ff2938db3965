"""Adds second caches, which have the ends of requests in more bits than the first ones: see ``KvFormat.ends``.

::

    cache, k4v4    | 0 ..                                                   .. p |    all tokens, in blocks
    ends,  k8v8    | 0 .. 127 |              | the run before | the run of p |        a window, and the first tokens

A token is written to both. A query reads the ends where they are, and the cache elsewhere. Which of the two it reads
depends on its position and the key's alone, so chunks, batches and cached prefixes change nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Node

from enginewright.passes.framework.match import bound_arguments
from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.kv_formats import END, KV_FORMATS, CacheDtype
from enginewright.runtime.shared.step_schema import BLOCK_TABLE, SLOTS, group_port

from ..ir.program import Program, cache_input
from ..ir.provenance import WHERE

ew = torch.ops.ew

LEAST_WINDOW = 8 * END
"""The shortest window, in tokens, for which a cache of few bits and one of the ends take less memory than 8 bits."""


def stored_format(cache: CacheDtype, window: int) -> CacheDtype:
    """Returns the format in which a layer of a window of ``window`` tokens, or 0, stores the cache of a recipe.

    It is that of the ends if the window is so short that a second cache of them would take more memory.
    """
    ends = KV_FORMATS[cache].ends
    return ends if ends and 0 < window < LEAST_WINDOW else cache


def add_ends(program: Program, group: CacheGroup, writes: Sequence[Node]) -> None:
    """Adds a cache group for the ends of another, and makes its attentions read them.

    New inputs: ``k_ends:LAYER`` and ``v_ends:LAYER`` of the shapes of the other caches, and the table and the slots of
    the new group.

    Args:
        program: the program.
        group: a cache group whose format has ends.
        writes: the calls of ``ew.kv_write`` to the group's caches.
    """
    ends = group.model_copy(
        update={
            "name": f"{group.name}-ends",
            "window": 2 * END,  # a run and the one before it
            "first": END,
            "dtype": KV_FORMATS[group.dtype].ends,
        }
    )
    inputs = program.inputs
    table, slots = (
        program.add_input(group_port(port, ends.name), program.value(inputs[group_port(port, group.name)]))
        for port in (BLOCK_TABLE, SLOTS)
    )
    for write in writes:
        arguments, where = bound_arguments(write), write.meta[WHERE]
        caches = [_like(program, arguments[f"{side}_cache"], side) for side in ("k", "v")]
        (attention,) = {
            user for half in write.users for user in half.users if user.target is ew.paged_attention.default
        }
        with program.inserting_before(attention):
            written = program.call(
                ew.kv_write.default, *caches, arguments["k"], arguments["v"], slots, ends.dtype, where=where
            )
            halves = [program.call(operator.getitem, written, i, where=where) for i in (0, 1)]
        attention.kwargs = {
            **attention.kwargs,
            "ends_k_cache": halves[0],
            "ends_v_cache": halves[1],
            "ends_table": table,
        }
    program.cache_groups += (ends,)


def _like(program: Program, cache: Node, side: str) -> Node:
    """Adds an input for the second cache of a layer, in the shape of its first cache, and returns it. ``side`` is "k"
    or "v".
    """
    with program.fake_mode:
        value = torch.empty_like(program.value(cache))
    assert isinstance(value, FakeTensor)
    return program.add_input(cache_input(side, int(str(cache.target).rpartition(":")[2]), ends=True), value)
