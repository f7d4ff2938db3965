"""Turns captured attention into a write to the paged KV cache and attention over that cache.

Layers whose caches have the same shape, format and lifetime are a cache group: their blocks are allocated together, by
one block table and one array of slots.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.fx.node import Node

from enginewright.passes.framework.base import (
    Condition,
    Pass,
    PassContext,
    PassResult,
    describe_node,
    free_of,
)
from enginewright.passes.framework.match import bound_arguments
from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE, CacheGroup
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.kv_formats import CacheDtype
from enginewright.runtime.shared.step_schema import ATTENTION_PORTS, SLOTS, group_port, ports_in

from ..ir.program import Program, cache_input
from ..ir.provenance import WHERE, join_where
from .keep_ends import stored_format

aten, ew = torch.ops.aten, torch.ops.ew

Key = tuple[int, int, int, int, bool, CacheDtype]
"""Window, key/value heads, key head size, value head size, values in keys, format."""


def _has_step_inputs(program: Program) -> list[str]:
    return [f"there is no input {n}" for n in (SLOTS, *ATTENTION_PORTS) if n not in program.inputs]


def _is_causal(program: Program) -> list[str]:
    """Returns the problems: attentions that aren't causal, whose queries see keys that no cache has yet."""
    reasons = []
    for node in program.nodes_of(ew.attention.default):
        arguments = bound_arguments(node)
        if not arguments["causal"] or arguments["biases"] is not None:
            reasons.append(f"{describe_node(node)} is an encoder's, which has no cache")
    return reasons


def _reads_what_was_written(program: Program) -> list[str]:
    """Returns the problems: paged attentions whose caches aren't the results of one ``ew.kv_write`` of this step."""
    reasons = []
    for node in program.nodes_of(ew.paged_attention.default):
        arguments = bound_arguments(node)
        writes = {_written_by(arguments["k_cache"], 0), _written_by(arguments["v_cache"], 1)}
        if len(writes) != 1 or None in writes:
            reasons.append(f"{describe_node(node)} reads caches that this step didn't write")
    return reasons


def _written_by(cache: Any, result: int) -> Node | None:
    if not isinstance(cache, Node) or cache.target is not operator.getitem or cache.args[1] != result:
        return None
    write = cache.args[0]
    return write if isinstance(write, Node) and write.target is ew.kv_write.default else None


class LowerAttention(Pass):
    """Replaces every ``ew.attention`` by ``ew.kv_write`` and ``ew.paged_attention``, and sets the program's cache
    groups.

    New inputs: ``k_cache:LAYER`` [P, K, Nkv, D] and ``v_cache:LAYER`` [P, K, Nkv, Dv], and for each group
    ``block_table:GROUP`` [B, M] and ``slots:GROUP`` [T], in place of ``block_table`` and ``slots``.
    """

    name = "lower_attention"
    requires = (
        Condition("step inputs for a paged cache", _has_step_inputs),
        Condition("attention is causal", _is_causal),
    )
    ensures = (
        free_of(ew.attention.default, name="no attention in the captured form is left"),
        Condition("paged attention reads what this step wrote", _reads_what_was_written),
    )

    def call(self, program: Program, context: PassContext) -> PassResult:
        nodes = program.nodes_of(ew.attention.default)
        groups = _cache_groups(program, nodes, context)
        table, slots = program.inputs["block_table"], program.inputs["slots"]
        for group in groups:
            program.add_input(f"block_table:{group.name}", program.value(table))
            program.add_input(f"slots:{group.name}", program.value(slots))
        group_of = {layer: group for group in groups for layer in group.layers}
        blocks = block_count(program)
        for node in nodes:
            layer = bound_arguments(node)["layer"]
            with program.inserting_before(node):
                new = _paged(program, node, group_of[layer], blocks)
            program.replace(node, new)
        program.cache_groups += groups
        for unused in (table, slots):
            if not unused.users:
                program.graph.erase_node(unused)
        return PassResult(matched=len(nodes))


def _cache_groups(program: Program, nodes: list[Node], context: PassContext) -> tuple[CacheGroup, ...]:
    """Returns the groups in the order of their first layers, named after their window, with a number if that isn't
    unique.
    """
    layers: dict[Key, list[int]] = {}
    seen: set[int] = set()
    for node in nodes:
        arguments = bound_arguments(node)
        layer, window = arguments["layer"], arguments["window"]
        if layer in seen:
            raise PassError(f"{describe_node(node)}: another attention has the layer number {layer} already")
        seen.add(layer)
        k, v = program.value(arguments["k"]), program.value(arguments["v"])
        key = (
            window,
            int(k.shape[1]),
            int(k.shape[2]),
            int(v.shape[2]),
            context.latent_caches and begins(arguments["k"], arguments["v"]),
            stored_format(context.recipe.cache_of(join_where(node.meta[WHERE])), window),
        )
        layers.setdefault(key, []).append(layer)
    groups: list[CacheGroup] = []
    for (window, heads, key_size, value_size, values_in_keys, _), members in layers.items():
        base = f"window{window}" if window else "full"
        alike = sum(1 for g in groups if g.window == window)
        name = f"{base}-{alike + 1}" if alike else base
        groups.append(
            CacheGroup(
                name,
                tuple(sorted(members)),
                heads,
                key_size,
                value_size,
                window,
                values_in_keys=values_in_keys,
            )
        )
    return tuple(groups)


def begins(keys: Node, values: Node) -> bool:
    """Returns True if values are the first channels of keys, by their calls."""
    if values.target is not aten.slice.Tensor or values.args[0] is not keys:
        return False
    a = bound_arguments(values)
    return a["dim"] in (-1, 2) and a["start"] in (None, 0) and a["step"] == 1


def _paged(program: Program, node: Node, group: CacheGroup, blocks: torch.SymInt) -> Node:
    arguments, where, inputs = bound_arguments(node), node.meta[WHERE], program.inputs
    layer = arguments["layer"]
    caches = []
    for plane in group.planes:
        dtype = program.value(arguments[plane.name]).dtype
        with program.fake_mode:
            value = torch.empty((blocks, group.block_size, *plane.shape), dtype=dtype)
        assert isinstance(value, FakeTensor)
        caches.append(program.add_input(cache_input(plane.name, layer), value))
    slots = inputs[group_port(SLOTS, group.name)]
    options = {"values_in_keys": True} if group.values_in_keys else {}
    write = program.call(ew.kv_write.default, *caches, arguments["k"], arguments["v"], slots, where=where, **options)
    written = [program.call(operator.getitem, write, i, where=where) for i in (0, 1)]
    return program.call(
        ew.paged_attention.default,
        arguments["q"],
        *written,
        *ports_in(inputs, ATTENTION_PORTS, group.name).values(),
        arguments["scale"],
        arguments["window"],
        arguments["softcap"],
        arguments["sinks"],
        *(() if arguments["slopes"] is None else (arguments["slopes"],)),
        where=where,
    )


def block_count(program: Program) -> torch.SymInt:
    """Returns a new symbolic size P, the number of blocks in the pool."""
    shape_env = program.fake_mode.shape_env
    assert shape_env is not None
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[None])
    # The example's size is only a hint that no shape depends on.
    pool = program.fake_mode.from_tensor(
        torch.empty(KV_BLOCK_SIZE - 1, device="meta"), symbolic_context=context, source=ConstantSource("P")
    )
    size: Any = pool.shape[0]  # an int to the type checker, a SymInt here
    program.symbols[size.node.expr] = "P"
    return size  # type: ignore[no-any-return]
