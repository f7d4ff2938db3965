"""Stores keys and values in fewer than 32 bits, by the recipe's KV-cache format."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult
from enginewright.passes.framework.match import bound_arguments
from enginewright.runtime.shared.contracts import STATE, CacheGroup
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.kv_formats import KV_FORMATS, LONGEST_HEAD, ROTATED_CACHES, CacheDtype, head_multiples
from enginewright.runtime.shared.step_schema import SLOTS, group_port

from ..ir.program import Program
from .keep_ends import LEAST_WINDOW, add_ends

ew = torch.ops.ew

_PLACE = 5
"""The number of the argument ``dtype`` of ``ew.kv_write``."""


def _writes_as_groups_say(program: Program) -> list[str]:
    dtypes = {group.dtype for group in program.cache_groups}
    written = {bound_arguments(node)["dtype"] for node in program.nodes_of(ew.kv_write.default)}
    return [] if written <= dtypes else [f"keys are written in {sorted(written)}, and caches have {sorted(dtypes)}"]


class RoundKvCache(Pass):
    """Makes every ``ew.kv_write`` round to the recipe's cache format, and sets that format in the cache groups, except
    for states.

    Attention reads the keys and values of its own chunk back from the cache too, so results don't depend on the size of
    chunks. Attention without a cache rounds them to bf16 if that is the format, as its products are then twice as fast.
    A format with ends (``KvFormat.ends``) adds a second cache group to each group.
    """

    name = "round_kv_cache"
    exact = False

    def __init__(self, formats: Collection[CacheDtype] = KV_FORMATS.keys() - {"f32"}) -> None:
        """Makes a pass that rounds to ``formats``. It leaves caches of other formats to the target."""
        self._formats = formats

    ensures = (Condition("keys and values are written in their group's format", _writes_as_groups_say),)

    def wanted(self, context: PassContext) -> bool:
        return context.recipe.cache in self._formats

    def call(self, program: Program, context: PassContext) -> PassResult:
        if not self.wanted(context):
            return PassResult()
        self._check_heads(program, context)
        writes = program.nodes_of(ew.kv_write.default)
        groups = {group.name: self._stored(group, context.recipe.cache) for group in program.cache_groups}
        program.cache_groups = tuple(groups.values())
        by_slots = {program.inputs[group_port(SLOTS, name)]: group for name, group in groups.items()}
        with_ends: dict[str, list[Node]] = {}
        for node in writes:
            group = by_slots[bound_arguments(node)["slots"]]
            node.args = (*node.args[:_PLACE], group.dtype)
            if KV_FORMATS[group.dtype].ends is not None:
                with_ends.setdefault(group.name, []).append(node)
        for name, of_group in with_ends.items():
            add_ends(program, groups[name], of_group)
        attentions = program.nodes_of(ew.attention.default) if context.recipe.cache == "bf16" else []
        for node in attentions:
            node.kwargs = {**node.kwargs, "dtype": "bf16"}
        return PassResult(matched=len(writes) + len(attentions))

    def _stored(self, group: CacheGroup, cache: CacheDtype) -> CacheGroup:
        """Returns a cache group in the recipe's format, or in that of its ends if a window is so short that a second
        cache of them would take more memory.
        """
        if group.kind == STATE:
            return group
        ends = KV_FORMATS[cache].ends
        return group.model_copy(update={"dtype": ends if ends and 0 < group.window < LEAST_WINDOW else cache})

    def _check_heads(self, program: Program, context: PassContext) -> None:
        """Raises UnsupportedModelError naming a cache group whose heads the recipe's format doesn't support."""
        cache = context.recipe.cache
        if cache not in ROTATED_CACHES:
            return
        for group in program.cache_groups:
            sizes = group.key_head_size, group.value_head_size
            multiples = head_multiples(cache)
            fitting = all(size % of == 0 and size <= LONGEST_HEAD for size, of in zip(sizes, multiples, strict=True))
            if group.kind != STATE and not fitting:
                raise UnsupportedModelError(
                    f"a KV cache of {KV_FORMATS[cache].name} has heads of up to {LONGEST_HEAD} channels, in multiples "
                    f"of {multiples[0]} for keys and {multiples[1]} for values; cache group {group.name} has "
                    f"{sizes[0]} and {sizes[1]}",
                    hint="Use another kv_cache.dtype, such as int8.",
                )
